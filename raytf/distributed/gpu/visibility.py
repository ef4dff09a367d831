"""Which GPUs a process sees: those that Ray gave it, and no others; and that those it was given are there.

Ray leaves CUDA_VISIBLE_DEVICES alone where a worker has no GPU, and TensorFlow takes all memory of all GPUs that it
sees. An empty CUDA_VISIBLE_DEVICES hides them, but TensorFlow still starts the driver to learn that there are none;
where TF_ENABLED_DEVICE_TYPES has no GPU as TensorFlow is loaded, it does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from raytf.distributed.gpu import cuda_driver
from raytf.distributed.gpu.nvml import ORDER, VISIBLE
from raytf.errors import GpuError

#: The kinds of device that TensorFlow registers as it is loaded (tensorflow/core/common_runtime/device_factory.cc).
KINDS = "TF_ENABLED_DEVICE_TYPES"
#: With these a process neither sees GPUs nor starts their driver.
HIDDEN = {VISIBLE: "", KINDS: "CPU"}


def given() -> list[str] | None:
    """What Ray calls the GPUs that it gave to this process; None without Ray, where the environment stays as it is."""
    if not ray.is_initialized():
        return None
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def heed(gpus: Sequence[str] | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Hide all GPUs from a process that was given none. To be called before TensorFlow makes an operation, best before
    it is loaded.

    Args:
        gpus: as of `given`.
    """
    if gpus is None:
        return
    if gpus:
        environ.setdefault(ORDER, "PCI_BUS_ID")  # as Ray and NVML count; CUDA's own is the fastest first
        return
    environ[VISIBLE] = ""
    if not has_tpu():
        environ.setdefault(KINDS, HIDDEN[KINDS])  # of no effect where TensorFlow is loaded already


def hide_unless_given() -> None:
    """`heed` what Ray gave to this process."""
    heed(given())


@contextmanager
def unseen(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """TensorFlow that is loaded inside of the `with` statement sees no GPU, unless CUDA_VISIBLE_DEVICES says which.

    For a driver that did not load it itself: GPUs are Ray's to give, and TensorFlow would take all memory of all of
    them. Nothing of it stays in the environment, which a Ray that this process starts later inherits.
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
    """Part of a GPU that Ray gave to this process, at most 1; 1 without Ray."""
    if not ray.is_initialized():
        return 1.0
    return min(1.0, float(ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0)))


def threads() -> int:
    """CPUs of this process's node for each GPU, times those that it was given; 0 without Ray."""
    if not ray.is_initialized():
        return 0
    context = ray.get_runtime_context()
    node: dict[str, float] = next((n["Resources"] for n in ray.nodes() if n["NodeID"] == context.get_node_id()), {})
    own = float(context.get_assigned_resources().get("GPU", 0.0))
    return threads_of(float(node.get("CPU", 1.0)), float(node.get("GPU", 0.0)), own)


def threads_of(cpus: float, gpus: float, own: float) -> int:
    """Threads for a process, so that a node's CPUs are divided as its GPUs are.

    Args:
        cpus, gpus: of the node.
        own: GPUs that the process was given.
    """
    return max(1, int(cpus * own / max(gpus, own))) if own else 1


def has_tpu() -> bool:
    """Whether Ray gave TPUs to this process."""
    return ray.is_initialized() and bool(ray.get_runtime_context().get_accelerator_ids().get("TPU"))


def demand_driver(gpus: Sequence[str] | None, trouble: Callable[[], str] = cuda_driver.trouble) -> None:
    """The driver works, in a process that was given GPUs.

    Raises:
        GpuError: it does not; names the node and what the driver says.
    """
    wrong = trouble() if gpus else ""
    if wrong:
        raise missing(gpus or (), 0, wrong)


def demand(gpus: Sequence[str] | None, found: Sequence[Any]) -> None:
    """TensorFlow has found the GPUs that this process was given.

    Args:
        gpus: as of `given`.
        found: TensorFlow's physical devices of the kind GPU.

    Raises:
        GpuError: fewer; names the node and why, as far as that can be known.
    """
    if not gpus or len(found) >= len(gpus):
        return
    lacking = cuda_driver.missing_libraries()
    why = cuda_driver.trouble() or (
        f"TensorFlow cannot load {', '.join(lacking)}; `pip install 'raytf[gpu]'` on this node brings them"
        if lacking
        else "the driver works, and TensorFlow does not say why"
    )
    raise missing(gpus, len(found), why)


def missing(gpus: Sequence[str], found: int, why: str) -> GpuError:
    """The error for GPUs that Ray gave and that are not there, as one line."""
    numbers = f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}"
    address, node = here()
    return GpuError(
        f"node {address}: Ray gave this worker {numbers}, and {found or 'none'} can be used: {' '.join(why.split())}",
        node=node,
    )


def here() -> tuple[str, str]:
    """This process's node, for people, and Ray's id of it; the id is empty without Ray."""
    if not ray.is_initialized():
        return "here", ""
    node = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()} ({node[:8]})", node
