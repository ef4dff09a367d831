"""Checks a cluster against Google Cloud: project, APIs, zone, machines, quotas, images, network, rights and bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor import machines
from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds import rest
from raytf.doctor.clouds.rest import GoogleAccount, NoCredentials, RestError
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, Severity, error, listed, refuses_nodes, stops_ray_up
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe.queries import (
    RAY_PORTS,
    ProbeResults,
    Query,
    all_nodes,
    bucket_parts,
    check_bucket,
    in_other_region,
    lacks_driver,
    no_answer,
    no_credentials,
    no_driver,
    no_right,
    open_to_world,
    over_quota,
    refused,
    run,
    small_disk,
    ssh_closed,
    wrong_architecture,
)

_UNSEEN = "the project, its APIs, the zone, quotas, images, the network, accounts, rights and the bucket"
_LOGIN = "Run `gcloud auth application-default login` again; tokens expire after an hour."
_APIS = ("compute", "iam", "cloudresourcemanager")
#: Query -> the right that it needs; the API's own message often names it, but not always.
_RIGHTS = {
    "APIs": "serviceusage.services.get",
    "zone and machines": "compute.zones.get, compute.machineTypes.get and compute.acceleratorTypes.get",
    "quotas": "compute.regions.get and compute.projects.get",
    "images": "compute.images.getFromFamily",
    "network": "compute.firewalls.list and compute.subnetworks.list",
    "service accounts": "iam.serviceAccounts.get",
    "roles": "resourcemanager.projects.getIamPolicy",
    "project": "resourcemanager.projects.get",
}
#: Roles that include the right to write objects.
_WRITERS = {f"roles/storage.{role}" for role in ("admin", "objectAdmin", "objectUser", "legacyBucketOwner")}
_WRITERS |= {"roles/owner", "roles/editor"}
#: The rights that the caller of `ray up` needs.
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
    # Ray always creates a service account for the head, whatever the file says, and grants it roles.
    "iam.serviceAccounts.create",
    "resourcemanager.projects.setIamPolicy",
)


def inspect(document: Document, here: Surroundings, need: JobNeeds | None) -> ProbeResults:
    """Check a cluster, and the storage of a job, against Google Cloud."""
    seen = ProbeResults()
    if not isinstance(document.get("provider", "project_id"), str):
        return seen  # the offline part reports it
    try:
        google = rest.google_account(document, here.environ)
    except NoCredentials as problem:
        return ProbeResults([no_credentials("Google Cloud", _UNSEEN, str(problem))])
    except RestError as problem:
        return ProbeResults([no_answer("credentials", problem)])
    try:
        project = google.api("cloudresourcemanager").get(f"/projects/{google.project}")
    except RestError as problem:
        return ProbeResults([_no_project(google, problem)])
    state = project.get("lifecycleState", "?")
    seen.notes.append(f"Google Cloud project {google.project} ({state}), token of {google.source}")
    if state not in ("ACTIVE", "?"):
        return ProbeResults([_no_project(google, RestError(404, "", f"it is {state}"))], seen.notes)
    types = all_nodes(document)
    queries = [
        Query("APIs", partial(_apis, google, types)),
        Query("zone and machines", partial(_machines, google, document, types)),
        Query("quotas", partial(_quotas, google, document, types)),
        Query("images", partial(_images, google, document, types)),
        Query("network", partial(_network, google, document, types)),
        Query("service accounts", partial(_service_accounts, google, types)),
        Query("rights", partial(_caller, google, document, types)),
    ]
    place = bucket_parts(need.storage) if need is not None else None
    if need is not None and place is not None and place[0] == "gs":
        queries.append(Query("bucket", partial(check_bucket, need.storage)))
        queries.append(Query("roles", partial(_roles, google, types, place[1])))
        queries.append(Query("place of the bucket", partial(_bucket_region, google, document, place[1])))
    seen.findings += run(queries, _explain)
    return seen


def _no_project(google: GoogleAccount, problem: RestError) -> ConfigFinding:
    if problem.status == 401:
        return refused("Google Cloud", problem, _LOGIN)
    if problem.status == 0:
        return no_answer("project", problem)
    if "SERVICE_DISABLED" in problem.reason:
        return _disabled("cloudresourcemanager", google.project)
    what = f"project {google.project!r} does not exist, or these credentials cannot see it: {problem}"
    fix = "Write the id (not the name) of your project, as `gcloud projects list` shows it."
    return stops_ray_up("project-missing", ("provider", "project_id"), what, fix)


def _explain(query: Query, problem: Exception) -> ConfigFinding:
    if isinstance(problem, RestError):
        if problem.status == 401:
            return refused("Google Cloud", problem, _LOGIN)
        if "SERVICE_DISABLED" in problem.reason or "accessNotConfigured" in problem.reason:
            return no_answer(query.what, "the API for it is disabled")
        if problem.is_denied:
            return no_right(query.what, _RIGHTS.get(query.what, "a right that reads it"))
    return no_answer(query.what, f"{type(problem).__name__}: {problem}")


def _disabled(name: str, project: str) -> ConfigFinding:
    what = f"{name}.googleapis.com is not enabled in {project}"
    why = "`ray up` exits, or the head starts no worker."
    fix = f"Run `gcloud services enable {name}.googleapis.com --project {project}`."
    return error("api-disabled", ("provider", "project_id"), what, why, fix)


def _apis(google: GoogleAccount, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    wanted = [*_APIS, *(["tpu"] if any(map(_is_tpu, types)) else [])]
    names = "&".join(f"names=projects/{google.project}/services/{api}.googleapis.com" for api in wanted)
    answer = google.api("serviceusage").get(f"/projects/{google.project}/services:batchGet?{names}")
    on = {s["name"].rpartition("/")[2] for s in answer.get("services", ()) if s.get("state") == "ENABLED"}
    for api in wanted:
        if f"{api}.googleapis.com" not in on:
            yield _disabled(api, google.project)


def _is_tpu(t: NodeType) -> bool:
    """Return whether a node type is a TPU, which another API starts."""
    return "machineType" not in t.config and ("acceleratorType" in t.config or "acceleratorConfig" in t.config)


def _machines(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    zones = fallback.zones_of(document.mapping("provider"))
    for zone in zones:
        for finding in _in_zone(google, zone, types):
            # If there are several zones, another one may offer the machine.
            yield finding if len(zones) == 1 else replace(finding, severity=Severity.WARNING)


def _in_zone(google: GoogleAccount, zone: str, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    compute, base = google.api("compute"), f"/projects/{google.project}/zones/{zone}"
    try:
        is_up = compute.get(base).get("status") == "UP"
    except RestError as problem:
        if not problem.is_missing and problem.status != 400:
            raise
        is_up = False
    if not is_up:
        what, why = f"zone {zone!r} does not exist, or is down", "`ray up` exits, or waits until the zone is back."
        fix = "Write one zone such as us-central1-a; `gcloud compute zones list` shows them."
        yield error("zone-missing", ("provider", "availability_zone"), what, why, fix)
        return
    for t in types:
        path: Path = (*t.path, "node_config")
        if _is_tpu(t):
            yield from _tpu(google, t, zone)
            continue
        name = str(t.config.get("machineType", "")).rpartition("/")[2]
        if name and "custom" not in name and compute.find(f"{base}/machineTypes/{name}") is None:
            what = f"{name} is not offered in {zone}"
            fix = f"Find its zones with `gcloud compute machine-types list --filter=name={name}`."
            yield refuses_nodes("Google", "instance-type-not-offered", (*path, "machineType"), what, fix)
        attached = t.config.get("guestAccelerators")
        for i, entry in enumerate(attached if isinstance(attached, list) else ()):
            kind = str(entry.get("acceleratorType", "")).rpartition("/")[2] if isinstance(entry, dict) else ""
            if kind and compute.find(f"{base}/acceleratorTypes/{kind}") is None:
                what, where = f"{kind} is not offered in {zone}", (*path, "guestAccelerators", i)
                fix = f"Find its zones with `gcloud compute accelerator-types list --filter=name={kind}`."
                yield refuses_nodes("Google", "accelerator-not-offered", where, what, fix)


def _tpu(google: GoogleAccount, t: NodeType, zone: str) -> Iterator[ConfigFinding]:
    base = f"/projects/{google.project}/locations/{zone}"
    for key, lists in (("acceleratorType", "accelerator-types"), ("runtimeVersion", "versions")):
        name = machines.accelerator_type(t.config) if key == "acceleratorType" else t.config.get(key)
        if isinstance(name, str) and google.api("tpu").find(f"{base}/{key}s/{name}") is None:
            what, fix = f"Cloud TPU has no {name} in {zone}", f"See `gcloud compute tpus {lists} list --zone {zone}`."
            yield refuses_nodes("Google", "accelerator-not-offered", (*t.path, "node_config", key), what, fix)


def _quotas(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    region, compute = document.get("provider", "region"), google.api("compute")
    if not isinstance(region, str):
        return
    quotas = {q["metric"]: q for q in compute.get(f"/projects/{google.project}/regions/{region}").get("quotas", ())}
    for quota in compute.get(f"/projects/{google.project}").get("quotas", ()):
        if quota["metric"] == "GPUS_ALL_REGIONS":
            quotas["GPUS_ALL_REGIONS"] = quota
    wanted: dict[str, list[tuple[NodeType, float]]] = defaultdict(list)
    for t in types:
        for metric, each in _metrics(t):
            if metric in quotas:
                wanted[metric].append((t, each))
    for metric, members in sorted(wanted.items()):
        limit = quotas[metric]["limit"]
        room = limit - quotas[metric].get("usage", 0)
        yield from over_quota(
            document,
            "gcp",
            f"the quota {metric} has room for {room:g} of {limit:g}",
            members,
            room,
            "QUOTA_EXCEEDED",
            partial("Ask for {2:g} of {0} in {1}: console, IAM & Admin, Quotas.".format, metric, region),
        )


def _metrics(t: NodeType) -> Iterator[tuple[str, float]]:
    """Yield the quotas that a node counts against, each with the amount that it uses."""
    if t.machine is None or t.machine.tpus:
        return
    spot = "PREEMPTIBLE_" if t.market == "spot" else ""
    if t.machine.gpus:
        kind = t.machine.gpu.upper().replace("-", "_").replace(" ", "_")
        yield f"{spot}NVIDIA_{kind}_GPUS", t.machine.gpus
        yield "GPUS_ALL_REGIONS", t.machine.gpus
    if t.machine.name.split("-")[0] in ("e2", "n1", "f1", "g1"):
        yield f"{spot}CPUS", t.machine.cpus


def _images(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find images that do not exist, or do not fit the disk, the machine or its GPU."""
    seen: dict[str, dict[str, Any] | None] = {}
    for t in types:
        disks = t.config.get("disks")
        for i, disk in enumerate(disks if isinstance(disks, list) else ()):
            setup = disk.get("initializeParams") if isinstance(disk, dict) else None
            source = setup.get("sourceImage") if isinstance(setup, dict) else None
            if not isinstance(setup, dict) or not isinstance(source, str) or "projects/" not in source:
                continue
            path = (*t.path, "node_config", "disks", i, "initializeParams")
            name = source[source.index("projects/") :]
            if name not in seen:
                seen[name] = _image(google, name)
            image = seen[name]
            if image is None:
                what = f"there is no image {name}, or these credentials cannot use it"
                fix = "`gcloud compute images list --filter=family:ubuntu` shows Ubuntu's images; "
                fix += "families are projects/PROJECT/global/images/family/FAMILY."
                yield refuses_nodes("Google", "image-missing", (*path, "sourceImage"), what, fix)
                continue
            yield from _fits(t, path, setup, image)
            about = f"{name} {image.get('name', '')} {image.get('description', '')}"
            has_gpu = t.machine is not None and t.machine.gpus and disk.get("boot")
            if has_gpu and lacks_driver(document, t, about):
                family = "Use a family of projects/ubuntu-os-accelerator-images"
                yield no_driver((*path, "sourceImage"), image["name"], family)


