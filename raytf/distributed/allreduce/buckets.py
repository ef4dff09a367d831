"""Gradients in buckets, each summed over the workers once it is complete, while other gradients are still computed.

A backward pass yields the gradients of the last layers first, so buckets go from the last tensor to the first (Li et
al., PyTorch Distributed, VLDB 2020). The sums start inside the body of the loop over a worker's shards, at its last
shard: so the loop's body is the same for every number of shards, as equal bits require.

All workers add the buckets one after another in the same order, which NCCL and sums in host memory need. All their
loops have the same number of rounds, because TensorFlow also matches the parts of a collective by round; workers with
fewer shards have nothing to do in the first rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import tensorflow as tf

#: Bytes on the wire up to which a bucket is filled. A single tensor may be larger than that.
BYTES = 32 << 20


class Overlap(NamedTuple):
    """Settings for adding gradients while others are computed. They are the same on all workers.

    Attributes:
        bytes: on the wire, up to which a bucket is filled.
        rounds: of each worker's loop over its shards: as many as the worker with the most shards has.
    """

    bytes: int
    rounds: int


#: (index of the bucket, its tensors summed over this worker's shards) -> its tensors summed over all workers.
AddBucket = Callable[[int, list[tf.Tensor]], list[tf.Tensor]]


def cut(sizes: Sequence[int], most: int) -> list[range]:
    """Return which neighbouring tensors form a bucket, from the first bucket to the last.

    Buckets are filled from the last tensor on, so the first one gets what is left, and is small: it is known last, and
    nothing is computed while it is summed.

    Args:
        sizes: the tensors' bytes on the wire.
        most: bytes in a bucket, unless it is a single tensor.
    """
    ranges: list[range] = []
    end, held = len(sizes), 0
    for i in reversed(range(len(sizes))):
        if i + 1 < end and held + sizes[i] > most:
            ranges.append(range(i + 1, end))
            end, held = i + 1, 0
        held += sizes[i]
    return [*([range(end)] if end else []), *reversed(ranges)]


def of_kinds(numbers: Sequence[int], compressed: int, most: int | None) -> list[range]:
    """Return which tensors travel together, in order.

    Args:
        numbers: how many numbers each tensor has.
        compressed: how many tensors, from the first, travel as 2 bytes a number instead of 4; never in a bucket with
            the others.
        most: bytes in a bucket; None for one bucket of each kind.
    """
    ranges = []
    for begin, end in pairwise([0, compressed, len(numbers)]):
        sizes = [n * (2 if end <= compressed else 4) for n in numbers[begin:end]]
        parts = cut(sizes, sum(sizes) if most is None else most)
        ranges += [range(begin + part.start, begin + part.stop) for part in parts]
    return ranges


def after(others: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors, but not before the others are known.

    The order is in the data, not in the context in which a sum is traced: the strategy may trace it in another one.
    """
    with tf.control_dependencies(others):
        return [tf.identity(t) for t in tensors]


class Buckets:
    """The sums over workers of a step's buckets.

    Args:
        parts: each bucket's tensors, as a range among those of a shard.
        add: sums a bucket over all workers.
        rounds: of the loop over shards.
    """

    def __init__(self, parts: Sequence[range], add: AddBucket, rounds: int):
        self._parts, self._add, self.rounds = parts, add, rounds

    def __call__(self, is_last: tf.Tensor | None, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the tensors unchanged, or, after the last shard, summed over the workers.

        Args:
            is_last: whether the tensors include this worker's last shard; None where there is no loop.
            tensors: summed over the shards so far.
        """
        sums: dict[int, list[tf.Tensor]] = {}
        for place in reversed(range(len(self._parts))):
            part = self._parts[place]
            # Each waits for the sum before it, not for all gradients.
            own = after(sums.get(place + 1, []), tensors[part.start : part.stop])
            sums[place] = self._one(place, is_last, own)
        return [tensor for place in range(len(self._parts)) for tensor in sums[place]]

    def _one(self, place: int, is_last: tf.Tensor | None, own: list[tf.Tensor]) -> list[tf.Tensor]:
        if is_last is None:
            return self._add(place, own)
        return list(tf.cond(is_last, lambda: self._add(place, own), lambda: own))
