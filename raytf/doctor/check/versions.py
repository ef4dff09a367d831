"""Versions of Ray, Python and CUDA on the nodes: Ray wants the same ones everywhere, to the patch level."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytf.doctor import machines
from raytf.doctor.document import CLOUDS, Document
from raytf.doctor.finding import ConfigFinding, Path, error, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import node_types
from raytf.errors import DISTRIBUTION

_DOCKER_IMAGES = ("image", "head_image", "worker_image")
_OLDEST_PYTHON = (3, 11)
#: Ray's wheels of last night.
NIGHTLY = re.compile(r"ray-\d\.\d\.\d\.dev0|ray-wheels/latest")
#: `ray`, `ray[default]`, `ray>=2.9`: anything but `ray==...` and a wheel's address.
_UNPINNED = re.compile(
    r"\bpip3?\s+install\s+([^;&|]*?\s)?([\"']?)ray(\[[\w,-]+\])?"
    r"(\2(?=\s|[;&|]|$)|\s*(?:[<>!~]=?|===)\s*\d)(?![^\"'\s;&|]*,\s*==)"
)
#: Installers that bring a Python; two parts of its version alone.
_PYTHON = re.compile(
    r"(?:\buv\s+(?:venv|python\s+install)\b[^;&|]*?|\b(?:conda|mamba|micromamba)\s+(?:create|install)\b[^;&|]*?"
    r"|\bpyenv\s+install\b[^;&|]*?)[\s=](\d\.\d+)(?![.\d])"
)
#: TensorFlow with NVIDIA's libraries, and what says which versions of them.
_CUDA = re.compile(
    r"\bpip3?\s+install\b[^;&|]*(?:raytf[-_]train[\w.-]*|\.)\[[\w,-]*\bgpu\b|\bpip3?\s+install\b[^;&|]*\[and-cuda\]"
)
_CUDA_PINS = re.compile(r"constraints-gpu\.txt|nvidia-cudnn-cu12\s*==")
#: The registry's `raytf`, which is another package.
_FOREIGN = re.compile(r"\bpip3?\s+install\s(?:[^;&|]*\s)?[\"']?raytf(?=[\"'\s;&|=<>~!\[]|$)")


def check(document: Document, surroundings: Surroundings) -> Iterator[ConfigFinding]:
    """Find versions that differ from this machine's, and images that do not fit."""
    yield from _installed(document, surroundings)
    yield from _docker(document, surroundings)
    yield from _gpu_generation(document)


