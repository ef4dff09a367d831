"""The memory tier's bytes: what was written is read, and nothing that is torn or damaged looks whole."""

import functools
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.checkpoint import codec, snapshot_slot
from raytf.checkpoint.codec import DeviceTensor
from raytf.checkpoint.slot_ledger import MemoryShare
from raytf.errors import CheckpointError

SHARE = MemoryShare(40, "a", 1, 2)
TENSORS = {
    "kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16),
    "iterations": np.array(40, np.int64),
    "mask": np.array([True, False, True]),
    "nothing": np.zeros((0, 4)),
}


@pytest.fixture
def path():
    fd = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def contents(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def write(slot, step=40, tensors=TENSORS):
    return slot.write(MemoryShare(step, "a", 1, 2), tensors, {"loss": 0.5, "step": step}, b'{"history": []}')


def test_what_is_written_is_read(path):
    size = write(snapshot_slot.Slot(path))
    share, tensors, live, slow = snapshot_slot.parse(contents(path))
    assert share == MemoryShare(40, "a", 1, 2, size)
    assert live["loss"] == 0.5
    assert slow == {"history": []}
    assert list(tensors) == list(TENSORS)
    for name, array in TENSORS.items():
        assert tensors[name].dtype == array.dtype
        assert tensors[name].tobytes() == array.tobytes()
        assert tensors[name].shape == array.shape


def test_a_slot_is_written_again_and_grows(path):
    slot = snapshot_slot.Slot(path)
    write(slot)
    large = {"kernel": np.random.default_rng(0).random((700, 500))}
    write(slot, 50, large)
    write(slot, 60)
    assert snapshot_slot.parse(contents(path))[0].step == 60
    write(slot, 70, large)
    share, tensors, _, _ = snapshot_slot.parse(contents(path))
    assert share.step == 70
    np.testing.assert_array_equal(tensors["kernel"], large["kernel"])


def test_an_empty_slot_holds_nothing(path):
    assert snapshot_slot.head(b"") is None
    snapshot_slot.Slot(path)
    assert snapshot_slot.head(b"\0" * 4096) is None
    with pytest.raises(CheckpointError, match="is incomplete"):
        snapshot_slot.parse(b"\0" * 4096)


def test_what_is_given_is_not_kept(path):
    slot, array = snapshot_slot.Slot(path), np.ones(4)
    write(slot, tensors={"x": array})
    array[:] = 7
    read = snapshot_slot.parse(contents(path))[1]["x"]
    write(slot, 50, {"x": np.zeros(4)})
    assert read.tolist() == [1, 1, 1, 1]


def test_what_threads_copy_is_read(path):
    rng = np.random.default_rng(0)
    large = {"kernel": rng.random((3_000_001,)).astype(np.float32).reshape(-1, 1), "turned": rng.random((700, 500)).T}
    large["many"] = rng.integers(0, 256, codec._MANY + codec._COPIED + 5, np.uint8)
    write(snapshot_slot.Slot(path), 50, large)
    tensors = snapshot_slot.parse(contents(path))[1]
    assert all((tensors[name] == array).all() for name, array in large.items())
    copies = [np.empty(array.shape, array.dtype) for array in large.values()]
    codec.copy_all(copies, list(large.values()))
    assert all((copy == array).all() for copy, array in zip(copies, large.values(), strict=True))


class Device:
    """Arrays that are somewhere else: fetching one makes a copy, and how many copies there are at a time is counted."""

    def __init__(self, arrays):
        self.arrays, self.copies, self.most, self.lock = arrays, 0, 0, threading.Lock()

    def tensors(self):
        return {n: DeviceTensor(a.dtype, a.shape, functools.partial(self.fetch, n)) for n, a in self.arrays.items()}

    def fetch(self, name):
        copy = self.arrays[name].copy()
        self.count(1)
        weakref.finalize(copy, self.count, -1)
        return copy

    def count(self, more):
        with self.lock:
            self.copies += more
            self.most = max(self.most, self.copies)


def test_what_is_on_a_device_is_fetched_one_by_one_and_read(path):
    rng = np.random.default_rng(0)
    arrays = {**TENSORS, **{f"more {i}": rng.random((9, i)) for i in range(20)}}
    arrays["many"] = rng.integers(0, 256, codec._MANY + codec._COPIED + 5, np.uint8)
    device = Device(arrays)
    size = write(snapshot_slot.Slot(path), 50, {"here": np.ones(3), **device.tensors()})
    assert 1 <= device.most <= 2
    share, tensors, _, _ = snapshot_slot.parse(contents(path))
    assert share.bytes == size == write(snapshot_slot.Slot(path), 50, {"here": np.ones(3), **arrays})
    assert snapshot_slot.parse(contents(path))[1].keys() == tensors.keys()
    assert all(tensors[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_several_threads_fetch_in_turn():
    arrays = {f"t{i}": np.full(1000, i) for i in range(30)}
    device = Device(arrays)

    def take(_):
        tensors = device.tensors()
        copies = {name: np.empty(1000, int) for name in tensors}
        codec.copy_all(list(copies.values()), list(tensors.values()))
        return copies

    with ThreadPoolExecutor(4) as pool:
        for copies in pool.map(take, range(8)):
            assert all((copies[name] == array).all() for name, array in arrays.items())
    assert 1 <= device.most <= 2


def test_a_device_that_withholds_a_tensor_is_an_error_and_blocks_nobody(path):
    def fail():
        raise OSError("lost")

    slot = snapshot_slot.Slot(path)
    with pytest.raises(OSError, match="lost"):
        write(slot, 50, {"x": DeviceTensor(np.dtype("f4"), (3,), fail)})
    assert snapshot_slot.head(contents(path)) is None
    write(slot, 60)
    assert snapshot_slot.parse(contents(path))[0].step == 60


def test_a_copy_counts_once_it_is_sealed(path):
    slot = snapshot_slot.Slot(path)
    write(slot, 40)
    size = slot.copy(MemoryShare(50, "a", 1, 2), TENSORS, {}, b"")
    assert snapshot_slot.head(contents(path)) is None
    slot.seal()
    assert snapshot_slot.head(contents(path)) == MemoryShare(50, "a", 1, 2, size)
    assert snapshot_slot.parse(contents(path))[1]["kernel"].tolist() == TENSORS["kernel"].tolist()


class Killed(Exception):
    """Takes the part of SIGKILL in the middle of a write."""


class Memory(bytearray):
    """Memory that dies with its n-th write, of which half is done."""

    left = 10**9

    def __setitem__(self, key, value):
        self.left -= 1
        if self.left == 0:
            raise Killed
        super().__setitem__(key, value)


@pytest.mark.parametrize("writes", range(1, 13))
def test_a_write_that_is_cut_short_leaves_nothing_that_looks_whole(path, writes):
    slot = snapshot_slot.Slot(path)
    write(slot)
    memory = Memory(contents(path))
    slot._memory, memory.left = memory, writes  # type: ignore[assignment]
    try:
        write(slot, 50, {name: array * 0 + 1 for name, array in TENSORS.items()})
    except Killed:
        found = snapshot_slot.head(memory)
        # Before the first change of memory it is the old one, and never a mixture.
        assert found is None or (found.step == 40 and writes == 1)
    else:
        assert snapshot_slot.parse(memory)[0].step == 50


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_noticed(data):
    fd = os.memfd_create("flip")
    path = f"/proc/{os.getpid()}/fd/{fd}"
    size = write(snapshot_slot.Slot(path))
    memory = bytearray(contents(path)[:size])
    os.close(fd)
    bit = data.draw(st.integers(0, 8 * size - 1))
    memory[bit // 8] ^= 1 << bit % 8
    try:
        share, tensors, _, _ = snapshot_slot.parse(memory)
    except CheckpointError:
        return
    assert 56 <= bit // 8 < 64, "only the gap between header and data is free of a checksum"
    assert (share.step, share.share, share.shares) == (40, 1, 2)
    assert all(tensors[name].tobytes() == array.tobytes() for name, array in TENSORS.items())
