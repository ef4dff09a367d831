"""Images of Google Cloud against the machines and disks that are to run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, error, warning
from raytf.cluster.check.node_types import NodeType
from raytf.cluster.clouds.accounts import GoogleAccount
from raytf.cluster.clouds.rest import RestError
from raytf.cluster.probe.aws_images import DRIVER, installs_driver


def check(google: GoogleAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
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
                if not DRIVER.search(text) and not installs_driver(document, t):
                    yield warning(
                        "image-no-driver",
                        (*path, "sourceImage"),
                        f"image {image['name']} says nothing of NVIDIA's driver, and the node has a GPU",
                        "Without the driver TensorFlow trains on the CPU, at the price of the GPU, or the job waits.",
                        "Take a family of projects/ubuntu-os-accelerator-images, or install the driver in the set-up.",
                    )


def _image(google: GoogleAccount, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = google.api("compute").get(f"/{name}")
    except RestError as problem:
        if problem.is_missing or (problem.is_denied and google.project not in name):
            return None
        raise
    return found if found.get("status", "READY") == "READY" else None


def _fits(
    t: NodeType, path: tuple[str | int, ...], setup: dict[str, Any], image: dict[str, Any]
) -> Iterator[ConfigFinding]:
    least, size = int(image.get("diskSizeGb", 0)), setup.get("diskSizeGb")
    if isinstance(size, int) and size < least:
        yield error(
            "image-disk",
            (*path, "diskSizeGb"),
            f"a disk of {size} GB for image {image['name']}, which has {least} GB",
            "Google refuses each node of this type.",
            f"Give {least + 40} or more: TensorFlow with CUDA, logs and spilled objects come on top.",
        )
    family = t.machine.name.split("-")[0] if t.machine else ""
    runs = "ARM64" if family in ("t2a", "c4a", "a4x") else "X86_64"
    built = image.get("architecture")
    if family and built and built != runs:
        yield error(
            "image-architecture",
            (*path, "sourceImage"),
            f"image {image['name']} is built for {built}, and {t.config.get('machineType')} runs {runs}",
            "Google refuses each node of this type.",
            f"Take an image for {runs}.",
        )
