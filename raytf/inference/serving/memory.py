"""The memory of a process that serves: what a large request took is given back when it has been answered."""

from __future__ import annotations

import contextlib
import ctypes

#: Of mallopt(3), in <malloc.h> of glibc.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
#: Bytes from which a block is mapped by itself and unmapped when it is freed.
_LARGE = 1 << 20
#: Heaps from which threads take what is smaller.
_ARENAS = 2


def settle() -> None:
    """Have this process's allocator give large blocks back at once, and keep few heaps.

    glibc lets the size from which it maps a block by itself grow to 32 MiB as such blocks are freed, and gives each
    thread a heap of its own: what bodies of that size took would stay with the process, once for each thread. Another
    C library is left as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_ARENA_MAX, _ARENAS)
