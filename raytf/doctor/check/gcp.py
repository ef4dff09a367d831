"""Mistakes of Google Cloud clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor import disks, machines
from raytf.doctor.document import Document
from raytf.doctor.finding import (
    ConfigFinding,
    Path,
    error,
    instead,
    refuses_nodes,
    stops_ray_up,
    warning,
    zone_not_in_region,
)
from raytf.doctor.node_types import NodeType, node_types, small_disk, spot_head

#: Fields that Compute Engine's instances.insert accepts (API v1), and Ray's own.
_INSTANCE = {
    *("advancedMachineFeatures", "canIpForward", "confidentialInstanceConfig", "deletionProtection", "description"),
    *("disks", "displayDevice", "guestAccelerators", "hostname", "instanceEncryptionKey", "keyRevocationActionType"),
    *("kind", "labels", "localSsdEncryptionMode", "machineType", "metadata", "minCpuPlatform", "name"),
    *("networkInterfaces", "networkPerformanceConfig", "params", "privateIpv6GoogleAccess", "reservationAffinity"),
    *("resourcePolicies", "scheduling", "serviceAccounts", "shieldedInstanceConfig", "shieldedInstanceIntegrityPolicy"),
    *("sourceMachineImage", "sourceMachineImageEncryptionKey", "tags", "workloadIdentityConfig", "zone"),
    *("sourceInstanceTemplate", "networkConfig"),
}
#: Fields that Cloud TPU's nodes.create accepts (API v2alpha1), and Ray's own.
_TPU = {
    *("acceleratorType", "acceleratorConfig", "autocheckpointEnabled", "bootDiskConfig", "cidrBlock", "dataDisks"),
    *("description", "labels", "metadata", "networkConfig", "networkConfigs", "runtimeVersion", "schedulingConfig"),
    *("serviceAccount", "shieldedInstanceConfig", "tags"),
    *("networkInterfaces", "serviceAccounts"),
}
_SCHEDULING = {
    *("automaticRestart", "availabilityDomain", "exposeHostTopology", "gracefulShutdown", "hostErrorTimeoutSeconds"),
    *("instanceTerminationAction", "localSsdRecoveryTimeout", "locationHint", "maxRunDuration", "minNodeCpus"),
    *("nodeAffinities", "onHostMaintenance", "onInstanceStopAction", "preemptible", "preemptionNoticeDuration"),
    *("protectionTier", "provisioningModel", "skipGuestOsShutdown", "terminationTime"),
}
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
#: Machine families that include GPUs.
_WITH_GPUS = ("a2-", "a3-", "a4-", "g2-", "g4-")
#: Ubuntu with NVIDIA's driver, as Google publishes it.
_GOOD_IMAGE = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2204-amd64-with-nvidia-580"
_PLAIN_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
_RETIRED_IMAGES = re.compile(r"ubuntu-(1604|1804|2004)|ubuntu-16|ubuntu-18|tf-?1-|debian-9|common-cu(8|9|10|11)\d*")
_ACCELERATOR = re.compile(r"(nvidia-)?(tesla-)?(t4|v100|p100|p4|k80)", re.I)
_LEAST_GB, _GPU_GB = 20, 50
#: Machine family, or machine -> the types of Persistent Disk that it can boot from; () means Hyperdisk alone. Families
#: that accept all types, or for which sources differ, are left out. The tables of machine series in Google's pages
#: cloud.google.com/compute/docs/disks/persistent-disks and .../disks/hyperdisks, as copied on 2026-09-15 by
#: github.com/i-gofman/gke-mixed-generation-storage; accelerators as in GKE's cluster autoscaler and SkyPilot.
_BOOT_DISKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("a3", "c3", "c3d", "g2"), ("pd-balanced", "pd-ssd")),
    "h3": ("pd-balanced",),
    **dict.fromkeys(disks.HYPERDISK_ALONE, ()),
}
#: The families above whose disks without a diskType are pd-standard. The default of the others is one that they accept
#: (Compute Engine's discovery document, AttachedDiskInitializeParams.diskType, revision 20261106).
_STANDARD_BY_DEFAULT = ("g2",)


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find values that Compute Engine or Cloud TPU refuses, and settings that Ray applies only to the head."""
    yield from _place(document)
    for t in node_types(document):
        path = (*t.path, "node_config")
        if not _LABEL.fullmatch(t.name):
            what, fix = f"node type {t.name!r} cannot be a label", "Use lower-case letters, digits, '-' and '_'."
            why = "Ray labels each instance with it, and Google refuses labels with capitals, dots or spaces."
            yield error("gcp-name", t.path, what, why, fix)
        if "machineType" in t.config or "sourceInstanceTemplate" in t.config:
            yield from _compute(t, path, document)
        elif {"acceleratorType", "acceleratorConfig"} & t.config.keys():
            yield from _tpu(t, path)
        else:
            what = f"type {t.name!r} has neither machineType nor acceleratorType"
            fix = "Add machineType: e2-standard-4, or acceleratorType: v5litepod-4 for a TPU."
            yield stops_ray_up("gcp-machine", path, what, fix, "ValueError: Invalid node")


