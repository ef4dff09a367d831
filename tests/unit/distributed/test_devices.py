"""Whether a device holds the state twice: asked once, and said where it does not."""

import pytest

from raytf.distributed.devices import DeviceRoom, free_bytes
from raytf.distributed.memory_needs import DEVICE_SPARE

GB = 10**9


@pytest.mark.parametrize(
    ("free", "may", "told"),
    [
        (20 * GB, True, []),
        (4 * GB, False, ["copied: the device has no memory for copies of the state, 4.2 GB: 4 GB are free"]),
        (None, False, ["it is not known whether the device has memory"]),
    ],
)
def test_a_device_is_asked_once_for_the_whole_state(free, may, told):
    asked, said = [], []
    room = DeviceRoom(4_200_000_000, lambda: asked.append(1) or free, said.append)
    assert [room(1), room(DEVICE_SPARE), room(30 * GB)] == [may] * 3
    assert len(asked) == 1
    assert len(said) == len(told)
    assert all(part in line for part, line in zip(told, said, strict=True))


def test_where_there_is_no_gpu_nobody_knows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert free_bytes() is None
