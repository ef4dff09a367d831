"""Which GPUs a process sees is decided by what Ray gave to it, and one that is missing is said with its reason."""

from __future__ import annotations

import time

import pytest

from raytf.distributed.gpu import visibility
from raytf.distributed.gpu.nvidia_driver import missing_libraries, trouble
from raytf.distributed.gpu.visibility import HIDDEN, KINDS
from raytf.driver.supervision.retry import KernelFailures
from raytf.errors import GpuError


@pytest.mark.parametrize(
    ("gpus", "before", "after"),
    [
        (None, {"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        (None, {}, {}),
        ([], {}, {"CUDA_VISIBLE_DEVICES": "", KINDS: "CPU"}),
        ([], {"CUDA_VISIBLE_DEVICES": "0,1"}, HIDDEN),
        ([], {KINDS: "CPU,TPU"}, {"CUDA_VISIBLE_DEVICES": "", KINDS: "CPU,TPU"}),
        (["1"], {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (["1"], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}),
    ],
)
def test_what_a_process_sees(gpus, before, after):
    environ = dict(before)
    visibility.heed(gpus, environ)
    assert environ == after


@pytest.mark.parametrize(
    ("cpus", "gpus", "own", "threads"),
    [
        (8, 1, 1, 8),
        (96, 8, 1, 12),
        (4, 1, 0.5, 2),
        (4, 1, 0.1, 1),
        (8, 0, 1, 8),
        (96, 8, 8, 96),
        (8, 1, 0, 1),
        (0, 1, 1, 1),
    ],
)
def test_a_node_s_cpus_are_divided_as_its_gpus_are(cpus, gpus, own, threads):
    assert visibility.threads_of(cpus, gpus, own) == threads


def test_a_driver_hides_gpus_only_while_it_loads_tensorflow(monkeypatch):
    monkeypatch.delitem(visibility.sys.modules, "tensorflow", raising=False)
    environ: dict[str, str] = {}
    with visibility.unseen(environ):
        assert environ == {KINDS: "CPU"}
    assert environ == {}
    for chosen in ({"CUDA_VISIBLE_DEVICES": "1"}, {KINDS: "CPU,GPU"}):
        with visibility.unseen(environ := dict(chosen)):
            assert environ == chosen
        assert environ == chosen


def test_a_driver_that_works_is_no_trouble():
    visibility.demand_driver(["0"], lambda: "")
    visibility.demand_driver([], lambda: "asked though there is nothing to ask for")
    visibility.demand_driver(None, lambda: "asked without Ray")
    visibility.demand(["0"], ["GPU:0"])
    visibility.demand([], [])


def test_a_driver_that_fails_is_said_in_one_line():
    with pytest.raises(GpuError) as found:
        visibility.demand_driver(["2", "3"], lambda: "cuInit: CUDA_ERROR_UNKNOWN:\nunknown error")
    assert str(found.value) == (
        "node here: Ray gave this worker GPUs 2, 3, and none can be used: cuInit: CUDA_ERROR_UNKNOWN: unknown error"
    )


def test_one_of_two_gpus_is_too_few():
    with pytest.raises(GpuError, match=r"GPUs 0, 1, and 1 can be used"):
        visibility.demand(["0", "1"], ["GPU:0"])


def test_a_driver_that_hangs_is_not_waited_for():
    began = time.monotonic()
    assert trouble(lambda: time.sleep(60) or "", seconds=0.2) == "the driver has not answered for 0 s"
    assert time.monotonic() - began < 5


def test_this_machine_has_no_driver():
    """Where it has one, nothing is wrong with it."""
    said = trouble()
    assert said == "" or said.startswith(("there is no NVIDIA driver (", "cuInit: "))


def test_libraries_are_looked_for_where_nvidias_packages_put_them(tmp_path, monkeypatch):
    package = tmp_path / "nvidia" / "cudnn" / "lib"
    package.mkdir(parents=True)
    (package / "libcudnn.so.9").touch()
    monkeypatch.syspath_prepend(tmp_path)
    asked: list[str] = []

    def opens(place: str) -> None:
        asked.append(place)
        if not place.startswith(str(tmp_path)):
            raise OSError(f"{place}: cannot open shared object file")

    assert missing_libraries(("libcudart.so.12", "libcudnn.so.9"), opens) == ["libcudart.so.12"]
    assert asked == ["libcudart.so.12", "libcudnn.so.9", str(package / "libcudnn.so.9")]


@pytest.mark.parametrize(
    ("faults", "again"),
    [([["a"]], False), ([["a"], ["a"]], False), ([["a"], ["b"]], True), ([["a", "b"]], True), ([[], []], False)],
)
def test_kernels_that_fail_on_two_nodes_are_the_codes_fault(faults, again):
    launches = KernelFailures()
    assert [launches.failed(nodes, 0.0) for nodes in faults][-1] is again


def test_a_kernel_that_failed_an_hour_ago_says_nothing_of_the_code():
    launches = KernelFailures()
    assert not launches.failed(["a"], 0.0)
    assert not launches.failed(["b"], 3600.0)
    assert launches.failed(["c"], 3601.0)