def _installed(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    kind = document.get("provider", "type")
    keys = ("setup_commands", "head_setup_commands", "worker_setup_commands")
    for path, command in document.commands(*keys):
        if NIGHTLY.search(command):
            continue  # said once, by commands.py
        for version in re.findall(r"\bray(?:\[[\w,-]+\])?\s*==\s*([\w.]+)", command):
            yield from ray_version(version, path, here)
        for version in re.findall(r"ray-(\d+\.\d+\.\d+)-cp", command):
            yield from ray_version(version, path, here)
        for pattern in (r"(?:\bpython\s*==?\s*|--python[= ]|python install )(\d\.\d+(?:\.\d+)?)", r"-cp(\d)(\d+)-"):
            for match in re.finditer(pattern, command):
                yield from python_version(".".join(match.groups()), path, here)
        if _FOREIGN.search(command):
            yield error(
                "foreign-raytf",
                path,
                "`raytf` on the registry is another package, of 2021",
                "Jobs end with \"module 'raytf' has no attribute\".",
                f"Write pip install {DISTRIBUTION}.",
            )
        yield from _floating_python(command, path, here)
        yield from _floating_cuda(command, path)
        if _UNPINNED.search(command):
            yield error(
                "ray-not-pinned",
                path,
                "Ray is installed without a version",
                f"Nodes get the newest, you have {here.ray}: `Version mismatch`, and nodes of later days never join.",
                f'Write pip install "ray[default,train]=={here.ray}".',
            )
    docker = any(document.get("docker", key) for key in _DOCKER_IMAGES)
    if kind in CLOUDS and "setup_commands" not in document.mapping() and not docker:
        yield warning(
            "default-setup",
            (),
            "neither setup_commands nor a docker image is given",
            "Ray's defaults then install the Ray of tonight for Python 3.10 (3.7 on Google Cloud) on each new node.",
            f"Give setup_commands that install Ray {here.ray} and Python {here.python}; cluster-configs/ shows how.",
        )


def _floating_cuda(command: str, path: Path) -> Iterator[ConfigFinding]:
    if _CUDA.search(command) and not _CUDA_PINS.search(command):
        yield warning(
            "cuda-not-pinned",
            path,
            "NVIDIA's libraries are installed in whatever version is newest",
            "A node of a later day gets another cuDNN with other last bits: an --exact run cannot go on there.",
            "Give -c constraints-gpu.txt, which names each of them, and mount that file beside constraints.txt.",
        )


def _floating_python(command: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find a Python whose patch level an installer picks; that of an image's tag is fixed."""
    match = _PYTHON.search(command)
    if match and here.python.startswith(f"{match[1]}."):
        yield warning(
            "python-version",
            path,
            f"`{match[0].strip()}` is whatever Python {match[1]} is newest, and {here.python} is here",
            "Ray refuses a driver or a node whose Python differs, to the patch level: nodes of later days never join.",
            f"Write {here.python}.",
        )


def ray_version(version: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Compare a version of Ray with this machine's."""
    if version != here.ray:
        yield error(
            "ray-version",
            path,
            f"Ray {version} on the nodes, {here.ray} here",
            "Drivers and nodes of different versions refuse each other (Version mismatch), and raytf wants 2.60.",
            f"Use {here.ray} everywhere.",
        )


def python_version(version: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Compare a version of Python, whole or only MAJOR.MINOR, with this machine's."""
    mine = ".".join(here.python.split(".")[: version.count(".") + 1])
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_PYTHON:
        yield error(
            "python-version",
            path,
            f"Python {version} on the nodes",
            "raytf wants 3.11 or newer: pip does not install it there.",
            f"Install Python {here.python}, that of this machine.",
        )
    elif version != mine:
        yield warning(
            "python-version",
            path,
            f"Python {version} on the nodes, {here.python} here",
            "Ray refuses a driver whose Python differs, to the patch level; a submitted job is none.",
            f"Install {here.python} there, or {version} here.",
        )


def _docker(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    docker = document.mapping("docker")
    images = [key for key in _DOCKER_IMAGES if docker.get(key)]
    if images and not docker.get("container_name"):
        yield error(
            "container-name",
            ("docker",),
            f"docker.{images[0]} is given without container_name",
            "`ray up` ends: Must provide a container & image name.",
            "Add container_name: ray.",
        )
    if docker.get("container_name") and not (docker.get("image") or {"head_image", "worker_image"} <= set(images)):
        yield error(
            "container-name",
            ("docker",),
            "container_name is given, and an image only for one kind of node"
            if images
            else "container_name without image",
            "`ray up` ends: Must provide a container & image name.",
            "Add image, or both head_image and worker_image.",
        )
    for key in images:
        yield from image(str(docker[key]), ("docker", key), here)
    heads = docker.get("head_image") or docker.get("image")
    workers = docker.get("worker_image") or docker.get("image")
    both = [name for name in (heads, workers) if isinstance(name, str) and "rayproject/" in name]
    if len(both) == 2 and _python_tag(both[0]) != _python_tag(both[1]):
        yield error(
            "python-version",
            ("docker", "worker_image" if "worker_image" in docker else "image"),
            f"the head's image {heads} and the workers' {workers} differ in Python",
            "Ray refuses nodes whose Python differs.",
            "Use tags of the same version and -pyXY.",
        )
    yield from _gpu_images(document)
    yield from _mounts(document)


def image(name: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Check an image that is Ray's own by name: its tag says its versions."""
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = name, ""
    if re.search(r"\s", name):
        yield error("image-name", path, f"image {name!r} has a blank", "Docker refuses it.", "Write REPOSITORY:TAG.")
        return
    if repository == "rayproject/autoscaler":
        yield error(
            "image-retired",
            path,
            f"image {name!r} is retired",
            "It holds a Ray of 2020.",
            f"Use rayproject/ray:{here.ray}-py311.",
        )
        return
    if not repository.rsplit("/", 1)[-1].startswith("ray") or "rayproject/" not in repository:
        if tag in ("", "latest"):
            yield warning(
                "image-latest",
                path,
                f"image {name!r} is whatever is newest",
                "Nodes that start tomorrow may have other versions than the head.",
                "Name a tag that does not change.",
            )
        return
    if tag.startswith(("latest", "nightly")) or not tag:
        yield error(
            "image-latest",
            path,
            f"image {name!r} is whatever is newest",
            f"It has another Ray than the {here.ray} of this machine, and on the next node yet another.",
            f"Use rayproject/ray:{here.ray}-py{''.join(here.python.split('.')[:2])}.",
        )
        return
    version = re.match(r"(\d+\.\d+\.\d+)", tag)
    if version and version[1] != here.ray:
        yield from ray_version(version[1], path, here)
        return
    python = _python_tag(name)
    if python:
        yield from python_version(python, path, here)
    elif version:
        yield warning(
            "image-python",
            path,
            f"image {name!r} does not say its Python",
            "Without -pyXY it is the oldest that this Ray supports, 3.10 for 2.60; yours is " + here.python + ".",
            f"Use {name}-py{''.join(here.python.split('.')[:2])}.",
        )


def _python_tag(name: str) -> str | None:
    match = re.search(r"-py(\d)(\d+)(-|$)", name)
    return f"{match[1]}.{match[2]}" if match else None


def _gpu_images(document: Document) -> Iterator[ConfigFinding]:
    gpu_types = [t.name for t in node_types(document) if not t.is_head and t.most > 0 and t.has("GPU") > 0]
    for name in gpu_types:
        own = document.get("available_node_types", name, "docker", "worker_image")
        used = own or document.get("docker", "worker_image") or document.get("docker", "image")
        path: Path = ("docker", "worker_image" if document.get("docker", "worker_image") else "image")
        if own:
            path = ("available_node_types", name, "docker", "worker_image")
        if isinstance(used, str) and "rayproject/ray" in used and re.search(r"-cpu$|-py\d+$|:\d+\.\d+\.\d+$", used):
            yield error(
                "cpu-image-on-gpu",
                path,
                f"nodes of type {name!r} have GPUs, and image {used} has no CUDA",
                "TensorFlow finds no GPU and trains on the CPU, at the price of the GPU.",
                "Use a tag with -gpu or -cu12..., or cluster-configs/docker/gpu.Dockerfile.",
            )
            return


def _mounts(document: Document) -> Iterator[ConfigFinding]:
    docker = document.mapping("docker")
    for key in ("run_options", "head_run_options", "worker_run_options"):
        for i, option in enumerate(document.sequence("docker", key)):
            if isinstance(option, str) and re.search(r"(^|\s)(-d|-it|--rm|--name)\b", option):
                yield error(
                    "run-options",
                    ("docker", key, i),
                    f"Ray's own `docker run` has {option!r} or contradicts it",
                    "The container does not start, or goes before Ray has used it.",
                    "Leave it out.",
                )
    if (
        docker.get("image")
        and "container_name" in docker
        and re.search(r"[^\w.-]", str(docker["container_name"] or ""))
    ):
        yield error(
            "container-name",
            ("docker", "container_name"),
            f"container_name {docker['container_name']!r} is not a name for Docker",
            "Docker refuses it.",
            "Use letters, digits, '_', '.' and '-'.",
        )


def _gpu_generation(document: Document) -> Iterator[ConfigFinding]:
    for t in node_types(document):
        if t.machine is not None and t.machine.gpu in machines.TOO_OLD:
            yield error(
                "gpu-too-old",
                machines.instance_path(str(document.get("provider", "type")), t.path),
                f"{t.machine.name} has {t.machine.gpu} GPUs",
                "TensorFlow 2.21 has no kernels for GPUs of that age (compute capability below 6.0): it sees none.",
                "Take a T4 (g4dn), A10G (g5) or L4 (g6, g2) or newer.",
            )