def _image(google: GoogleAccount, name: str) -> dict[str, Any] | None:
    try:
        image: dict[str, Any] = google.api("compute").get(f"/{name}")
    except RestError as problem:
        if problem.is_missing or (problem.is_denied and google.project not in name):
            return None
        raise
    return image if image.get("status", "READY") == "READY" else None


def _fits(t: NodeType, path: Path, setup: dict[str, Any], image: dict[str, Any]) -> Iterator[ConfigFinding]:
    least = int(image.get("diskSizeGb", 0))
    yield from small_disk((*path, "diskSizeGb"), setup.get("diskSizeGb"), least, "GB", image["name"], "Google")
    family = t.machine.name.split("-")[0] if t.machine else ""
    runs = "ARM64" if family in ("t2a", "c4a", "a4x") else "X86_64"
    built = image.get("architecture")
    if family and built and built != runs:
        machine = str(t.config.get("machineType"))
        yield wrong_architecture((*path, "sourceImage"), image["name"], built, machine, runs, "Google")


def _caller(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find rights that the caller of `ray up` lacks. The query itself needs no right."""
    wanted = [*_WANTED]
    if not document.get("auth", "ssh_private_key"):
        wanted.append("compute.projects.setCommonInstanceMetadata")  # Ray adds its SSH key to it
    if not document.get("provider", "use_internal_ips"):
        wanted.append("compute.subnetworks.useExternalIp")
    if any(map(_is_tpu, types)):
        wanted += ["tpu.nodes.create", "tpu.nodes.delete"]
    path = f"/projects/{google.project}:testIamPermissions"
    answer = google.api("cloudresourcemanager").post(path, {"permissions": wanted})
    lacks = sorted(set(wanted) - set(answer.get("permissions", ())))
    if lacks:
        what, why = f"you may not {listed(lacks, 20)} in {google.project}", "`ray up` exits, or leaves nodes behind."
        fix = "Ask for roles/compute.admin, roles/iam.serviceAccountAdmin, roles/iam.serviceAccountUser and "
        fix += "roles/resourcemanager.projectIamAdmin (and roles/tpu.admin for TPUs)."
        yield error("right-missing", ("provider", "project_id"), what, why, fix)


def _service_accounts(google: GoogleAccount, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find service accounts of nodes that do not exist or are disabled."""
    for email, t in _emails(types).items():
        account = google.api("iam").find(f"/projects/-/serviceAccounts/{email}")
        if account is None or account.get("disabled"):
            path = (*t.path, "node_config", "serviceAccounts")
            what = f"service account {email} {'does not exist' if account is None else 'is disabled'}"
            command = f"gcloud iam service-accounts create {email.partition('@')[0]} --project {google.project}"
            fix = f"Run `{command}`, and grant it its role on the bucket (docs/clusters/gcp.md)."
            yield refuses_nodes("Google", "service-account-missing", path, what, fix)


def _roles(google: GoogleAccount, types: Sequence[NodeType], name: str) -> Iterator[ConfigFinding]:
    """Find service accounts of nodes that have neither a role that writes to the bucket nor a custom role."""
    crm = google.api("cloudresourcemanager")
    bindings = list(crm.post(f"/projects/{google.project}:getIamPolicy", {}).get("bindings", ()))
    policy = google.api("storage").find(f"/b/{name}/iam")
    if policy is None:
        return  # check_bucket reports that there is no such bucket
    bindings += policy.get("bindings", ())
    for email, t in _emails(types).items():
        members = {f"serviceAccount:{email}", "allUsers", "allAuthenticatedUsers"}
        roles = {b["role"] for b in bindings if members & set(b.get("members", ()))}
        if not roles & _WRITERS and not any("/roles/" in role for role in roles):
            path, what = (*t.path, "node_config", "serviceAccounts"), f"{email} has no role that writes to gs://{name}"
            command = f"gcloud storage buckets add-iam-policy-binding gs://{name} --role=roles/storage.objectUser"
            fix = f"Run `{command} --member=serviceAccount:{email}`."
            yield error("right-missing", path, what, "The first checkpoint fails.", fix)


def _bucket_region(google: GoogleAccount, document: Document, name: str) -> Iterator[ConfigFinding]:
    """Find a bucket that is in another region."""
    region = document.get("provider", "region")
    place = str((google.api("storage").find(f"/b/{name}") or {}).get("location", "")).lower()
    wide = {"us": "us-", "eu": "europe-", "asia": "asia-"}.get(place)
    if isinstance(region, str) and place and place != region and not (wide and region.startswith(wide)):
        yield in_other_region(name, place, region)


def _network(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find a region without a subnet, closed SSH, and ports of Ray that are open to the world.

    Only the network of the first subnet is checked, which Ray uses if node_config names none.
    """
    if all("networkInterfaces" in t.config or "networkConfig" in t.config for t in types):
        return
    compute, region = google.api("compute"), document.get("provider", "region")
    subnets = compute.pages(f"/projects/{google.project}/regions/{region}/subnetworks", "items")
    if not subnets:
        what = f"the project has no subnet in {region}"
        fix = "Run `gcloud compute networks create default --subnet-mode=auto`."
        yield stops_ray_up("no-subnet", ("provider", "region"), what, fix, "`Should not reach here`")
        return
    # Ray uses the first subnet in the list.
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
        what = f"no firewall rule of network {home!r} allows SSH (port 22)"
        command = f"gcloud compute firewall-rules create {home}-allow-ssh --network {home} --allow tcp:22"
        yield ssh_closed(("provider",), what, f"Run `{command} --source-ranges YOUR_ADDRESS/32`.")
    for rule in rules:
        world = {"0.0.0.0/0", "::/0"} & set(rule.get("sourceRanges", ()))
        behind = [f"{port} ({what})" for port, what in RAY_PORTS.items() if _opens(rule, port)]
        if world and behind:
            what = f"firewall rule {rule['name']} opens {listed(behind)} to everyone"
            command = f"gcloud compute firewall-rules delete {rule['name']}"
            yield open_to_world(("provider",), what, f"Run `{command}`; `ray dashboard` opens a tunnel.")


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
    """Return the service accounts of nodes, each with the first node type that uses it."""
    emails: dict[str, NodeType] = {}
    for t in types:
        accounts = t.config.get("serviceAccounts")
        for entry in accounts if isinstance(accounts, list) else [t.config.get("serviceAccount")]:
            email = entry.get("email") if isinstance(entry, dict) else None
            if isinstance(email, str) and "@" in email:
                emails.setdefault(email, t)
    return emails
