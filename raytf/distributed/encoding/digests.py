"""Digests: 64 bits that show whether two tensors are equal, computed on the device that holds them.

On a CPU a digest is FarmHash's Fingerprint64, for which TensorFlow has a kernel that reads memory once. Large tensors
of int32 are folded first, which is three times as fast: they are laid out as a matrix, and a vector times that matrix,
modulo 2^32, is hashed. The vector's numbers are odd and distinct, so a change of one number is always detected, and a
change of several is missed with a chance of about 2^-32. If only highest bits change, it is detected if any column has
an odd number of changes. A matrix has an odd number of rows, so a fault in a whole column is detected, too.

A GPU has no kernel for FarmHash. There a digest is multilinear (Carter and Wegman, Universal classes of hash functions,
1979; Lemire and Kaser, Strongly universal string hashing is fast, 2014). It is a sum modulo 2^64: each element's bits,
in words of at most 32, times a number computed from the word's place by Steele, Lea and Flood's mixing (Fast splittable
pseudorandom number generators, 2014). A sum of integers is the same in any order, and the device has integer kernels
for all of these operations. Digests from different kinds of devices cannot be compared.

Each shard's digests are sent with the step, in the shard's row, as float32 numbers with the same bits. Nothing is
computed with these numbers, so their bits do not change. A step's digests are computed from them: one of the step, one
of each shard, and one of each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from raytf.distributed.step_digest import SHARD_BYTES, STEP_BYTES, TENSOR_BYTES, DigestKind

#: Columns of a row that one digest occupies.
COLUMNS = 2
#: Columns and maximum rows of a folded matrix. Hashing fewer than `_FEW` numbers is as fast without folding.
FOLD_WIDTH, FOLD_ROWS, _FEW = 64, (1 << 15) - 1, 1 << 14
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: The integer type for elements of each size in bytes; an element of 8 bytes becomes two integers.
_WORDS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint32}


def columns(tensors: Sequence[tf.Tensor], kind: DigestKind) -> tf.Tensor:
    """Return [T, COLUMNS] float32, the digest of each tensor, 0 for an empty tensor; to be traced."""
    if kind == DigestKind.DEVICE:
        return of_sums(tf.stack([_device_digest(each) for each in tensors]))
    # As few operations as possible: with small weights, operations cost more than bytes.
    fingerprints = tf.concat([_digest(each, kind == DigestKind.FOLDED) for each in tensors], 0)
    return tf.bitcast(tf.reshape(fingerprints, [-1, COLUMNS, 4]), tf.float32)


def of_sums(sums: tf.Tensor) -> tf.Tensor:
    """Return multilinear digests, int64 [...], as float32 [..., COLUMNS]."""
    return tf.bitcast(sums, tf.float32)


def of_step(rows: tf.Tensor, kind: DigestKind) -> tf.Tensor:
    """Return the bytes that `step_digest` describes, as float32 padded with zeros; to be traced.
    `rows` are [V, T * COLUMNS] float32, the digests of each shard's T tensors."""
    shards, width = rows.shape
    tensors = width // COLUMNS
    of_rows = _sums_as_bytes if kind == DigestKind.DEVICE else _fingerprints
    raw = tf.reshape(tf.bitcast(rows, tf.uint8), [shards, tensors, STEP_BYTES])
    of_shards = of_rows(tf.reshape(raw, [shards, -1]))
    of_tensors = of_rows(tf.reshape(tf.transpose(raw, [1, 0, 2]), [tensors, -1]))
    whole = of_rows(tf.reshape(of_shards, [1, -1]))
    parts = [whole, of_shards[:, :SHARD_BYTES], of_tensors[:, :TENSOR_BYTES]]
    raw = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
    return tf.bitcast(tf.reshape(tf.pad(raw, [[0, -raw.shape[0] % 4]]), [-1, 4]), tf.float32)


