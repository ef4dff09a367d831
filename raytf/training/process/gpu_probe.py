"""Computes one matrix product with a known result on each GPU of a worker, when its group starts.

A GPU that miscalculates passes every other check. The factors are small whole numbers, so that every GPU gets the same
exact result in every precision in which TensorFlow multiplies float32 (TF32 keeps 11 bits of a factor, and sums in
float32 are exact below 2^24). Its test runs it on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from raytf.distributed.gpu import visibility
from raytf.errors import GpuError

#: Rows and columns: large enough that the library uses its regular kernels, and still only some milliseconds.
_SIZE = 1024


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


def check(devices: Sequence[str] | None = None, multiply: Callable[[str], np.ndarray] | None = None) -> None:
    """Check the matrix product on each device.

    Args:
        devices: TensorFlow's names of the devices; by default all GPUs of this process.
        multiply: returns the product of the factors on a device; by default computed by TensorFlow.

    Raises:
        GpuError: a device has a wrong result; names node and device.
    """
    if devices is None:
        devices = [f"/GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]
    for device in devices:
        wrong = fault((multiply or _multiply)(device))
        if wrong:
            address, node = visibility.here()
            raise GpuError(f"node {address}: {device.strip('/')} miscalculates: {wrong}", node)


def _multiply(device: str) -> np.ndarray:
    a, b = factors()
    with tf.device(device):
        return tf.linalg.matmul(tf.constant(a), tf.constant(b)).numpy()
