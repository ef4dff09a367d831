"""Versions of Ray, Python and CUDA on the nodes: Ray wants the same ones everywhere, to the patch level."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytf.doctor import machines
from raytf.doctor.document import CLOUDS, Document
from raytf.doctor.finding import ConfigFinding, Path, error, stops_ray_up, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import node_types
from raytf.errors import DISTRIBUTION

_DOCKER_IMAGES = ("image", "head_image", "worker_image")
_OLDEST_PYTHON = (3, 11)
_PYTHON_DIFFERS = "Ray refuses a driver or a node whose Python differs, even in the patch level."
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
    for path, command in document.commands("setup_commands", "head_setup_commands", "worker_setup_commands"):
        if not NIGHTLY.search(command):  # which shell_commands reports
            yield from _command(command, path, here)
    is_cloud, docker = document.get("provider", "type") in CLOUDS, document.mapping("docker")
    if is_cloud and "setup_commands" not in document.mapping() and not any(docker.get(k) for k in _DOCKER_IMAGES):
        yield warning(
            "default-setup",
            (),
            "setup_commands and a docker image are missing",
            "Ray then installs a nightly build of itself for Python 3.10 (3.7 on Google Cloud) on each new node.",
            f"Add setup_commands that install Ray {here.ray} and Python {here.python}; cluster-configs/ has examples.",
        )


def _command(command: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    for pattern in (r"\bray(?:\[[\w,-]+\])?\s*==\s*([\w.]+)", r"ray-(\d+\.\d+\.\d+)-cp"):
        for version in re.findall(pattern, command):
            yield from ray_version(version, path, here)
    for pattern in (r"(?:\bpython\s*==?\s*|--python[= ]|python install )(\d\.\d+(?:\.\d+)?)", r"-cp(\d)(\d+)-"):
        for match in re.finditer(pattern, command):
            yield from python_version(".".join(match.groups()), path, here)
    if _FOREIGN.search(command):
        what = "`raytf` on the registry is another package, of 2021"
        why = "Jobs fail with \"module 'raytf' has no attribute\"."
        yield error("foreign-raytf", path, what, why, f"Write pip install {DISTRIBUTION}.")
    floating = _PYTHON.search(command)  # the tag of an image fixes its patch level
    if floating and here.python.startswith(f"{floating[1]}."):
        what = f"`{floating[0].strip()}` installs the newest Python {floating[1]}, and {here.python} is here"
        yield warning("python-version", path, what, _PYTHON_DIFFERS, f"Write {here.python}.")
    if _CUDA.search(command) and not _CUDA_PINS.search(command):
        why = "A node of a later day gets another cuDNN with other last bits: an --exact run cannot continue there."
        fix = "Add -c constraints-gpu.txt, which pins each of them, and mount that file beside constraints.txt."
        yield warning("cuda-not-pinned", path, "NVIDIA's libraries are installed without versions", why, fix)
    if _UNPINNED.search(command):
        why = f"Nodes get the newest, you have {here.ray}: `Version mismatch`, and nodes of later days never join."
        fix = f'Write pip install "ray[default,train]=={here.ray}".'
        yield error("ray-not-pinned", path, "Ray is installed without a version", why, fix)


def ray_version(version: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Compare a version of Ray with this machine's."""
    if version != here.ray:
        why = "Drivers and nodes of different versions refuse each other (Version mismatch), and raytf needs 2.60."
        what = f"Ray {version} on the nodes, {here.ray} here"
        yield error("ray-version", path, what, why, f"Use {here.ray} everywhere.")