def device_sum(tensors: Sequence[tf.Tensor], most: int = 1 << 24) -> tf.Tensor:
    """Return the multilinear digest of tensors as int64 []; may be traced.
    It processes `most` elements at a time, each of which needs about 40 bytes on the device."""
    total, start = tf.constant(0, tf.int64), 0
    for tensor in tensors:
        flat = tf.reshape(tensor, [-1])
        for begin in range(0, int(flat.shape[0]), most):
            with tf.control_dependencies([total]):  # one piece after another, to need the memory of only one
                words = _words(flat[begin : begin + most] if flat.shape[0] > most else tf.identity(flat))
                total += multilinear(words, tf.constant(start, tf.int64))
            start += int(words.shape[0])
    return total


def multilinear(words: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Return [...] int64 sums over the last axis of uint64 words [..., n], each multiplied by the factor of its place.
    Places are counted from `start`, across all rows."""
    places = tf.range(start, start + tf.size(words, tf.int64), dtype=tf.int64)
    factors = tf.reshape(_mixed(tf.bitcast(places, tf.uint64)), tf.shape(words))
    return tf.reduce_sum(tf.bitcast(words * factors, tf.int64), -1)


def _digest(tensor: tf.Tensor, folds: bool) -> tf.Tensor:
    count = tensor.shape.num_elements()
    if count == 0:
        return tf.zeros([1, STEP_BYTES], tf.uint8)
    if folds and tensor.dtype == tf.int32 and count is not None and count >= _FEW:
        return _fingerprints(folded(tf.reshape(tensor, [-1])))
    return _fingerprints(tf.reshape(tensor, [1, -1]))


def folded(flat: tf.Tensor) -> tf.Tensor:
    """Return int32 [count] folded to [1, n], with n far below count, for comparison with another folded vector.
    The count must be known during tracing."""
    parts, begin, count = [], 0, flat.shape[0]
    while (rows := min(FOLD_ROWS, ((count - begin) // FOLD_WIDTH - 1) | 1)) > 1:
        end = begin + rows * FOLD_WIDTH
        matrix = tf.reshape(flat[begin:end], [rows, FOLD_WIDTH])  # starts at an aligned address, so it is not copied
        parts.append(tf.matmul(tf.constant(fold_factors()[None, :rows]), matrix))
        begin = end
    return tf.concat([*parts, flat[None, begin:]], 1)


@functools.cache
def fold_factors() -> np.ndarray:
    """Return [`FOLD_ROWS`] odd int32, computed from their places by Steele, Lea and Flood's mixing."""
    with tf.init_scope(), tf.device("CPU:0"):  # computed eagerly even while a graph is traced
        mixed = _mixed(tf.cast(tf.range(FOLD_ROWS), tf.uint64)).numpy()
    return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32) | np.int32(1)


def _device_digest(tensor: tf.Tensor) -> tf.Tensor:
    start = tf.constant(0, tf.int64)
    return start if tensor.shape.num_elements() == 0 else multilinear(_words(tf.reshape(tensor, [-1])), start)


def _fingerprints(rows: tf.Tensor) -> tf.Tensor:
    """Return [N, 8] uint8, the fingerprint of each row of [N, ...]."""
    fingerprints = tf.raw_ops.Fingerprint(data=rows, method="farmhash64")
    return tf.ensure_shape(fingerprints, [rows.shape[0], STEP_BYTES])


def _sums_as_bytes(rows: tf.Tensor) -> tf.Tensor:
    """Return [N, 8] uint8, the multilinear digest of each row of [N, ...] uint8, whose length is a multiple of 4."""
    words = tf.cast(tf.bitcast(tf.reshape(rows, [rows.shape[0], -1, 4]), tf.uint32), tf.uint64)
    # Only the first bytes are kept, so they must depend on all bytes of the sum.
    return tf.bitcast(_mixed(tf.bitcast(multilinear(words, tf.constant(0, tf.int64)), tf.uint64)), tf.uint8)


def _words(flat: tf.Tensor) -> tf.Tensor:
    """Return the elements' bits as uint64 [n], with at most 32 bits in each."""
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
