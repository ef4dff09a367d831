"""Checks a cluster against Google Cloud: project, APIs, zone, machines, quotas, images, accounts and the bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds import rest
from raytf.doctor.clouds.rest import GoogleAccount, NoCredentials, RestError
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Severity, error, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import NodeType, most_used, most_workers
from raytf.doctor.probe import bucket, gcp_permissions, images
from raytf.doctor.probe.queries import ProbeResults, Query, all_nodes, no_answer, no_credentials, no_right, refused, run

_UNSEEN = "the project, its APIs, the zone, quotas, images, the network, accounts, rights and the bucket"
_LOGIN = "Run `gcloud auth application-default login` again; tokens end after an hour."
_APIS = ("compute", "iam", "cloudresourcemanager")
#: Question -> what it takes to be asked; the API's own message often names it, but not always.
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


def inspect(document: Document, here: Surroundings, need: JobNeeds | None) -> ProbeResults:
    """Ask Google Cloud everything that concerns a cluster."""
    seen = ProbeResults()
    if not isinstance(document.get("provider", "project_id"), str):
        return seen  # the offline part has said so
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
    seen.notes.append(
        f"Google Cloud project {google.project} ({project.get('lifecycleState', '?')}), token of {google.source}"
    )
    if project.get("lifecycleState", "ACTIVE") != "ACTIVE":
        refusal = RestError(404, "", f"it is {project['lifecycleState']}")
        return ProbeResults([_no_project(google, refusal)], seen.notes)
    types = all_nodes(document)
    queries = [
        Query("APIs", partial(_apis, google, types)),
        Query("zone and machines", partial(_machines, google, document, types)),
        Query("quotas", partial(_quotas, google, document, types)),
        Query("images", partial(check_images, google, document, types)),
        Query("network", partial(gcp_permissions.network, google, document, types)),
        Query("service accounts", partial(gcp_permissions.service_accounts, google, types)),
        Query("rights", partial(gcp_permissions.caller, google, document, types)),
    ]
    place = bucket.parts(need.storage) if need is not None else None
    if need is not None and place is not None and place[0] == "gs":
        queries.append(Query("bucket", partial(bucket.check, need.storage)))
        queries.append(Query("roles", partial(gcp_permissions.on_bucket, google, types, place[1])))
        queries.append(Query("place of the bucket", partial(gcp_permissions.bucket_region, google, document, place[1])))
    seen.findings += run(queries, _explain)
    return seen


def _no_project(google: GoogleAccount, problem: RestError) -> ConfigFinding:
    if problem.status == 401:
        return refused("Google Cloud", problem, _LOGIN)
    if problem.status == 0:
        return no_answer("project", problem)
    if "SERVICE_DISABLED" in problem.reason:
        return _disabled("cloudresourcemanager", google.project)
    return error(
        "project-missing",
        ("provider", "project_id"),
        f"project {google.project!r} is not there, or not for these credentials: {problem}",
        "`ray up` tries to create it and ends.",
        "Give the id (not the name) of a project of yours; `gcloud projects list` has them.",
    )


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
    return error(
        "api-disabled",
        ("provider", "project_id"),
        f"{name}.googleapis.com is not enabled in {project}",
        "`ray up` ends, or the head starts no worker.",
        f"Run `gcloud services enable {name}.googleapis.com --project {project}`.",
    )


def _apis(google: GoogleAccount, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    wanted = [*_APIS, *(["tpu"] if any(is_tpu(t) for t in types) else [])]
    names = "&".join(f"names=projects/{google.project}/services/{api}.googleapis.com" for api in wanted)
    answer = google.api("serviceusage").get(f"/projects/{google.project}/services:batchGet?{names}")
    on = {s["name"].rpartition("/")[2] for s in answer.get("services", ()) if s.get("state") == "ENABLED"}
    for api in wanted:
        if f"{api}.googleapis.com" not in on:
            yield _disabled(api, google.project)


def is_tpu(t: NodeType) -> bool:
    """Return whether a node type is a TPU, which another API starts."""
    return "machineType" not in t.config and ("acceleratorType" in t.config or "acceleratorConfig" in t.config)


def _machines(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    zones = fallback.zones_of(document.mapping("provider"))
    for zone in zones:
        for finding in _in_zone(google, zone, types):
            # With several zones the others may have it.
            yield finding if len(zones) == 1 else replace(finding, severity=Severity.WARNING)


def _in_zone(google: GoogleAccount, zone: str, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    compute, base = google.api("compute"), f"/projects/{google.project}/zones/{zone}"
    try:
        up = compute.get(base).get("status") == "UP"
    except RestError as problem:
        if not problem.is_missing and problem.status != 400:
            raise
        up = False
    if not up:
        yield error(
            "zone-missing",
            ("provider", "availability_zone"),
            f"zone {zone!r} is not there, or is down",
            "`ray up` ends, or waits until the zone is back.",
            "Give one zone such as us-central1-a; `gcloud compute zones list` has them.",
        )
        return
    for t in types:
        if is_tpu(t):
            yield from _tpu(google, t, zone)
            continue
        name = str(t.config.get("machineType", "")).rpartition("/")[2]
        if name and "custom" not in name and not _there(google, "compute", f"{base}/machineTypes/{name}"):
            yield error(
                "instance-type-not-offered",
                (*t.path, "node_config", "machineType"),
                f"{name} is not offered in {zone}",
                "Google refuses each node of this type, which Ray repeats forever.",
                f"`gcloud compute machine-types list --filter=name={name}` says where it is.",
            )
        attached = t.config.get("guestAccelerators")
        for i, entry in enumerate(attached if isinstance(attached, list) else ()):
            kind = str(entry.get("acceleratorType", "")).rpartition("/")[2] if isinstance(entry, dict) else ""
            if kind and not _there(google, "compute", f"{base}/acceleratorTypes/{kind}"):
                yield error(
                    "accelerator-not-offered",
                    (*t.path, "node_config", "guestAccelerators", i),
                    f"{kind} is not offered in {zone}",
                    "Google refuses each node of this type, which Ray repeats forever.",
                    f"`gcloud compute accelerator-types list --filter=name={kind}` says where it is.",
                )


def _tpu(google: GoogleAccount, t: NodeType, zone: str) -> Iterator[ConfigFinding]:
    base = f"/projects/{google.project}/locations/{zone}"
    for key, folder in (("acceleratorType", "acceleratorTypes"), ("runtimeVersion", "runtimeVersions")):
        name = t.config.get(key)
        if isinstance(name, str) and not _there(google, "tpu", f"{base}/{folder}/{name}"):
            yield error(
                "accelerator-not-offered",
                (*t.path, "node_config", key),
                f"Cloud TPU has no {name} in {zone}",
                "Google refuses each node of this type, which Ray repeats forever.",
                f"See `gcloud compute tpus {'accelerator-types' if 'Types' in folder else 'versions'} list "
                f"--zone {zone}`.",
            )


def _there(google: GoogleAccount, api: str, path: str) -> bool:
    try:
        google.api(api).get(path)
    except RestError as problem:
        if problem.is_missing:
            return False
        raise
    return True


def _quotas(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    region = document.get("provider", "region")
    if not isinstance(region, str):
        return
    compute = google.api("compute")
    quotas = {q["metric"]: q for q in compute.get(f"/projects/{google.project}/regions/{region}").get("quotas", ())}
    quotas |= {q["metric"]: q for q in compute.get(f"/projects/{google.project}").get("quotas", ())
               if q["metric"] == "GPUS_ALL_REGIONS"}  # fmt: skip
    wanted: dict[str, list[tuple[NodeType, float]]] = defaultdict(list)
    for t in types:
        for metric, each in _metrics(t):
            wanted[metric].append((t, each))
    for metric, members in sorted(wanted.items()):
        quota = quotas.get(metric)
        if quota is None:
            continue
        room = quota["limit"] - quota.get("usage", 0)
        ask = f"Ask for more of {metric} in {region}: console, IAM & Admin, Quotas"
        small = [(t, each) for t, each in members if each > room]
        for t, each in small:
            yield error(
                "quota-too-small",
                (*t.path, "node_config"),
                f"the quota {metric} has room for {room:g} of {quota['limit']:g}, and one node of {t.name!r} takes "
                f"{each:g}",
                "No node of this type ever starts (QUOTA_EXCEEDED).",
                f"{ask}, {each * max(1, t.most):g} or more.",
            )
        most = most_used(members, most_workers(document))
        if not small and most > room:
            yield warning(
                "quota-too-small",
                (*members[0][0].path, "max_workers"),
                f"the quota {metric} has room for {room:g} of {quota['limit']:g}, and the cluster may want {most:g}",
                "Beyond the quota nodes are refused, whatever max_workers says.",
                f"{ask}, or lower max_workers.",
            )


def _metrics(t: NodeType) -> Iterator[tuple[str, float]]:
    """Yield the quotas that a node counts on, and by how much."""
    if t.machine is None or t.machine.tpus:
        return
    spot = "PREEMPTIBLE_" if t.market == "spot" else ""
    if t.machine.gpus:
        kind = t.machine.gpu.upper().replace("-", "_").replace(" ", "_")
        yield f"{spot}NVIDIA_{kind}_GPUS", t.machine.gpus
        yield "GPUS_ALL_REGIONS", t.machine.gpus
    if t.machine.name.split("-")[0] in ("e2", "n1", "f1", "g1"):
        yield f"{spot}CPUS", t.machine.cpus


def check_images(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find images that are not there, or do not fit the disk, the machine or its GPU."""
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
                yield error(
                    "image-missing",
                    (*path, "sourceImage"),
                    f"there is no image {name}, or not for these credentials",
                    "Google refuses each node of this type, which Ray repeats forever.",
                    "`gcloud compute images list --filter=family:ubuntu` has those of Ubuntu; "
                    "families are projects/PROJECT/global/images/family/FAMILY.",
                )
                continue
            yield from _fits(t, path, setup, image)
            if t.machine is not None and t.machine.gpus and disk.get("boot"):
                text = f"{name} {image.get('name', '')} {image.get('description', '')}"
                if not images.DRIVER.search(text) and not images.installs_driver(document, t):
                    yield warning(
                        "image-no-driver",
                        (*path, "sourceImage"),
                        f"image {image['name']} says nothing of NVIDIA's driver, and the node has a GPU",
                        "Without the driver TensorFlow trains on the CPU, at the price of the GPU, or the job waits.",
                        "Take a family of projects/ubuntu-os-accelerator-images, or install the driver in the set-up.",
                    )


def _image(google: GoogleAccount, name: str) -> dict[str, Any] | None:
    try:
        image: dict[str, Any] = google.api("compute").get(f"/{name}")
    except RestError as problem:
        if problem.is_missing or (problem.is_denied and google.project not in name):
            return None
        raise
    return image if image.get("status", "READY") == "READY" else None


def _fits(
    t: NodeType, path: tuple[str | int, ...], setup: dict[str, Any], image: dict[str, Any]
) -> Iterator[ConfigFinding]:
    least, size = int(image.get("diskSizeGb", 0)), setup.get("diskSizeGb")
    if isinstance(size, int) and size < least:
        place = (*path, "diskSizeGb")
        yield images.small_disk(place, f"a disk of {size} GB", image["name"], f"{least} GB", "Google")
    family = t.machine.name.split("-")[0] if t.machine else ""
    runs = "ARM64" if family in ("t2a", "c4a", "a4x") else "X86_64"
    built = image.get("architecture")
    if family and built and built != runs:
        machine = str(t.config.get("machineType"))
        yield images.wrong_architecture((*path, "sourceImage"), image["name"], built, machine, runs, "Google")
