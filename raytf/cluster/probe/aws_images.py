"""Images of AWS against the machines and disks that are to run them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, Path, error, warning
from raytf.cluster.check.node_types import NodeType
from raytf.cluster.clouds.aws import AwsAccount, AwsTrouble, trouble

_PARAMETER = "resolve:ssm:"
#: Words of an image's name that promise NVIDIA's driver, and those of drivers too old for the CUDA of TensorFlow 2.21.
DRIVER = re.compile(r"nvidia|cuda|gpu|deep ?learning|dlami", re.IGNORECASE)
_OLD = re.compile(r"ubuntu[ /-]*1[68]\.?04|bionic|xenial|cuda[ -]?(9|10|11)(\.|\b)", re.IGNORECASE)
_INSTALLS_DRIVER = re.compile(r"nvidia-driver|cuda-drivers|nvidia-headless|NVIDIA-Linux|ubuntu-drivers")


class Machines:
    """What EC2 says of the instance types of a cluster, asked once by whoever needs it first."""

    def __init__(self, aws: AwsAccount, types: Sequence[NodeType]):
        self._aws = aws
        self._names = sorted({str(t.config["InstanceType"]) for t in types if t.config.get("InstanceType")})
        self._known: dict[str, dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def all(self) -> dict[str, dict[str, Any]]:
        """Instance type -> description; those that the region does not have are left out."""
        with self._lock:
            if self._known is None:
                pages = self._aws.client("ec2").get_paginator("describe_instance_types")
                # By a filter: one name that there is not would make InstanceTypes fail for all.
                found = pages.paginate(Filters=[{"Name": "instance-type", "Values": self._names}])
                self._known = {kind["InstanceType"]: kind for page in found for kind in page["InstanceTypes"]}
            return self._known

    def cpus(self, t: NodeType) -> int | None:
        """vCPUs of a node type, which quotas count."""
        if t.machine is not None:
            return t.machine.cpus
        kind = self.all().get(str(t.config.get("InstanceType")))
        return kind["VCpuInfo"]["DefaultVCpus"] if kind else None


def check(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find images that are not there, or do not fit the machine, its GPU or its disk."""
    seen: dict[str, dict[str, Any] | None] = {}
    for t in types:
        name, path = t.config.get("ImageId"), (*t.path, "node_config", "ImageId")
        if not isinstance(name, str) or name == "latest_dlami":
            continue
        if name not in seen:
            image = seen[name] = _image(aws, name)
            if image is None:
                yield _missing(name, path, aws.region)
        found = seen[name]
        if found is not None:
            yield from _fits(t, path, found, machines)
            yield from _driver(t, path, found, document, machines)


def _image(aws: AwsAccount, name: str) -> dict[str, Any] | None:
    try:
        if name.startswith(_PARAMETER):
            name = aws.client("ssm").get_parameter(Name=name.removeprefix(_PARAMETER))["Parameter"]["Value"]
        images = aws.client("ec2").describe_images(ImageIds=[name])["Images"]
    except Exception as problem:
        if trouble(problem) is AwsTrouble.MISSING or "ParameterNotFound" in type(problem).__name__:
            return None
        if "InvalidAMIID" in str(problem):
            return None
        raise
    return images[0] if images and images[0].get("State", "available") == "available" else None


def _missing(name: str, path: Path, region: str) -> ConfigFinding:
    if name.startswith(_PARAMETER):
        what = f"the parameter {name.removeprefix(_PARAMETER)} leads to no image in {region}"
        fix = "See `aws ssm get-parameters-by-path --path /aws/service/deeplearning --recursive` for those there are."
    else:
        what = f"image {name} is not in {region}, or not for this account"
        fix = "Image ids differ from region to region: look the name up there, or give resolve:ssm:PARAMETER."
    return error("image-missing", path, what, "EC2 refuses each node of this type, which Ray repeats forever.", fix)


