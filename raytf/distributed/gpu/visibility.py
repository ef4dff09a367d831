"""Makes a process see only the GPUs that Ray assigned to it, and checks that it can use them.

Ray does not change CUDA_VISIBLE_DEVICES if a worker has no GPU, and TensorFlow allocates all memory of all GPUs that it
sees. An empty CUDA_VISIBLE_DEVICES hides them, but TensorFlow still starts the driver to find that out. TensorFlow does
not start the driver if TF_ENABLED_DEVICE_TYPES contains no GPU when TensorFlow is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from raytf.distributed.gpu import nvidia_driver
from raytf.distributed.gpu.nvidia_driver import ORDER, VISIBLE
from raytf.errors import GpuError

#: Kinds of device that TensorFlow registers while it is loaded (tensorflow/core/common_runtime/device_factory.cc).
KINDS = "TF_ENABLED_DEVICE_TYPES"
#: With these variables a process neither sees GPUs nor starts their driver.
HIDDEN = {VISIBLE: "", KINDS: "CPU"}


def assigned_gpus() -> list[str] | None:
    """Return Ray's ids of the GPUs that it assigned to this process; None without Ray."""
    if not ray.is_initialized():
        return None
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def heed(gpus: Sequence[str] | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Hide all GPUs from a process that was assigned none (see `assigned_gpus`).
    Call this before TensorFlow creates an operation, and preferably before TensorFlow is loaded."""
    if gpus is None:
        return
    if gpus:
        environ.setdefault(ORDER, "PCI_BUS_ID")  # the order of Ray and NVML; CUDA's default is the fastest first
        return
    environ[VISIBLE] = ""
    has_tpu = ray.is_initialized() and ray.get_runtime_context().get_accelerator_ids().get("TPU")
    if not has_tpu:
        environ.setdefault(KINDS, HIDDEN[KINDS])  # has no effect if TensorFlow is already loaded


def hide_unless_given() -> None:
    """Call `heed` for the GPUs that Ray assigned to this process."""
    heed(assigned_gpus())


@contextmanager
def unseen(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Hide all GPUs from a TensorFlow that is loaded inside the `with` statement, unless CUDA_VISIBLE_DEVICES is set.

    For a driver whose program has not loaded TensorFlow: Ray assigns GPUs to workers, but TensorFlow would allocate all
    memory of all GPUs. The setting is removed again, since Ray inherits the environment if this process starts it.
    """
    hides = "tensorflow" not in sys.modules and VISIBLE not in environ and KINDS not in environ
    if hides:
        environ[KINDS] = HIDDEN[KINDS]
    try:
        yield
    finally:
        if hides:
            environ.pop(KINDS, None)


def share() -> float:
    """Return the part of a GPU that Ray assigned to this process, at most 1; without Ray 1."""
    if not ray.is_initialized():
        return 1.0
    return min(1.0, float(ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0)))


def threads() -> int:
    """Return the node's CPUs per GPU, times the number of this process's GPUs; 0 without Ray."""
    if not ray.is_initialized():
        return 0
    context = ray.get_runtime_context()
    node: dict[str, float] = next((n["Resources"] for n in ray.nodes() if n["NodeID"] == context.get_node_id()), {})
    own = float(context.get_assigned_resources().get("GPU", 0.0))
    return threads_of(float(node.get("CPU", 1.0)), float(node.get("GPU", 0.0)), own)


def threads_of(cpus: float, gpus: float, own: float) -> int:
    """Return the number of threads for a process, which divides a node's CPUs in proportion to its GPUs."""
    return max(1, int(cpus * own / max(gpus, own))) if own else 1


def demand_driver(gpus: Sequence[str] | None, trouble: Callable[[], str] = nvidia_driver.trouble) -> None:
    """Check that the driver works, in a process that was assigned GPUs.
    A GpuError contains the node and the driver's error."""
    wrong = trouble() if gpus else ""
    if wrong:
        raise missing(gpus or (), 0, wrong)


def demand(gpus: Sequence[str] | None, devices: Sequence[Any]) -> None:
    """Check that TensorFlow has as many physical GPUs as this process was assigned.
    A GpuError contains the node and, if known, the reason."""
    if not gpus or len(devices) >= len(gpus):
        return
    lacking = nvidia_driver.missing_libraries()
    why = nvidia_driver.trouble() or (
        f"TensorFlow cannot load {', '.join(lacking)}; `pip install 'raytf-train[gpu]'` on this node installs them"
        if lacking
        else "the driver works, and TensorFlow reports no reason"
    )
    raise missing(gpus, len(devices), why)


def missing(gpus: Sequence[str], usable: int, why: str) -> GpuError:
    """Return the error, in one line, for GPUs that Ray assigned but the process cannot use."""
    numbers = f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}"
    address, node = here()
    return GpuError(
        f"node {address}: Ray gave this worker {numbers}, and {usable or 'none'} can be used: {' '.join(why.split())}",
        node=node,
    )


def here() -> tuple[str, str]:
    """Return the name of this process's node for messages, and its id in Ray, which is empty without Ray."""
    if not ray.is_initialized():
        return "here", ""
    node = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()} ({node[:8]})", node
