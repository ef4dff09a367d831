"""What large blocks took is given back when they are freed, also by threads, after larger ones were freed."""

from __future__ import annotations

import subprocess
import sys

#: A block of 24 MiB is freed first, which has glibc keep later ones of up to that size; then threads take some.
PROGRAM = """
import ctypes, sys, threading
import psutil
from raytf.inference.serving import limits

if "settle" in sys.argv:
    limits.return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def take(size, count):
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    keep.append(libc.malloc(100))  # above them, so that the heap cannot shrink
    for block in blocks:
        libc.free(block)

keep = []
take(24 << 20, 1)
before = psutil.Process().memory_info().rss
for _ in range(4):
    thread = threading.Thread(target=take, args=(4 << 20, 16))
    thread.start()
    thread.join()
print((psutil.Process().memory_info().rss - before) >> 20)
"""


def kept(*arguments: str) -> int:
    """MiB that stay with a process."""
    return int(subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, check=True).stdout)


def test_large_blocks_go_back():
    assert kept("settle") < 8
    assert kept() > 32
