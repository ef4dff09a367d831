"""Mistakes of Google Cloud clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor import machines
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, warning, zone_not_in_region
from raytf.doctor.node_types import NodeType, node_types, spot_head

#: Fields that Compute Engine's instances.insert takes (API v1), and Ray's own.
_INSTANCE = {
    *("advancedMachineFeatures", "canIpForward", "confidentialInstanceConfig", "deletionProtection", "description"),
    *("disks", "displayDevice", "guestAccelerators", "hostname", "instanceEncryptionKey", "keyRevocationActionType"),
    *("kind", "labels", "localSsdEncryptionMode", "machineType", "metadata", "minCpuPlatform", "name"),
    *("networkInterfaces", "networkPerformanceConfig", "params", "privateIpv6GoogleAccess", "reservationAffinity"),
    *("resourcePolicies", "scheduling", "serviceAccounts", "shieldedInstanceConfig", "shieldedInstanceIntegrityPolicy"),
    *("sourceMachineImage", "sourceMachineImageEncryptionKey", "tags", "workloadIdentityConfig", "zone"),
    *("sourceInstanceTemplate", "networkConfig"),
}
#: Fields that Cloud TPU's nodes.create takes (API v2alpha1), and Ray's own.
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
#: Machine families that bring their GPUs along.
_WITH_GPUS = ("a2-", "a3-", "a4-", "g2-", "g4-")
#: Ubuntu with NVIDIA's driver, as Google publishes it.
_GOOD_IMAGE = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2204-amd64-with-nvidia-580"
_RETIRED_IMAGES = re.compile(r"ubuntu-(1604|1804|2004)|ubuntu-16|ubuntu-18|tf-?1-|debian-9|common-cu(8|9|10|11)\d*")


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find what Compute Engine refuses, and what Ray gives to the head alone."""
    yield from _place(document)
    for t in node_types(document):
        path = (*t.path, "node_config")
        yield from _name(t)
        if "machineType" in t.config or "sourceInstanceTemplate" in t.config:
            yield from _compute(t, path)
        elif {"acceleratorType", "acceleratorConfig"} & t.config.keys():
            yield from _tpu(t, path)
        else:
            yield error(
                "gcp-machine",
                path,
                f"type {t.name!r} has neither machineType nor acceleratorType",
                "`ray up` ends with ValueError: Invalid node.",
                "Give machineType: e2-standard-4, or acceleratorType: v5litepod-4 for a TPU.",
            )


def _place(document: Document) -> Iterator[ConfigFinding]:
    provider = document.mapping("provider")
    needed = {"region": "us-central1", "availability_zone": "us-central1-a", "project_id": "the id of your project"}
    for key, example in needed.items():
        if provider.get(key) is None:
            yield error(
                "gcp-place",
                ("provider", key) if key in provider else ("provider",),
                f"provider.{key} is {'empty' if key in provider else 'missing'}",
                "`ray up` ends with a KeyError or an assertion.",
                f"Give {key}: {example}.",
            )
    region, zone = provider.get("region"), provider.get("availability_zone")
    if isinstance(zone, str) and "," in zone:
        yield error(
            "one-zone",
            ("provider", "availability_zone"),
            f"availability_zone {zone!r} names several zones",
            "On Google Cloud Ray uses the text as one zone, which does not exist.",
            "Name one zone.",
        )
    elif isinstance(zone, str) and isinstance(region, str) and not re.fullmatch(re.escape(region) + "-[a-z]", zone):
        why = "Ray takes the subnet of the region and starts the node in the zone: Google refuses that."
        yield zone_not_in_region(zone, region, why, f"Write {region}-a or another zone of that region.")
    name = document.get("cluster_name")
    if isinstance(name, str) and (not _LABEL.fullmatch(name) or len(name) > 44 or "_" in name):
        yield error(
            "gcp-name",
            ("cluster_name",),
            f"cluster_name {name!r} cannot be part of the name of an instance",
            "Google refuses it: names have small letters, digits and '-', and Ray adds 19 characters to yours.",
            "Use small letters, digits and '-', at most 44 characters, a letter first.",
        )


