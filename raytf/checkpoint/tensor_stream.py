"""Tensors that are fetched one at a time: from a device, each that is fetched is a copy in the host's memory."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor that is not in the host's memory.

    Attributes:
        dtype, shape: of what is fetched.
        fetch: its values as an array of its own, in the host's memory.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


#: A tensor, wherever it is.
Tensor = np.ndarray | DeviceTensor
#: Of a process, one thread at a time fetches: copies to a node's memory and to a file may be made at once.
_TURN = threading.Lock()


def fill(pairs: Sequence[tuple[np.ndarray, DeviceTensor]], copy: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Fetch tensors and copy each to where it belongs; the next one is on its way meanwhile.

    At any time there are at most two of them in the host's memory, whatever other threads do.

    Args:
        pairs: (target, source).
        copy: an array to its target.
    """
    if not pairs:
        return
    pool = _thread()
    with _TURN:
        # A future keeps its result, so that it has to go before the one after the next is fetched.
        coming = deque([pool.submit(pairs[0][1].fetch)])
        for k, (target, _) in enumerate(pairs):
            value = coming.popleft().result()
            if k + 1 < len(pairs):
                coming.append(pool.submit(pairs[k + 1][1].fetch))
            copy(target, value)
            del value


@functools.cache
def _thread() -> ThreadPoolExecutor:
    # Always the same one: the allocator keeps some memory of each thread that has freed any.
    return ThreadPoolExecutor(1, thread_name_prefix="raytf-fetch")