def _fits(t: NodeType, path: Path, image: dict[str, Any], machines: Machines) -> Iterator[ConfigFinding]:
    name = image.get("Name") or image["ImageId"]
    kind = machines.all().get(str(t.config.get("InstanceType")), {})
    takes = kind.get("ProcessorInfo", {}).get("SupportedArchitectures", [])
    built = image.get("Architecture")
    if takes and built and built not in takes:
        yield error(
            "image-architecture",
            path,
            f"image {name} is built for {built}, and {t.config['InstanceType']} runs {', '.join(takes)}",
            "EC2 refuses each node of this type.",
            f"Take an image for {takes[0]}, or an instance type for {built}.",
        )
    root = image.get("RootDeviceName")
    least = next(
        (
            disk["Ebs"]["VolumeSize"]
            for disk in image.get("BlockDeviceMappings", [])
            if disk.get("DeviceName") == root and disk.get("Ebs", {}).get("VolumeSize")
        ),
        None,
    )
    disks = t.config.get("BlockDeviceMappings")
    given = [d for d in disks if isinstance(d, dict)] if isinstance(disks, list) else []
    where = (*path[:-1], "BlockDeviceMappings")
    for i, disk in enumerate(given):
        ebs = disk.get("Ebs")
        size = ebs.get("VolumeSize") if isinstance(ebs, dict) else None
        if disk.get("DeviceName") == root and least is not None and isinstance(size, int) and size < least:
            yield error(
                "image-disk",
                (*where, i, "Ebs", "VolumeSize"),
                f"a root disk of {size} GiB for image {name}, which has {least} GiB",
                "EC2 refuses each node of this type (InvalidBlockDeviceMapping).",
                f"Give {least + 40} or more: TensorFlow with CUDA, logs and spilled objects come on top.",
            )
    names = [d.get("DeviceName") for d in given]
    if root and names and root not in names and {"/dev/sda1", "/dev/xvda"} & set(names):
        yield error(
            "image-root-device",
            (*where, 0, "DeviceName"),
            f"the disk is {names[0]}, and the root of image {name} is {root}",
            f"The node gets a second disk that nobody mounts, and a root of {least or '?'} GiB, which fills up.",
            f"Write DeviceName: {root}.",
        )


def _driver(
    t: NodeType, path: Path, image: dict[str, Any], document: Document, machines: Machines
) -> Iterator[ConfigFinding]:
    kind = machines.all().get(str(t.config.get("InstanceType")), {})
    if not (t.machine.gpus if t.machine else "GpuInfo" in kind) or image.get("OwnerId") == "self":
        return
    text = f"{image.get('Name', '')} {image.get('Description', '')}"
    if installs_driver(document, t):
        return
    if not DRIVER.search(text):
        yield warning(
            "image-no-driver",
            path,
            f"image {image.get('Name') or image['ImageId']} says nothing of NVIDIA's driver, and the node has a GPU",
            "Without the driver TensorFlow trains on the CPU, at the price of the GPU, or the job waits forever.",
            "Take resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/"
            "ami-id, or install the driver in setup_commands.",
        )
    elif _OLD.search(text):
        yield warning(
            "image-old-driver",
            path,
            f"image {image.get('Name') or image['ImageId']} is of a time before CUDA 12",
            "TensorFlow 2.21 wants CUDA 12.5 and a driver of 525 or newer, else it finds no GPU.",
            "Take an image of Ubuntu 22.04 or newer with NVIDIA's driver.",
        )


def installs_driver(document: Document, t: NodeType) -> bool:
    """Whether the set-up or a start script brings NVIDIA's driver itself."""
    keys = ("initialization_commands", "setup_commands", "worker_setup_commands")
    commands = [str(command) for key in keys for command in document.sequence(key)]
    return any(
        map(_INSTALLS_DRIVER.search, [*commands, str(t.config.get("UserData", "")), str(t.config.get("metadata"))])
    )