def _place(document: Document) -> Iterator[ConfigFinding]:
    provider = document.mapping("provider")
    needed = {"region": "us-central1", "availability_zone": "us-central1-a", "project_id": "the id of your project"}
    for key, example in needed.items():
        if provider.get(key) is None:
            path = ("provider", key) if key in provider else ("provider",)
            what = f"provider.{key} is {'empty' if key in provider else 'missing'}"
            yield stops_ray_up("gcp-place", path, what, f"Add {key}: {example}.", "a KeyError or an assertion")
    region, zone = provider.get("region"), provider.get("availability_zone")
    if isinstance(zone, str) and "," in zone:
        what = f"availability_zone {zone!r} names several zones"
        why = "On Google Cloud Ray reads this as the name of one zone, which does not exist."
        yield error("one-zone", ("provider", "availability_zone"), what, why, "Name one zone.")
    elif isinstance(zone, str) and isinstance(region, str) and not re.fullmatch(re.escape(region) + "-[a-z]", zone):
        why = "Ray uses the region's subnet for a node in that zone, and Google refuses the node."
        yield zone_not_in_region(zone, region, why, f"Write {region}-a or another zone of that region.")
    name = document.get("cluster_name")
    if isinstance(name, str) and (not _LABEL.fullmatch(name) or len(name) > 44 or "_" in name):
        what = f"cluster_name {name!r} cannot be part of the name of an instance"
        why = "Google refuses it: names have lower-case letters, digits and '-', and Ray adds 19 characters to yours."
        fix = "Use at most 44 lower-case letters, digits and '-', beginning with a letter."
        yield error("gcp-name", ("cluster_name",), what, why, fix)


def _compute(t: NodeType, path: Path, document: Document) -> Iterator[ConfigFinding]:
    yield from _unknown(t.config, _INSTANCE, path, "Compute Engine")
    scheduling, where = t.config.get("scheduling"), (*path, "scheduling")
    if isinstance(scheduling, list):
        # Ray's own examples write a list here, which Google accepts as one object.
        where = (*where, 0)
        scheduling = {k: v for entry in scheduling if isinstance(entry, dict) for k, v in entry.items()}
    options: dict[str, Any] = scheduling if isinstance(scheduling, dict) else {}
    yield from _unknown(options, _SCHEDULING, where, "scheduling")
    yield from _gpus(t, options, path, where)
    if t.market == "spot" and options.get("automaticRestart") is True:
        what, fix = "automaticRestart: true on a spot instance", "Set automaticRestart: false."
        yield refuses_nodes("Google", "gcp-spot-restart", (*where, "automaticRestart"), what, fix)
    if t.market == "spot" and t.is_head:
        yield spot_head(where, "Google", "scheduling")
    yield from _disks(t, path, document)
    if not t.is_head and t.most > 0 and "serviceAccounts" not in t.config and "sourceInstanceTemplate" not in t.config:
        yield warning(
            "workers-without-profile",
            path,
            f"nodes of type {t.name!r} have no serviceAccounts",
            "Ray assigns its service account only to the head: workers cannot read or write the bucket.",
            "Add serviceAccounts: [{email: ..., scopes: [https://www.googleapis.com/auth/cloud-platform]}].",
        )


