"""Networks, service accounts, roles and the bucket on Google Cloud."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raytf.doctor.clouds.rest import GoogleAccount, RestError
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, listed, warning
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe.queries import RAY_PORTS

#: Roles that write objects.
_WRITERS = {f"roles/storage.{role}" for role in ("admin", "objectAdmin", "objectUser", "legacyBucketOwner")}
_WRITERS |= {"roles/owner", "roles/editor"}
_WANTED = (
    "compute.disks.create",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.subnetworks.use",
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.get",
)


def caller(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find rights that whoever calls `ray up` lacks; asking for them needs none."""
    wanted = [*_WANTED]
    if not document.get("auth", "ssh_private_key"):
        wanted.append("compute.projects.setCommonInstanceMetadata")  # Ray puts its own key there
    # Ray makes an account of its own for the head, whatever the config says, and gives it its roles.
    wanted += ["iam.serviceAccounts.create", "resourcemanager.projects.setIamPolicy"]
    if not document.get("provider", "use_internal_ips"):
        wanted.append("compute.subnetworks.useExternalIp")
    if any("machineType" not in t.config and "acceleratorType" in t.config for t in types):
        wanted += ["tpu.nodes.create", "tpu.nodes.delete"]
    answer = google.api("cloudresourcemanager").post(
        f"/projects/{google.project}:testIamPermissions", {"permissions": wanted}
    )
    lacks = sorted(set(wanted) - set(answer.get("permissions", ())))
    if lacks:
        yield error(
            "right-missing",
            ("provider", "project_id"),
            f"you may not {listed(lacks, 20)} in {google.project}",
            "`ray up` ends, or leaves nodes behind.",
            "Ask for roles/compute.admin, roles/iam.serviceAccountAdmin, roles/iam.serviceAccountUser and "
            "roles/resourcemanager.projectIamAdmin (and roles/tpu.admin for TPUs).",
        )


