"""Batches go to the device while the calls before them compute, as many bytes as there may be of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

#: Of a device's memory, that batches may take which are not computed yet, or are just now.
MOST_BYTES = 512 << 20


class Upload:
    """Sends the leaves of a call to a device; to be called from the thread that gathers them.

    Args:
        device: as TensorFlow names it.
        calls: how many calls may be there at a time, the one that runs included.
        most: bytes of all of these. A call that is larger than its part goes when it runs.
    """

    def __init__(self, device: str, calls: int, most: int = MOST_BYTES):
        self._device, self._part = device, most // calls

    def __call__(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        sent = [_belongs_on_device(leaf) for leaf in leaves]
        if sum(leaf.nbytes for leaf, goes in zip(leaves, sent, strict=True) if goes) > self._part:
            return list(leaves)
        with tf.device(self._device):
            return [tf.constant(leaf) if goes else leaf for leaf, goes in zip(leaves, sent, strict=True)]


def _belongs_on_device(leaf: np.ndarray) -> bool:
    # Functions take int32 and strings from the host's memory, also on a GPU.
    return leaf.dtype.kind in "biuf" and leaf.dtype != np.int32