def python_version(version: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Compare a version of Python, whole or only MAJOR.MINOR, with this machine's."""
    mine = ".".join(here.python.split(".")[: version.count(".") + 1])
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_PYTHON:
        why = "raytf needs 3.11 or newer: pip does not install it there."
        fix = f"Install Python {here.python}, that of this machine."
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
        what = f"container_name {name!r} is not a name for Docker"
        fix = "Use letters, digits, '_', '.' and '-'."
        yield error("container-name", ("docker", "container_name"), what, "Docker refuses it.", fix)
    for key in images:
        yield from image(str(docker[key]), ("docker", key), here)
    heads = docker.get("head_image") or docker.get("image")
    workers = docker.get("worker_image") or docker.get("image")
    both = [one for one in (heads, workers) if isinstance(one, str) and "rayproject/" in one]
    if len(both) == 2 and _python_tag(both[0]) != _python_tag(both[1]):
        path = ("docker", "worker_image" if "worker_image" in docker else "image")
        what = f"the head's image {heads} and the workers' {workers} differ in Python"
        yield error("python-version", path, what, _PYTHON_DIFFERS, "Use tags of the same version and -pyXY.")
    yield from _gpu_images(document)
    yield from _run_options(document)


def image(name: str, path: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    """Check an image that is Ray's own by name: its tag says its versions."""
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = name, ""
    python = "".join(here.python.split(".")[:2])
    own = f"Use rayproject/ray:{here.ray}-py{python}."
    is_rays = repository.rsplit("/", 1)[-1].startswith("ray") and "rayproject/" in repository
    version = re.match(r"(\d+\.\d+\.\d+)", tag)
    if re.search(r"\s", name):
        yield error("image-name", path, f"image {name!r} has a blank", "Docker refuses it.", "Write REPOSITORY:TAG.")
    elif repository == "rayproject/autoscaler":
        yield error("image-retired", path, f"image {name!r} is retired", "It contains a Ray of 2020.", own)
    elif not is_rays and tag in ("", "latest"):
        why = "Nodes that start tomorrow may have other versions than the head."
        yield warning("image-latest", path, f"image {name!r} has no fixed version", why, "Name a tag that stays.")
    elif is_rays and (tag.startswith(("latest", "nightly")) or not tag):
        why = f"It has another Ray than the {here.ray} of this machine, and on the next node yet another."
        yield error("image-latest", path, f"image {name!r} has no fixed version", why, own)
    elif is_rays and version and version[1] != here.ray:
        yield from ray_version(version[1], path, here)
    elif is_rays and (tagged := _python_tag(name)):
        yield from python_version(tagged, path, here)
    elif is_rays and version:
        why = f"Without -pyXY it is the oldest that this Ray supports, 3.10 for 2.60; yours is {here.python}."
        yield warning("image-python", path, f"image {name!r} does not say its Python", why, f"Use {name}-py{python}.")


def _python_tag(name: str) -> str | None:
    match = re.search(r"-py(\d)(\d+)(-|$)", name)
    return f"{match[1]}.{match[2]}" if match else None


def _gpu_images(document: Document) -> Iterator[ConfigFinding]:
    shared: Path = ("docker", "worker_image" if document.get("docker", "worker_image") else "image")
    for t in node_types(document):
        if t.is_head or t.most <= 0 or t.has("GPU") <= 0:
            continue
        own: Path = (*t.path, "docker", "worker_image")
        path = own if document.get(*own) else shared
        used = document.get(*path)
        if isinstance(used, str) and "rayproject/ray" in used and re.search(r"-cpu$|-py\d+$|:\d+\.\d+\.\d+$", used):
            what = f"nodes of type {t.name!r} have GPUs, and image {used} has no CUDA"
            why = "TensorFlow finds no GPU and trains on the CPU, at the price of the GPU."
            fix = "Use a tag with -gpu or -cu12..., or cluster-configs/docker/gpu.Dockerfile."
            yield error("cpu-image-on-gpu", path, what, why, fix)
            return


def _run_options(document: Document) -> Iterator[ConfigFinding]:
    for path, option in document.commands("run_options", "head_run_options", "worker_run_options", below=("docker",)):
        if re.search(r"(^|\s)(-d|-it|--rm|--name)\b", option):
            what = f"Ray's own `docker run` has {option!r} or contradicts it"
            why = "The container does not start, or goes before Ray has used it."
            yield error("run-options", path, what, why, "Delete it.")


def _gpu_generation(document: Document) -> Iterator[ConfigFinding]:
    for t in node_types(document):
        if t.machine is not None and t.machine.gpu in machines.TOO_OLD:
            path = machines.instance_path(str(document.get("provider", "type")), t.path)
            what = f"{t.machine.name} has {t.machine.gpu} GPUs"
            why = "TensorFlow 2.21 has no kernels for GPUs of that age (compute capability below 6.0): it finds none."
            yield error("gpu-too-old", path, what, why, "Take a T4 (g4dn), A10G (g5) or L4 (g6, g2) or newer.")