def _gpus(t: NodeType, scheduling: dict[str, Any], path: Path, where: Path) -> Iterator[ConfigFinding]:
    kind = str(t.config.get("machineType", ""))
    attached = t.config.get("guestAccelerators")
    has_own = kind.startswith(_WITH_GPUS)
    if attached and has_own:
        what = f"{kind} includes GPUs, and guestAccelerators would add others"
        yield refuses_nodes("Google", "gcp-gpu-twice", (*path, "guestAccelerators"), what, "Delete guestAccelerators.")
    elif attached and kind and not kind.rsplit("/", 1)[-1].startswith(("n1-", "custom-")):
        what = f"GPUs cannot be attached to {kind}: only N1 machines accept T4, P4, V100 and P100"
        fix = "Use an n1-standard-..., or a g2-standard-..., which includes L4 GPUs."
        yield refuses_nodes("Google", "gcp-gpu-machine", (*path, "machineType"), what, fix)
    if (attached or has_own) and scheduling.get("onHostMaintenance") != "TERMINATE" and t.market != "spot":
        what = "a machine with GPUs needs onHostMaintenance: TERMINATE, since it cannot be moved while it runs"
        fix = "Add scheduling: {onHostMaintenance: TERMINATE}."
        yield refuses_nodes("Google", "gcp-gpu-maintenance", where if scheduling else path, what, fix)
    for i, entry in enumerate(attached if isinstance(attached, list) else ()):
        if not isinstance(entry, dict):
            continue
        place: Path = (*path, "guestAccelerators", i)
        yield from _unknown(entry, {"acceleratorType", "acceleratorCount"}, place, "guestAccelerators")
        name = entry.get("acceleratorType")
        model = _ACCELERATOR.fullmatch(name) if isinstance(name, str) else None
        if model and name != f"nvidia-tesla-{model[3].lower()}":
            what, fix = f"there is no accelerator {name!r}", f"Write nvidia-tesla-{model[3].lower()}."
            yield refuses_nodes("Google", "gcp-accelerator", (*place, "acceleratorType"), what, fix)


def _disks(t: NodeType, path: Path, document: Document) -> Iterator[ConfigFinding]:
    listed = t.config.get("disks")
    for i, disk in enumerate(listed if isinstance(listed, list) else ()):
        first = disk.get("initializeParams") if isinstance(disk, dict) else None
        if not isinstance(first, dict):
            continue
        image, inner = first.get("sourceImage"), (*path, "disks", i, "initializeParams")
        if isinstance(image, str) and _RETIRED_IMAGES.search(image):
            what = f"image {image!r} is retired, or its CUDA is too old for TensorFlow 2.21"
            why = "Google finds no image, or TensorFlow finds no GPU."
            fix = f"Use {_GOOD_IMAGE if t.may_have_gpus else _PLAIN_IMAGE}."
            yield error("retired-image", (*inner, "sourceImage"), what, why, fix)
        if disk.get("boot"):
            size = first.get("diskSizeGb")
            yield from small_disk(t, (*inner, "diskSizeGb"), size, (_LEAST_GB, _GPU_GB), "GB", "Google")
            yield from _boot_disk(t, first, inner, document)


def _boot_disk(t: NodeType, disk: dict[str, Any], path: Path, document: Document) -> Iterator[ConfigFinding]:
    """Find a type of boot disk that the machine refuses, and one that only raytf's provider completes to a URL."""
    machine = str(t.config.get("machineType", "")).rsplit("/", 1)[-1]
    family, _, size = machine.partition("-")
    accepted = _BOOT_DISKS.get(f"{family}-{size.partition('-')[0]}", _BOOT_DISKS.get(family))
    given = disk.get("diskType") or ("pd-standard" if family in _STANDARD_BY_DEFAULT else "")
    kind, zone = str(given).rsplit("/", 1)[-1], document.get("provider", "availability_zone")
    where = "" if document.is_ours else f"zones/{zone}/diskTypes/"
    path = (*path, "diskType") if "diskType" in disk else path
    if accepted is not None and kind.startswith("pd-") and kind not in accepted:
        default = "" if disk.get("diskType") else ", which is the default without a diskType"
        what = f"{machine} cannot boot from {kind}{default}"
        reason = f"[{kind}, {machine}] features are not compatible for creating instance"
        fix = f"Write diskType: {where}{accepted[0] if accepted else 'hyperdisk-balanced'}."
        yield refuses_nodes("Google", "gcp-disk-type", path, what, fix, reason)
    elif kind and kind == given and not document.is_ours:
        what, fix = f"diskType {kind!r} is not a URL, as Ray's own provider needs", f"Write {where}{kind}."
        yield refuses_nodes("Google", "gcp-disk-type", path, what, fix, "Invalid value for field 'diskType'")


