"""Every file of jobs/ as its user runs it, with small settings: it does what its docstring says one may expect."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ray.conftest import ROOT, result_of

#: Seconds that a job may take with small settings, on a machine that does nothing else.
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Small:
    """Small settings of a job, and what to expect of them.

    Attributes:
        check: takes the output; asserts.
        trains: takes --storage and --run.
    """

    flags: Sequence[str]
    check: Callable[[str], None]
    trains: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


def accuracy_of(least: float) -> Callable[[str], None]:
    def check(output: str) -> None:
        assert float(re.findall(r"^test accuracy: ([\d.]+)$", output, re.M)[-1]) >= least

    return check


def error_shrinks_as_the_root(output: str) -> None:
    rows = re.findall(r"^ *([\d,]+)  +([\d.]+)  +([\d.]+)  +([\d.]+)$", output, re.M)
    assert [int(n.replace(",", "")) for n, *_ in rows] == [4**k for k in range(5, 13)]
    # 1.64 is the standard deviation; three of them.
    assert max(float(scaled) for *_, scaled in rows) < 4.93
    assert float(rows[-1][2]) < 4.93 / 4096
    assert re.search(r"^pi: 3\.14\d+ from \d+ of 16777216 points$", output, re.M)


def a_row_for_each_device(output: str) -> None:
    rows = re.findall(r"^ *(\d+) +(CPU|GPU) +([\d.]+) +([\d.]+) +([\d.]+)x$", output, re.M)
    assert [size for size, device, *_ in rows if device == "CPU"] == ["64", "256"]
    assert min(float(speed) for *_, speed, _ in rows) > 0
    assert ("no worker has a GPU" in output) == all(device == "CPU" for _, device, *_ in rows)


def images_a_second(output: str) -> None:
    assert "ResNet-14, " in output
    rows = re.findall(r"^ *\d+ +([\d.]+) +([\d.]+) +2$", output, re.M)
    assert len(rows) == 3
    each, total = re.findall(r"per worker: ([\d.]+) \+- [\d.]+, total of 2: ([\d.]+) ", output)[0]
    assert float(total) > 0
    assert abs(float(total) - 2 * float(each)) <= 0.11, "each of the two is rounded to a tenth"


def line_is_found(output: str) -> None:
    w, b = re.findall(r"^w = ([\d.]+) \(2\), b = ([\d.]+) \(10\)", output, re.M)[-1]
    assert abs(float(w) - 2) < 0.05
    assert abs(float(b) - 10) < 0.05


def perplexity_falls(output: str) -> None:
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", output, re.M)
    assert len(rows) == 3
    held_out = [float(validation) for _, validation in rows]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < 16
    assert re.search(r"^it writes: The .{20,}", output, re.M)


#: Of each file of jobs/, by its name and what is tried of it.
SMALL: dict[str, Small] = {
    "image_folder.py": Small(("--epochs", "6"), accuracy_of(0.9)),
    "linear_regression.py": Small((), line_is_found),
    "matmul.py": Small(("--sizes", "64", "256", "--repeats", "3"), a_row_for_each_device, trains=False),
    "mnist.py cnn": Small(("--data", "digits", "--epochs", "12"), accuracy_of(0.95)),
    "mnist.py mlp": Small(
        ("--data", "digits", "--model", "mlp", "--ema", "0.9", "--l2", "1e-4", "--epochs", "20"), accuracy_of(0.95)
    ),
    "mnist.py softmax": Small(
        ("--data", "digits", "--model", "softmax", "--learning-rate", "0.02", "--epochs", "12"), accuracy_of(0.92)
    ),
    "pi.py": Small(("--samples", str(4**12)), error_shrinks_as_the_root, trains=False),
    "resnet_synthetic.py": Small(
        ("--depth", "14", "--image-size", "32", "--classes", "10", "--epochs", "4"), images_a_second
    ),
    "transformer_text.py": Small(
        ("--layers", "1", "--width", "32", "--context", "32", "--epochs", "3"), perplexity_falls
    ),
}
FILES = sorted(path.name for path in (ROOT / "jobs").glob("*.py"))
#: All that is tried: of each file there is, what it has above.
ALL = [name for file in FILES for name in SMALL if name.split()[0] == file]
#: Of them, what every run of the tests tries.
SAMPLE = ("matmul.py", "pi.py")


@pytest.fixture
def try_out(start_there, tmp_path: Path) -> Callable[[str], str]:
    """Runs a job with its small settings, and holds it against what one may expect; its output."""

    def run(name: str) -> str:
        small, busy = SMALL[name], os.getloadavg()[0] / (os.cpu_count() or 1)
        run_flags = ("--storage", str(tmp_path / "runs"), "--run", "a") if small.trains else ()
        began = time.monotonic()
        output = start_there(ROOT / "jobs" / name.split()[0], *small.flags, *run_flags, HOME=str(tmp_path)).wait()
        seconds = time.monotonic() - began
        print(f"{name} {' '.join(small.flags)}: {seconds:.0f} s")
        small.check(output)
        if small.trains:
            assert result_of(tmp_path / "runs" / "a")["restarts"] == 0
        assert seconds < LIMIT_SECONDS * max(1.0, busy)
        return output

    return run


def test_every_job_has_small_settings():
    """A new file needs an entry in SMALL above, with what its docstring says one may expect."""
    assert [file for file in FILES if file not in {name.split()[0] for name in SMALL}] == []
    assert set(SAMPLE) <= set(ALL)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_jobs_does_what_it_says(name: str, try_out: Callable[[str], str]):
    try_out(name)


@pytest.mark.jobs
@pytest.mark.parametrize("name", ALL)
def test_a_job_does_what_it_says(name: str, try_out: Callable[[str], str]):
    try_out(name)


@pytest.mark.jobs
def test_pi_is_the_same_for_every_number_of_workers(start_there):
    flags = ("--samples", 3 << 20, "--samples-per-part", 1 << 17)
    outputs = [start_there(ROOT / "jobs" / "pi.py", *flags, "--workers", workers).wait() for workers in (1, 3)]
    first, second = (output[output.index("  estimate") :] for output in outputs)
    assert first == second
