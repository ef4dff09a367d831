"""A hash of the weights where they are: 64 bits, of which the highest tells by which law it was made.

On a CPU it is the CRC-32C of the variables' own buffers, for which processors have an instruction. On a GPU it is
multilinear (Carter and Wegman, Universal classes of hash functions, 1979; Lemire and Kaser, Strongly universal string
hashing is fast, 2014): the sum, modulo 2^64, of each element's bits, at most 32 of them at a time, times a number that
is a function of its place, by Steele, Lea and Flood's mixing (Fast splittable pseudorandom number generators, 2014). A
sum of integers is the same in any order, and all operations have kernels for integers on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from raytf.distributed.replica_agreement import DEVICE_BIT

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: Bytes that are taken at a time, so that other threads get the interpreter meanwhile.
_PIECE = 16 << 20
#: Integers as wide as an element; of 8 bytes there are two.
_WORDS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint32}


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


def device_sum(tensors: Sequence[tf.Tensor], most: int = 1 << 24) -> tf.Tensor:
    """The multilinear hash of tensors, int64 []; may be traced.

    Args:
        most: elements at a time, for which a device takes some 40 bytes each.
    """
    total, start = tf.constant(0, tf.int64), 0
    for tensor in tensors:
        flat = tf.reshape(tensor, [-1])
        for begin in range(0, int(flat.shape[0]), most):
            with tf.control_dependencies([total]):  # one piece after another, or memory would be that of all
                words = _words(flat[begin : begin + most] if flat.shape[0] > most else tf.identity(flat))
                count = int(words.shape[0])
                places = tf.bitcast(tf.range(start, start + count, dtype=tf.int64), tf.uint64)
                total += tf.reduce_sum(tf.bitcast(words * _mixed(places), tf.int64))
            start += count
    return total


def _words(flat: tf.Tensor) -> tf.Tensor:
    """The elements' bits as uint64 [n], at most 32 of them in each."""
    if flat.dtype == tf.bool:
        flat = tf.cast(flat, tf.uint8)
    words = tf.bitcast(flat, _WORDS[flat.dtype.size])
    return tf.cast(tf.reshape(words, [-1]), tf.uint64)


def _mixed(x: tf.Tensor) -> tf.Tensor:
    def number(value: int) -> tf.Tensor:
        return tf.constant(value, tf.uint64)

    def folded(value: tf.Tensor, shift: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(value, tf.bitwise.right_shift(value, number(shift)))

    x = (x + number(1)) * number(_GAMMA)
    return folded(folded(folded(x, 30) * number(_FIRST), 27) * number(_SECOND), 31)