def _name(t: NodeType) -> Iterator[ConfigFinding]:
    if not _LABEL.fullmatch(t.name):
        yield error(
            "gcp-name",
            t.path,
            f"node type {t.name!r} cannot be a label",
            "Ray marks each instance with it, and Google refuses labels with capitals, dots or blanks.",
            "Use small letters, digits, '-' and '_', such as gpu_spot.",
        )


def _compute(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    yield from _unknown(t.config, _INSTANCE, path, "Compute Engine")
    scheduling = t.config.get("scheduling")
    if isinstance(scheduling, list):
        # Ray's own examples have it as a list, which Google takes as one message.
        merged = {k: v for entry in scheduling if isinstance(entry, dict) for k, v in entry.items()}
        where: Path = (*path, "scheduling", 0)
    else:
        merged = scheduling if isinstance(scheduling, dict) else {}
        where = (*path, "scheduling")
    yield from _unknown(merged, _SCHEDULING, where, "scheduling")
    yield from _gpus(t, merged, path, where)
    spot = t.market == "spot"
    if spot and merged.get("automaticRestart") is True:
        yield error(
            "gcp-spot-restart",
            (*where, "automaticRestart"),
            "automaticRestart: true on a spot instance",
            "Google refuses it.",
            "Set automaticRestart: false.",
        )
    if spot and t.is_head:
        yield spot_head(where, "Google", "scheduling")
    yield from _disks(t, path)
    if not t.is_head and t.most > 0 and "serviceAccounts" not in t.config and "sourceInstanceTemplate" not in t.config:
        yield warning(
            "workers-without-profile",
            path,
            f"nodes of type {t.name!r} have no serviceAccounts",
            "Ray gives its service account to the head alone: workers cannot read or write the bucket.",
            "Give serviceAccounts: [{email: ..., scopes: [https://www.googleapis.com/auth/cloud-platform]}].",
        )


def _gpus(t: NodeType, scheduling: dict[str, Any], path: Path, where: Path) -> Iterator[ConfigFinding]:
    kind = str(t.config.get("machineType", ""))
    attached = t.config.get("guestAccelerators")
    brings = kind.startswith(_WITH_GPUS)
    if attached and brings:
        yield error(
            "gcp-gpu-twice",
            (*path, "guestAccelerators"),
            f"{kind} has its GPUs already",
            "Google refuses guestAccelerators on it, or wants exactly what it has.",
            "Leave guestAccelerators out.",
        )
    elif attached and kind and not kind.rsplit("/", 1)[-1].startswith(("n1-", "custom-")):
        yield error(
            "gcp-gpu-machine",
            (*path, "machineType"),
            f"GPUs cannot be attached to {kind}",
            "Google refuses it: only N1 machines take T4, P4, V100 and P100.",
            "Take an n1-standard-..., or g2-standard-... with its own L4.",
        )
    if (attached or brings) and scheduling.get("onHostMaintenance") != "TERMINATE" and t.market != "spot":
        yield error(
            "gcp-gpu-maintenance",
            where if scheduling else path,
            "a machine with GPUs needs onHostMaintenance: TERMINATE",
            "Google refuses it: instances with GPUs cannot be moved while they run.",
            "Add scheduling: {onHostMaintenance: TERMINATE}.",
        )
    for i, entry in enumerate(attached if isinstance(attached, list) else ()):
        if isinstance(entry, dict):
            yield from _unknown(
                entry, {"acceleratorType", "acceleratorCount"}, (*path, "guestAccelerators", i), "guestAccelerators"
            )
            accelerator = entry.get("acceleratorType", "")
            if isinstance(accelerator, str) and re.fullmatch(
                r"(nvidia-)?(tesla-)?(t4|v100|p100|p4|k80)", accelerator, re.I
            ):
                model = accelerator.rsplit("-", 1)[-1].lower()
                if accelerator != f"nvidia-tesla-{model}":
                    yield error(
                        "gcp-accelerator",
                        (*path, "guestAccelerators", i, "acceleratorType"),
                        f"there is no accelerator {accelerator!r}",
                        "Google refuses it, and no node of this type starts.",
                        f"Write nvidia-tesla-{model}.",
                    )


def _disks(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    disks = t.config.get("disks")
    for i, disk in enumerate(disks if isinstance(disks, list) else ()):
        first = disk.get("initializeParams") if isinstance(disk, dict) else None
        if not isinstance(first, dict):
            continue
        image, size = first.get("sourceImage"), first.get("diskSizeGb")
        inner = (*path, "disks", i, "initializeParams")
        if isinstance(image, str) and _RETIRED_IMAGES.search(image):
            yield error(
                "retired-image",
                (*inner, "sourceImage"),
                f"image {image!r} is retired, or its CUDA is too old for TensorFlow 2.21",
                "Google finds no image, or TensorFlow finds no GPU.",
                f"Take {_GOOD_IMAGE}.",
            )
        least = 50 if t.machine and t.machine.gpus else 20
        if isinstance(size, int) and disk.get("boot") and size < least:
            yield error(
                "disk-too-small",
                (*inner, "diskSizeGb"),
                f"a boot disk of {size} GB",
                "TensorFlow with CUDA takes 8 GB, a GPU image 40 to 50: pip runs out of space, or Google refuses it.",
                f"Give {least} or more.",
            )


def _tpu(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    yield from _unknown(t.config, _TPU, path, "Cloud TPU")
    if "runtimeVersion" not in t.config:
        yield error(
            "tpu-runtime",
            path,
            f"type {t.name!r} has no runtimeVersion",
            "Google refuses to make a TPU without one.",
            "Give runtimeVersion: v2-alpha-tpuv5-lite, or that of your generation.",
        )
    kind = t.config.get("acceleratorType")
    generation = kind.rpartition("-")[0] if isinstance(kind, str) else ""
    if isinstance(kind, str) and (
        not re.fullmatch(r"(v|tpu)\d+[a-zA-Z]*-\d+", kind)
        # Newer ones than these may come.
        or (re.match(r"v[2-6]", generation) and generation not in machines.TPU_GENERATIONS)
    ):
        yield error(
            "tpu-type",
            (*path, "acceleratorType"),
            f"{kind!r} is not a type of TPU",
            "`ray up` ends with ValueError.",
            "Write one such as v4-8, v5litepod-4 or v6e-4.",
        )
    elif t.machine is not None and t.machine.tpus > 8:
        yield warning(
            "tpu-pod",
            (*path, "acceleratorType"),
            f"{kind} has {t.machine.tpus} chips on several hosts",
            "Ray starts such a slice, but its autoscaler does not treat the hosts as one, as a job needs it.",
            "Take a slice of one host: up to v5litepod-8 or v6e-8, v4-8.",
        )
    chips = t.resources.get("TPU")
    if t.machine is not None and t.machine.tpus <= 8 and chips not in (None, t.machine.tpus):
        yield error(
            "tpu-count",
            (*t.path, "resources", "TPU"),
            f"TPU: {chips:g} on {kind}, which has {t.machine.tpus}",
            "Ray starts nodes for jobs that then do not fit, or gives the other chips to nobody.",
            f"Give TPU: {t.machine.tpus}.",
        )
    if t.is_head:
        yield warning(
            "gpu-head",
            path,
            "the head is a TPU",
            "The head never goes away while the cluster is up, so that TPU is paid for all the time.",
            "Take a machine such as e2-standard-4 for the head.",
        )


def _unknown(config: dict[str, Any], known: set[str], path: Path, who: str) -> Iterator[ConfigFinding]:
    for key in config:
        if str(key) not in known:
            yield error(
                "gcp-unknown-key",
                (*path, str(key)),
                f"{who} takes no {key!r}",
                "Google refuses the request, or drops the key: a typo in `preemptible` gives nodes at the full price.",
                instead(key, known),
            )