def _tpu(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    yield from _unknown(t.config, _TPU, path, "Cloud TPU")
    if "runtimeVersion" not in t.config:
        fix = "Add runtimeVersion: v2-alpha-tpuv5-lite, or that of your generation."
        yield refuses_nodes("Google", "tpu-runtime", path, f"type {t.name!r} has no runtimeVersion", fix)
    shape = t.config.get("acceleratorConfig")
    wrong_shape = list(_tpu_shape(t.config, shape, path)) if shape is not None else []
    if wrong_shape:
        yield from wrong_shape
        return
    key, kind = "acceleratorType" if shape is None else "acceleratorConfig", machines.accelerator_type(t.config)
    generation = kind.rpartition("-")[0] if kind else ""
    chips, of_host = t.machine.tpus if t.machine is not None else 0, machines.tpus_of_host(generation)
    if kind and (
        not re.fullmatch(r"(v|tpu)\d+[a-zA-Z]*-\d+", kind)
        # Newer generations are accepted, since the table may be older than they are.
        or (re.match(r"v[2-6]", generation) and generation not in machines.TPU_GENERATIONS)
    ):
        what, fix = f"{kind!r} is not a type of TPU", "Write one such as v4-8, v5litepod-4 or v6e-4."
        yield stops_ray_up("tpu-type", (*path, key), what, fix, "ValueError")
    elif chips > of_host:
        what = f"{kind} has {chips} chips on several hosts"
        why = "Ray starts such a slice, but its autoscaler does not treat the hosts as one, which a job needs."
        fix = "Use a slice with one host: up to v5litepod-8, v6e-8 or v4-8."
        yield warning("tpu-pod", (*path, key), what, why, fix)
    declared = t.resources.get("TPU")
    if t.machine is not None and chips <= of_host and declared not in (None, chips):
        what = f"TPU: {declared:g} on {kind}, which has {chips} chips"
        why = "Ray starts nodes for jobs that then do not fit, or leaves the other chips unused."
        yield error("tpu-count", (*t.path, "resources", "TPU"), what, why, f"Write TPU: {chips}.")
    if t.is_head:
        why = "The head runs as long as the cluster, so you pay for that TPU all the time."
        fix = "Use a machine such as e2-standard-4 for the head."
        yield warning("gpu-head", path, "the head is a TPU", why, fix)


def _tpu_shape(config: dict[str, Any], shape: object, path: Path) -> Iterator[ConfigFinding]:
    """Find an acceleratorConfig that Ray refuses (`_validate_tpu_config` in ray/autoscaler/_private/gcp/config.py)."""
    given = shape if isinstance(shape, dict) else {}
    kind, topology = given.get("type"), given.get("topology")
    if "acceleratorType" in config:
        what, fix = "acceleratorType and acceleratorConfig exclude each other", "Delete one of them."
    elif kind is None or topology is None:
        what, fix = "acceleratorConfig needs a type and a topology", "Write {type: V4, topology: 2x2x1}."
    elif kind != "V5LITE_POD" and not re.fullmatch(r"V\d+[a-zA-Z]*", str(kind)):
        what, fix = f"type {kind!r} is not a generation of TPUs", "Write V4, V5P, V5LITE_POD or V6E, in large letters."
    elif kind in ("V2", "V3"):
        what = f"Ray accepts no acceleratorConfig for {kind}"
        fix = f"Write an acceleratorType, such as {str(kind).lower()}-8, instead."
    elif not re.fullmatch(r"\d+x\d+(x\d+)?", str(topology)):
        what, fix = f"topology {topology!r} is not a shape", "Write one such as 2x2x1 for V4 or 2x4 for V6E."
    else:
        return
    yield stops_ray_up("tpu-type", (*path, "acceleratorConfig"), what, fix, "ValueError")


def _unknown(config: dict[str, Any], known: set[str], path: Path, owner: str) -> Iterator[ConfigFinding]:
    why = "Google refuses the request or drops the key: with a typo in `preemptible`, nodes cost the full price."
    for key in [key for key in config if str(key) not in known]:
        what = f"{owner} does not accept {key!r}"
        yield error("gcp-unknown-key", (*path, str(key)), what, why, instead(key, known))
