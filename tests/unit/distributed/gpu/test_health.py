"""Whether a GPU is fit is decided by what NVML says; readings are made up here, where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytf.distributed.gpu.health import LOOK_SECONDS, WAIT_SECONDS, GpuComplaint, GpuReading, await_fit, judge, others
from raytf.distributed.gpu.nvidia_driver import Gpu, visible
from raytf.errors import GpuError

GIB = 2**30
GPU = Gpu("GPU-5c1b9a0e", "NVIDIA L4", 24 * GIB)
FIT = GpuReading(GPU, 23 * GIB, 0, 0, 0, False, False, slow=0x1)  # 0x1: idle
SILENT = GpuReading(GPU, 24 * GIB)
TAKEN = replace(FIT, free_bytes=10 * GIB, processes=1)
HOT = replace(FIT, slow=0x41)


@pytest.mark.parametrize(
    ("reading", "share", "words", "passes"),
    [
        (FIT, 1.0, None, None),
        (SILENT, 1.0, None, None),
        (replace(FIT, uncorrected=2), 1.0, "2 uncorrectable ECC errors since its driver was loaded", False),
        (replace(FIT, is_remapping=True), 1.0, "wait for a reset", False),
        (replace(FIT, is_worn=True), 1.0, "could not be replaced", False),
        (replace(FIT, slow=0x08), 1.0, "the hardware slows it down", True),
        (replace(FIT, slow=0x20), 1.0, "too hot, and the driver", True),
        (HOT, 1.0, "too hot, and the hardware", True),
        (replace(FIT, slow=0x80), 1.0, "power supply", True),
        (replace(FIT, slow=0x04), 1.0, None, None),  # the usual power cap
        (TAKEN, 1.0, "10.0 GiB of its 24.0 GiB are free, but 21.6 GiB are needed: another process holds", True),
        (replace(TAKEN, processes=None), 1.0, "it is not known which process holds the rest", True),
        (TAKEN, 0.4, None, None),
        (TAKEN, 0.5, "10.8 GiB are needed", True),
        (replace(FIT, free_bytes=18 * GIB, display_bytes=5 * GIB), 1.0, None, None),
        (replace(FIT, free_bytes=21 * GIB + GIB // 2), 1.0, "21.5 GiB of its 24.0 GiB", True),
        (replace(FIT, free_bytes=21 * GIB + GIB // 2), 4.0, "21.6 GiB are needed", True),
    ],
)
def test_what_is_wrong_with_a_gpu(reading, share, words, passes):
    found = judge(reading, share)
    if words is None:
        assert found == []
        return
    assert words in found[0].text
    assert found[0].passes is passes


def test_all_that_is_wrong_is_said_what_lasts_first():
    found = judge(replace(TAKEN, uncorrected=1, is_worn=True, slow=0x8))
    assert [complaint.passes for complaint in found] == [False, False, True, True]
    assert found[0] == GpuComplaint("1 uncorrectable ECC errors since its driver was loaded")


class World:
    """Readings over time; sleeping makes time go by."""

    def __init__(self, *readings: GpuReading):
        self.now, self.looks, self._readings = 0.0, 0, readings

    def read(self) -> list[GpuReading]:
        self.looks += 1
        return [self._readings[min(self.looks, len(self._readings)) - 1]]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self) -> None:
        await_fit(self.read, ("10.0.0.7 (abc)", "abcdef"), clock=lambda: self.now, sleep=self.sleep)


@pytest.mark.parametrize(
    ("readings", "looks"), [([FIT], 1), ([TAKEN, TAKEN, FIT], 3), ([TAKEN, replace(FIT, slow=0x40), FIT], 3)]
)
def test_a_predecessor_that_is_dying_is_waited_for(readings, looks):
    world = World(*readings)
    world.wait()
    assert (world.looks, world.now) == (looks, (looks - 1) * LOOK_SECONDS)


def test_what_stays_is_a_fault_of_the_node_in_the_end():
    world = World(TAKEN)
    with pytest.raises(GpuError) as found:
        world.wait()
    assert world.now == pytest.approx(WAIT_SECONDS)
    assert found.value.node == "abcdef"
    assert str(found.value).startswith("node 10.0.0.7 (abc): NVIDIA L4 (GPU-5c1b9a0e) is not fit: 10.0 GiB of its 24.0")
    assert str(found.value).endswith("another process holds the rest, after 20 s")


def test_what_does_not_pass_is_a_fault_at_once():
    world = World(TAKEN, replace(TAKEN, uncorrected=1))
    with pytest.raises(GpuError, match=r"1 uncorrectable ECC errors since its driver was loaded$"):
        world.wait()
    assert world.looks == 2


def test_a_gpu_that_nvml_cannot_reach_is_a_fault_of_the_node():
    def read() -> list[GpuReading]:
        raise GpuError("the GPU driver (NVML) reported: GPU is lost")

    with pytest.raises(GpuError, match=r"^node 10.0.0.7: the GPU driver .NVML. reported: GPU is lost$") as found:
        await_fit(read, ("10.0.0.7", "abcdef"))
    assert found.value.node == "abcdef"


def test_a_worker_without_a_driver_has_nothing_to_wait_for():
    await_fit(lambda: [], ("", ""))


@pytest.mark.parametrize(
    ("pids", "computes", "rest"),
    [
        ([], False, []),
        ([7], False, []),
        ([7, 8], True, [8]),
        ([8], False, [8]),
        ([8], True, []),  # this process, by its number on the host
        ([8, 9], True, [9]),
    ],
)
def test_which_processes_are_others(pids, computes, rest):
    assert others(pids, 7, computes) == rest


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("2, 0", ["2", "0"]),
        ("0,-1,1", ["0"]),
        ("GPU-5c1b9a0e,MIG-77", ["GPU-5c1b9a0e", "MIG-77"]),
        ("0,0,1", ["0"]),
    ],
)
def test_which_gpus_cuda_visible_devices_shows(setting, found):
    assert visible(setting) == found
