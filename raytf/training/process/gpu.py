"""A worker's GPUs: checked when its group starts, and blamed or cleared when TensorFlow raises an error about one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from raytf.distributed.gpu import health, visibility
from raytf.distributed.gpu.faults import FaultFacts, FaultOwner, StepLoad, advise, sort
from raytf.errors import GpuError, JobError, RaytfError, UnsupportedError, WorkerLostError, one_line

#: Rows and columns of a matrix: large enough for the library's regular kernels, and multiplied in a few milliseconds.
_SIZE = 1024
#: Characters of TensorFlow's text in a message for the user.
_TEXT = 400

# -- a matrix product with a known result ------------------------------------------------------------------------------
#
# A GPU that miscalculates passes every other check. The factors are small whole numbers, so every GPU gets the same
# exact result in every precision in which TensorFlow multiplies float32: TF32 keeps 11 bits of a factor, and sums in
# float32 are exact below 2^24.


def factors(size: int = _SIZE) -> tuple[np.ndarray, np.ndarray]:
    """Return two float32 matrices of whole numbers from 0 to 15, in which neighboring rows differ."""
    rows, columns = np.ogrid[:size, :size]
    a, b = (rows * 7 + columns * columns * 3) % 16, (rows * rows * 5 + columns * 11) % 16
    return a.astype(np.float32), b.astype(np.float32)


def fault(got: np.ndarray, size: int = _SIZE) -> str:
    """Describe for the user what is wrong with a product of the factors; empty if it is right."""
    a, b = factors(size)
    want = a.astype(np.float64) @ b.astype(np.float64)  # whole numbers far below 2^53
    wrong = np.argwhere(np.asarray(got, np.float64) != want)
    if not len(wrong):
        return ""
    row, column = map(int, wrong[0])
    return (
        f"{len(wrong)} of {size * size} entries of a matrix product are wrong, the first at [{row}, {column}]: "
        f"{got[row, column]:g} instead of {want[row, column]:g}"
    )


def check_product(devices: Sequence[str] | None = None, multiply: Callable[[str], np.ndarray] | None = None) -> None:
    """Check the matrix product on each device.

    Args:
        devices: TensorFlow's names of the devices; by default all GPUs of this process.
        multiply: returns the product of the factors on a device; by default computed by TensorFlow.

    Raises:
        GpuError: a device computes a wrong result; the message names the node and the device.
    """
    if devices is None:
        import tensorflow as tf

        devices = [f"/GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]
    for device in devices:
        wrong = fault((multiply or _multiply)(device))
        if wrong:
            address, node = visibility.here()
            raise GpuError(f"node {address}: {device.strip('/')} miscalculates: {wrong}", node)


def _multiply(device: str) -> np.ndarray:
    import tensorflow as tf

    a, b = factors()
    with tf.device(device):
        return tf.linalg.matmul(tf.constant(a), tf.constant(b)).numpy()


# -- errors about a GPU ------------------------------------------------------------------------------------------------


def explain(
    error: BaseException, trace: str, load: Callable[[], StepLoad], read_facts: Callable[[], FaultFacts] | None = None
) -> RaytfError | None:
    """Return the error to raise instead of a TensorFlow error about a GPU.

    Args:
        error: the error that TensorFlow raised.
        trace: its traceback, as text.
        load: returns what a step puts on a GPU; called only if needed.
        read_facts: returns what is known about this process's GPU; called only if needed.

    Returns:
        The error; None if the TensorFlow error is not about a GPU.
    """
    text = str(error)
    if sort(text, FaultFacts()) is None:  # not about a GPU
        return None
    known = (read_facts or _facts)()
    whose = sort(text, known)
    address, node = visibility.here()
    if known.is_told:  # the coordinator learns that some worker's GPU failed, but not which one
        address, node = "of a worker", ""
    message = f"{type(error).__name__}: {one_line(text, _TEXT)}"
    match whose:
        case FaultOwner.REFUSED:
            return UnsupportedError(f"TensorFlow does not support this run on its devices: {message}")
        case FaultOwner.MEMORY:
            return JobError(advise(text, load()), trace)
        case FaultOwner.CODE:
            return JobError(f"kernels of this job fail on every GPU: {message}", trace)
        case FaultOwner.PEER:
            return WorkerLostError(one_line(text, 500))
        case FaultOwner.TAKEN:
            return GpuError(f"node {address}: another process is on the GPU of this worker: {message}", node)
        case FaultOwner.NETWORK:
            return GpuError(f"node {address}: NCCL fails between GPUs: {message}", node, is_doubtful=True)
        case FaultOwner.LAUNCH:
            return GpuError(f"node {address}: a kernel failed on the GPU: {message}", node, is_launch=True)
        case _:
            return GpuError(f"node {address}: its GPU, the driver or a CUDA library fails: {message}", node)


def _facts() -> FaultFacts:
    """Return what NVML and Ray know about this worker's GPU, once it has started to compute."""
    if visibility.assigned_gpus() == []:
        return FaultFacts(is_told=True)
    others = None
    with contextlib.suppress(GpuError):
        counts = [reading.processes for reading in health.read_mine(computes=True)]
        others = max((count for count in counts if count is not None), default=None)
    return FaultFacts(others, is_divided=visibility.share() < 1)


def load_of(batch: int, shards: int, is_mixed: bool) -> StepLoad:
    """Return the load that a step puts on a GPU of this process."""
    gpu = None
    with contextlib.suppress(GpuError):
        mine = [reading.gpu for reading in health.read_mine()]
        gpu = (mine[0].name, mine[0].memory_bytes) if mine else None
    return StepLoad(batch, shards, gpu, is_mixed, visibility.share())
