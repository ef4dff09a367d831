"""Sends batches to the device while earlier calls compute, within a limit on their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

#: Device memory, in bytes, for the batches that wait or are being computed.
MOST_BYTES = 512 << 20


class Upload:
    """Sends the leaves of a call to a device; to be called from the thread that gathers them.

    Args:
        device: TensorFlow's name of the device.
        calls: how many calls may be on the device at a time, including the one that runs.
        most: bytes of all of these calls. A call that is larger than its part is not sent ahead, but when it runs.
    """

    def __init__(self, device: str, calls: int, most: int = MOST_BYTES):
        self._device = device
        #: Bytes of a call that may be sent ahead.
        self._part = most // calls

    def __call__(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        sent = [_belongs_on_device(leaf) for leaf in leaves]
        if sum(leaf.nbytes for leaf, goes in zip(leaves, sent, strict=True) if goes) > self._part:
            return list(leaves)
        with tf.device(self._device):
            return [tf.constant(leaf) if goes else leaf for leaf, goes in zip(leaves, sent, strict=True)]


def _belongs_on_device(leaf: np.ndarray) -> bool:
    # TensorFlow functions take int32 and strings from host memory, even on a GPU.
    return leaf.dtype.kind in "biuf" and leaf.dtype != np.int32
