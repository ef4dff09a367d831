"""Selects the records of a worker in an epoch as others do: PyTorch's DistributedSampler and tf.data's `shard`.

PyTorch as its documentation of `torch.utils.data.distributed.DistributedSampler` shows it, with `set_epoch` before each
epoch, and the BatchSampler in which DataLoader puts it. tf.data as TensorFlow's guide Distributed input describes
AutoShardPolicy.DATA, which it takes for arrays: each worker goes through all records and keeps every W-th
(`Dataset.shard`). Nothing is read and, other than in a real input of tf.data, nothing is shuffled: this is the least
that it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class Numbered:
    """A data set of which only the length is asked."""

    def __init__(self, records: int):
        self._records = records

    def __len__(self) -> int:
        return self._records


def torch_epoch(records: int, world_size: int, rank: int, batch: int, epoch: int) -> int:
    """Go through the numbers of a rank's records of an epoch, in batches; how many they are."""
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    sampler: Any = DistributedSampler(Numbered(records), world_size, rank, shuffle=True, seed=1)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return sum(map(len, BatchSampler(sampler, batch, drop_last=False)))


def tf_data_epoch(records: int, world_size: int, rank: int, batch: int) -> int:
    """Do the same with tf.data's `shard`."""
    import tensorflow as tf

    numbers = tf.data.Dataset.range(records).shard(world_size, rank).batch(batch).prefetch(tf.data.AUTOTUNE)
    batches: Iterator[np.ndarray] = numbers.as_numpy_iterator()
    return sum(map(len, batches))
