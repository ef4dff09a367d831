"""Mistakes in the nodes' versions of Ray, Python and CUDA. Ray needs the same Python everywhere, to the patch level."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytf.doctor import machines
from raytf.doctor.check.shell_commands import setup_commands
from raytf.doctor.document import CLOUDS, Document
from raytf.doctor.finding import ConfigFinding, Path, Severity, error, once, stops_ray_up, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import node_types
from raytf.errors import DISTRIBUTION

_DOCKER_IMAGES = ("image", "head_image", "worker_image")
_OLDEST_PYTHON = (3, 11)
_PYTHON_DIFFERS = "Ray refuses a driver or a node whose Python differs, even in the patch level."
_RAY_DIFFERS = "Each node gets the newest Ray of its day. If that differs from the head's, the node never joins."
#: Ray's nightly wheels.
_NIGHTLY = re.compile(r"ray-\d\.\d\.\d\.dev0|ray-wheels/latest")
#: `ray`, `ray[default]`, `ray>=2.9`: any requirement but `ray==...` and a wheel's URL.
_UNPINNED = re.compile(
    r"\bpip3?\s+install\s+([^;&|]*?\s)?([\"']?)ray(\[[\w,-]+\])?"
    r"(\2(?=\s|[;&|]|$)|\s*(?:[<>!~]=?|===)\s*\d)(?![^\"'\s;&|]*,\s*==)"
)
#: Images of Ray for nodes without GPUs.
_WITHOUT_CUDA = re.compile(r"rayproject/ray.*(-cpu|-py\d+|:\d+\.\d+\.\d+)(-aarch64)?$")
#: Codes of versions that are reported once per file, with all their places.
_ONCE = ("ray-version", "ray-not-pinned", "nightly-ray", "python-version")
#: Commands that install a Python whose version has only two parts.
_PYTHON = re.compile(
    r"(?:\buv\s+(?:venv|python\s+install)\b[^;&|]*?|\b(?:conda|mamba|micromamba)\s+(?:create|install)\b[^;&|]*?"
    r"|\bpyenv\s+install\b[^;&|]*?)[\s=](\d\.\d+)(?![.\d])"
)
#: Commands that install TensorFlow with NVIDIA's libraries, and arguments that pin the libraries' versions.
_CUDA = re.compile(
    r"\bpip3?\s+install\b[^;&|]*(?:raytf[-_]train[\w.-]*|\.)\[[\w,-]*\bgpu\b|\bpip3?\s+install\b[^;&|]*\[and-cuda\]"
)
_CUDA_PINS = re.compile(r"constraints-gpu\.txt|nvidia-cudnn-cu12\s*==")
#: Commands that install PyPI's `raytf`, which is another package.
_FOREIGN = re.compile(r"\bpip3?\s+install\s(?:[^;&|]*\s)?[\"']?raytf(?=[\"'\s;&|=<>~!\[]|$)")


def check(document: Document, surroundings: Surroundings) -> Iterator[ConfigFinding]:
    """Find versions that differ from this machine's, and images that do not fit."""
    yield from once([*_installed(document, surroundings), *_docker(document, surroundings)], _ONCE)
    yield from _gpu_generation(document)


