"""A hash of the weights where they are: 64 bits, of which the highest tells by which law it was made.

On a CPU it is the CRC-32C of the variables' own buffers, for which processors have an instruction. On a GPU it is
multilinear, see `raytf.distributed.encoding.digests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from raytf.distributed.encoding.digests import device_sum
from raytf.distributed.step_agreement import DEVICE_BIT

#: Bytes that are taken at a time, so that other threads get the interpreter meanwhile.
_PIECE = 16 << 20


class Digest:
    """The hash of some variables.

    Args:
        variables: `tf.Variable`s, in one order on all ranks.
        on_device: whether to make it as on a GPU; by default where one of them is on no CPU.
    """

    def __init__(self, variables: Sequence[Any], on_device: bool | None = None):
        if on_device is None:
            on_device = any(v.device and "/device:CPU:" not in v.device for v in variables)
        self._on_device = on_device
        self._read = tf.function(lambda: [v.read_value() for v in variables], autograph=False)
        self._sum = tf.function(lambda: device_sum([v.read_value() for v in variables]), autograph=False)

    def value(self) -> int:
        """The present hash."""
        if self._on_device:
            return (int(self._sum().numpy()) & (DEVICE_BIT - 1)) | DEVICE_BIT
        crc = 0
        for value in self._read():
            flat = np.asarray(value).reshape(-1).view(np.uint8)
            for begin in range(0, len(flat), _PIECE):
                crc = google_crc32c.extend(crc, flat[begin : begin + _PIECE])
        return crc