def service_accounts(google: GoogleAccount, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find accounts of nodes that are not there."""
    for email, t in _emails(types).items():
        try:
            account = google.api("iam").get(f"/projects/-/serviceAccounts/{email}")
            why = "is disabled" if account.get("disabled") else None
        except RestError as problem:
            if not problem.is_missing:
                raise
            why = "is not there"
        if why:
            yield error(
                "service-account-missing",
                (*t.path, "node_config", "serviceAccounts"),
                f"service account {email} {why}",
                "Google refuses each node of this type, which Ray repeats forever.",
                f"Run `gcloud iam service-accounts create {email.partition('@')[0]} --project {google.project}`, "
                "and give it its role on the bucket (docs/clusters/gcp.md).",
            )


def on_bucket(google: GoogleAccount, types: Sequence[NodeType], bucket: str) -> Iterator[ConfigFinding]:
    """Find accounts of nodes that no role lets write to the bucket; roles of one's own are not read."""
    crm = google.api("cloudresourcemanager")
    bindings = list(crm.post(f"/projects/{google.project}:getIamPolicy", {}).get("bindings", ()))
    try:
        bindings += google.api("storage").get(f"/b/{bucket}/iam").get("bindings", ())
    except RestError as problem:
        if problem.is_missing:
            return  # the probe says that there is no such bucket
        raise
    for email, t in _emails(types).items():
        members = {f"serviceAccount:{email}", "allUsers", "allAuthenticatedUsers"}
        roles = {b["role"] for b in bindings if members & set(b.get("members", ()))}
        if not roles & _WRITERS and not any("/roles/" in role for role in roles):
            yield error(
                "right-missing",
                (*t.path, "node_config", "serviceAccounts"),
                f"{email} has no role that writes to gs://{bucket}",
                "The first checkpoint fails.",
                f"Run `gcloud storage buckets add-iam-policy-binding gs://{bucket} --role=roles/storage.objectUser "
                f"--member=serviceAccount:{email}`.",
            )


def bucket_region(google: GoogleAccount, document: Document, bucket: str) -> Iterator[ConfigFinding]:
    """Find a bucket that is far away."""
    region = document.get("provider", "region")
    try:
        place = str(google.api("storage").get(f"/b/{bucket}").get("location", "")).lower()
    except RestError as problem:
        if problem.is_missing:
            return
        raise
    wide = {"us": "us-", "eu": "europe-", "asia": "asia-"}.get(place)
    if isinstance(region, str) and place and place != region and not (wide and region.startswith(wide)):
        yield warning(
            "bucket-region",
            ("provider", "region"),
            f"bucket {bucket} is in {place}, the cluster in {region}",
            "Each checkpoint crosses regions: slower, and paid for by the GB.",
            f"Take a bucket in {region}, or start the cluster in {place}.",
        )


def network(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find a network without a subnet here, SSH that is closed, and ports of Ray that are open to the world.

    Only the network `default` is looked at, which Ray takes where node_config names none.
    """
    if all("networkInterfaces" in t.config or "networkConfig" in t.config for t in types):
        return
    compute, region = google.api("compute"), document.get("provider", "region")
    subnets = compute.pages(f"/projects/{google.project}/regions/{region}/subnetworks", "items")
    if not subnets:
        yield error(
            "no-subnet",
            ("provider", "region"),
            f"the project has no subnet in {region}",
            "`ray up` ends: Should not reach here (no subnet).",
            "Run `gcloud compute networks create default --subnet-mode=auto`.",
        )
        return
    # Ray takes the first subnet that the list has.
    home = str(subnets[0].get("network", "")).rpartition("/")[2]
    rules = [
        rule
        for rule in compute.pages(f"/projects/{google.project}/global/firewalls", "items")
        if str(rule.get("network", "")).rpartition("/")[2] == home
        and rule.get("direction", "INGRESS") == "INGRESS"
        and not rule.get("disabled")
        and not rule.get("targetTags")
        and not rule.get("targetServiceAccounts")
    ]
    if not any(_opens(rule, 22) for rule in rules):
        yield error(
            "ssh-closed",
            ("provider",),
            f"no firewall rule of network {home!r} lets SSH (port 22) in",
            "The node comes up, and `ray up` waits for SSH until it gives up while it is paid for.",
            f"Run `gcloud compute firewall-rules create {home}-allow-ssh --network {home} --allow tcp:22 "
            "--source-ranges YOUR_ADDRESS/32`.",
        )
    for rule in rules:
        world = {"0.0.0.0/0", "::/0"} & set(rule.get("sourceRanges", ()))
        behind = [f"{port} ({what})" for port, what in RAY_PORTS.items() if _opens(rule, port)]
        if world and behind:
            yield error(
                "open-to-world",
                ("provider",),
                f"firewall rule {rule['name']} opens {listed(behind)} to everybody",
                "Whoever reaches the dashboard or the job server runs code with the cluster's rights.",
                f"Run `gcloud compute firewall-rules delete {rule['name']}`; `ray dashboard` makes a tunnel.",
            )


def _opens(rule: dict[str, Any], port: int) -> bool:
    for allowed in rule.get("allowed", ()):
        if allowed.get("IPProtocol") not in ("tcp", "all", "6"):
            continue
        ports = allowed.get("ports")
        if not ports:
            return True
        for text in ports:
            low, _, high = str(text).partition("-")
            if int(low) <= port <= int(high or low):
                return True
    return False


def _emails(types: Sequence[NodeType]) -> dict[str, NodeType]:
    """Return the first node type of each service account."""
    emails: dict[str, NodeType] = {}
    for t in types:
        accounts = t.config.get("serviceAccounts")
        entries = accounts if isinstance(accounts, list) else [t.config.get("serviceAccount")]
        for entry in entries:
            email = entry.get("email") if isinstance(entry, dict) else None
            if isinstance(email, str) and "@" in email:
                emails.setdefault(email, t)
    return emails