def _installed(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    docker = document.mapping("docker")
    has_image = any(docker.get(key) for key in _DOCKER_IMAGES)
    for path, command in setup_commands(document):
        if not (has_image and "initialization_commands" in path):  # with an image, they run outside the container
            yield from _command(command, path, here)
    if document.get("provider", "type") in CLOUDS and "setup_commands" not in document.mapping() and not has_image:
        yield warning(
            "default-setup",
            (),
            "setup_commands and a docker image are missing",
            "Ray then installs a nightly build of itself for Python 3.10 (3.7 on Google Cloud) on each new node.",
            f"Add setup_commands that install Ray {here.ray} and Python {here.python}; cluster-configs/ has examples.",
        )


def _command(command: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    pinned = f'Write pip install "ray[default,train]=={here.ray}".'
    if _NIGHTLY.search(command):
        yield warning("nightly-ray", path, "this installs a nightly build of Ray", _RAY_DIFFERS, pinned)
        return
    for pattern in (r"\bray(?:\[[\w,-]+\])?\s*==\s*([\w.]+)", r"ray-(\d+\.\d+\.\d+)-cp"):
        for version in re.findall(pattern, command):
            yield from ray_version(version, path, here)
    for pattern in (r"(?:\bpython\s*==?\s*|--python[= ]|python install )(\d\.\d+(?:\.\d+)?)", r"-cp(\d)(\d+)-"):
        for match in re.finditer(pattern, command):
            yield from python_version(".".join(match.groups()), path, here)
    if _FOREIGN.search(command):
        what = "`raytf` on PyPI is another package, from 2021"
        why = "Jobs fail with \"module 'raytf' has no attribute\"."
        yield error("foreign-raytf", path, what, why, f"Write pip install {DISTRIBUTION}.")
    floating = _PYTHON.search(command)  # the tag of an image fixes its patch level
    if floating and here.python.startswith(f"{floating[1]}."):
        what = f"`{floating[0].strip()}` installs the newest Python {floating[1]}, but this machine has {here.python}"
        yield warning("python-version", path, what, _PYTHON_DIFFERS, f"Write {here.python}.")
    if _CUDA.search(command) and not _CUDA_PINS.search(command):
        why = "Later nodes get a newer cuDNN, whose last bits differ: an --exact run cannot continue there."
        fix = "Add -c constraints-gpu.txt, which pins each version, and mount that file beside constraints.txt."
        yield warning("cuda-not-pinned", path, "NVIDIA's libraries are installed without versions", why, fix)
    if _UNPINNED.search(command):
        yield warning("ray-not-pinned", path, "Ray is installed without a version", _RAY_DIFFERS, pinned)


def ray_version(version: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find a version of Ray that differs from this machine's."""
    if version != here.ray:
        why = "Drivers and nodes of different versions refuse each other (Version mismatch), and raytf needs 2.60."
        what = f"Ray {version} on the nodes, {here.ray} here"
        yield error("ray-version", path, what, why, f"Use {here.ray} everywhere.")


def python_version(version: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find a version of Python, complete or only MAJOR.MINOR, that is too old or differs from this machine's."""
    mine = ".".join(here.python.split(".")[: version.count(".") + 1])
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_PYTHON:
        why = "raytf needs 3.11 or newer: pip does not install it there."
        fix = f"Install Python {here.python}, as on this machine."
        yield error("python-version", path, f"Python {version} on the nodes", why, fix)
    elif version != mine:
        what = f"Python {version} on the nodes, {here.python} here"
        fix = f"Install {here.python} there, or {version} here."
        yield warning("python-version", path, what, f"{_PYTHON_DIFFERS} A submitted job is not affected.", fix)


def _docker(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    docker = document.mapping("docker")
    images = [key for key in _DOCKER_IMAGES if docker.get(key)]
    name, how = docker.get("container_name"), "`Must provide a container & image name`"
    if images and not name:
        what = f"docker.{images[0]} needs a container_name"
        yield stops_ray_up("container-name", ("docker",), what, "Add container_name: ray.", how)
    if name and not (docker.get("image") or {"head_image", "worker_image"} <= set(images)):
        what = "only one kind of node has an image" if images else "container_name needs an image"
        fix = "Add image, or both head_image and worker_image."
        yield stops_ray_up("container-name", ("docker",), what, fix, how)
    if docker.get("image") and name and re.search(r"[^\w.-]", str(name)):
        what = f"container_name {name!r} is not a name that Docker accepts"
        fix = "Use letters, digits, '_', '.' and '-'."
        yield error("container-name", ("docker", "container_name"), what, "Docker refuses it.", fix)
    has_gpus = any(t.has("GPU") > 0 and t.most > 0 and not t.is_head for t in node_types(document))
    of_images: list[ConfigFinding] = []
    for key in images:
        accelerator = "gpu" if has_gpus and key != "head_image" else ""
        of_images += image(str(docker[key]), ("docker", key), here, accelerator)
    yield from of_images
    heads = docker.get("head_image") or docker.get("image")
    workers = docker.get("worker_image") or docker.get("image")
    both = [one for one in (heads, workers) if isinstance(one, str) and "rayproject/" in one]
    if len(both) == 2 and python_tag(both[0]) != python_tag(both[1]):
        path = ("docker", "worker_image" if "worker_image" in docker else "image")
        what = f"the head's image {heads} and the workers' {workers} differ in Python"
        yield error("python-version", path, what, _PYTHON_DIFFERS, "Use tags of the same version and -pyXY.")
    yield from _gpu_images(document, {f.path for f in of_images if f.severity is Severity.ERROR})
    yield from _run_options(document)


def advised_image(tag: str, here: Surroundings, accelerator: str = "") -> str:
    """Return the image of Ray with this machine's versions, for the hardware that `tag` or `accelerator` names.

    The tags are `{Ray version}-{Python version}[-{platform}][-aarch64]`: https://hub.docker.com/r/rayproject/ray.
    """
    is_for_gpus = accelerator == "gpu" or re.search(r"-(gpu|cu\d+)\b", tag)
    platform = "-gpu" if is_for_gpus else "-tpu" if re.search(r"-tpu\b", tag) else ""
    architecture = "-aarch64" if tag.endswith("-aarch64") else ""
    return f"rayproject/ray:{here.ray}-py{''.join(here.python.split('.')[:2])}{platform}{architecture}"


def image(name: str, path: Path, here: Surroundings, accelerator: str = "") -> Iterator[ConfigFinding]:
    """Find an image whose name is malformed, or whose tag is not fixed or has other versions than this machine.

    Args:
        name: REPOSITORY:TAG.
        path: its path in the document.
        here: this machine.
        accelerator: `gpu` if a node or pod with this image has GPUs.
    """
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = name, ""
    own = f"Use {advised_image(tag, here, accelerator)}."
    is_rays = repository.rsplit("/", 1)[-1].startswith("ray") and "rayproject/" in repository
    version, python = re.match(r"(\d+\.\d+\.\d+)", tag), python_tag(name)
    mine = ".".join(here.python.split(".")[:2])
    if re.search(r"\s", name):
        yield error("image-name", path, f"image {name!r} has a space", "Docker refuses it.", "Write REPOSITORY:TAG.")
    elif repository == "rayproject/autoscaler":
        yield error("image-retired", path, f"image {name!r} is retired", "It contains a Ray from 2020.", own)
    elif not is_rays and tag in ("", "latest"):
        why = "Nodes that start later may have other versions than the head."
        yield warning("image-latest", path, f"image {name!r} has no fixed version", why, "Use a tag that is fixed.")
    elif is_rays and (tag.startswith(("latest", "nightly")) or not tag):
        why = f"Its Ray is not this machine's {here.ray}, and it may be yet another one on the next node."
        yield warning("image-latest", path, f"image {name!r} has no fixed version", why, own)
    elif is_rays and version and version[1] != here.ray:
        what = f"image {name} has Ray {version[1]} and no raytf"
        why = f"raytf needs Ray {here.ray}, which you have here; Ray refuses a driver of another version."
        yield error("ray-version", path, what, why, own)
    elif is_rays and python and python != mine:
        is_old = tuple(map(int, python.split("."))) < _OLDEST_PYTHON
        why = "raytf needs 3.11 or newer: pip does not install it there."
        if not is_old:
            why = f"{_PYTHON_DIFFERS} A submitted job is not affected."
        what = f"image {name} has Python {python}, and this machine has {here.python}"
        yield (error if is_old else warning)("python-version", path, what, why, own)
    elif is_rays and version and not python:
        why = f"Without -pyXY it has the oldest that Ray supports (3.10 for Ray 2.60); yours is {here.python}."
        yield warning("image-python", path, f"image {name!r} names no Python version", why, own)


def python_tag(name: str) -> str | None:
    """Return the version of Python, MAJOR.MINOR, that the tag of an image of Ray names."""
    match = re.search(r"-py(\d)(\d+)(-|$)", name)
    return f"{match[1]}.{match[2]}" if match else None


def _gpu_images(document: Document, replaced: set[Path]) -> Iterator[ConfigFinding]:
    """Find an image without CUDA for GPUs, except those that an error already says to replace by one with CUDA."""
    shared: Path = ("docker", "worker_image" if document.get("docker", "worker_image") else "image")
    for t in node_types(document):
        if t.is_head or t.most <= 0 or t.has("GPU") <= 0:
            continue
        own: Path = (*t.path, "docker", "worker_image")
        path = own if document.get(*own) else shared
        used = document.get(*path)
        if path not in replaced and isinstance(used, str) and _WITHOUT_CUDA.search(used):
            what = f"nodes of type {t.name!r} have GPUs, and image {used} has no CUDA"
            why = "TensorFlow finds no GPU and trains on the CPU, at the price of the GPU."
            fix = "Use a tag with -gpu or -cu12..., or cluster-configs/docker/gpu.Dockerfile."
            yield error("cpu-image-on-gpu", path, what, why, fix)
            return


def _run_options(document: Document) -> Iterator[ConfigFinding]:
    for path, option in document.commands("run_options", "head_run_options", "worker_run_options", below=("docker",)):
        if re.search(r"(^|\s)(-d|-it|--rm|--name)\b", option):
            what = f"Ray's own `docker run` already has or contradicts {option!r}"
            why = "The container does not start, or is removed before Ray uses it."
            yield error("run-options", path, what, why, "Delete it.")


def _gpu_generation(document: Document) -> Iterator[ConfigFinding]:
    for t in node_types(document):
        if t.machine is not None and t.machine.gpu in machines.TOO_OLD:
            path = machines.instance_path(str(document.get("provider", "type")), t.path)
            what = f"{t.machine.name} has {t.machine.gpu} GPUs"
            why = "TensorFlow 2.21 has no kernels for such old GPUs (compute capability below 6.0) and ignores them."
            yield error("gpu-too-old", path, what, why, "Use a T4 (g4dn), A10G (g5), L4 (g6, g2) or a newer GPU.")
