"""Findings about an image in any cloud: whether it fits the disk and the machine, and brings NVIDIA's driver."""

from __future__ import annotations

import re

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error
from raytf.doctor.node_types import NodeType

#: Words of an image's name that promise NVIDIA's driver.
DRIVER = re.compile(r"nvidia|cuda|gpu|deep ?learning|dlami", re.IGNORECASE)
_INSTALLS_DRIVER = re.compile(r"nvidia-driver|cuda-drivers|nvidia-headless|NVIDIA-Linux|ubuntu-drivers")


def small_disk(path: Path, disk: str, image: str, least: str, cloud: str) -> ConfigFinding:
    """Return the finding that a disk, such as `a disk of 8 GB`, is smaller than the image on it."""
    return error(
        "image-disk",
        path,
        f"{disk} for image {image}, which has {least}",
        f"{cloud} refuses each node of this type.",
        f"Give {int(least.split()[0]) + 40} or more: TensorFlow with CUDA, logs and spilled objects come on top.",
    )


def wrong_architecture(path: Path, image: str, built: str, machine: str, runs: str, cloud: str) -> ConfigFinding:
    """Return the finding that an image is built for another architecture than its machine runs."""
    return error(
        "image-architecture",
        path,
        f"image {image} is built for {built}, and {machine} runs {runs}",
        f"{cloud} refuses each node of this type.",
        f"Take an image for {runs.partition(',')[0]}, or a machine for {built}.",
    )


def installs_driver(document: Document, t: NodeType) -> bool:
    """Return whether the set-up or a start script installs NVIDIA's driver itself."""
    keys = ("initialization_commands", "setup_commands", "worker_setup_commands")
    texts = [command for _, command in document.commands(*keys)]
    return any(map(_INSTALLS_DRIVER.search, [*texts, str(t.config.get("UserData", "")), str(t.config.get("metadata"))]))
