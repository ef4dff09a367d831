"""A run with five faults, its ledger and its page.

    python -m tests.stress.five_faults --html five-faults.html

The MNIST job trains on an elastic cluster of this machine while a worker, a node, Ray Train's controller and the driver
are killed and a node gets notice and ends. Then the ledger is printed with `raytf show`, the page is drawn with
`raytf report`, and the ledger's sum is compared with a clock outside: from the first command's first line to the last
one's last. On two cores it takes 3 to 6 minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from raytf.runs import ledger, timeline
from raytf.storage.storage import Storage
from raytf.testing import ElasticCluster, Fault, FaultPlan, Kind

ROOT = Path(__file__).parents[2]
FAULTS = (Kind.WORKER, Kind.NODE, Kind.CONTROLLER, Kind.DRIVER, Kind.DRAIN)
#: A run of the small set is over before a fault has come; this many steps a fault, at 64 records each.
STEPS_A_FAULT = 1500


@dataclass(frozen=True)
class Arguments:
    """Train through five faults and draw the page."""

    html: Path = Path("five-faults.html")
    """The page."""
    storage: Path | None = None
    """Keep the run here; by default it goes away."""
    data: str = "digits"
    """As in jobs/mnist.py."""
    steps_a_fault: int = STEPS_A_FAULT
    """Steps between two faults."""


def main(arguments: Arguments) -> None:
    with tempfile.TemporaryDirectory(prefix="raytf-faults-") as folder:
        storage = arguments.storage or Path(folder)
        storage.mkdir(parents=True, exist_ok=True)
        status = Path(folder) / "status.json"
        gap = arguments.steps_a_fault
        faults = [Fault(gap * (i + 1), kind, seconds=8.0) for i, kind in enumerate(FAULTS)]
        # A node to take the place of each that goes.
        joins = [
            Fault(fault.step + 1, Kind.ADD, at_once=True) for fault in faults if fault.kind in (Kind.NODE, Kind.DRAIN)
        ]
        plan = FaultPlan(sorted(faults + joins, key=lambda fault: fault.step))
        command = [sys.executable, str(ROOT / "jobs" / "mnist.py"), "--data", arguments.data, "--workers", "1:2"]
        command += ["--steps", str(gap * (len(faults) + 4)), "--resize-every-seconds", "5"]
        command += ["--checkpoint-every-seconds", "5", "--storage", str(storage), "--run", "five-faults"]
        command += ["--status-file", str(status)]
        clock = Clock(Path(folder))
        with ElasticCluster(nodes=2) as cluster, clock:
            report = plan.run(command, status, Path(folder) / "log", cluster, folder=ROOT)
        print(report.output if report.code else "", *report.injections, sep="\n")
        if report.code:
            sys.exit(1)
        run = str(storage / "five-faults")
        sys.exit(judge(run, clock.seconds, arguments.html))


class Clock:
    """Watches the output of a job's commands: seconds from the first one's first line to the last one's last.

    Args:
        folder: with their outputs, log*.
    """

    def __init__(self, folder: Path):
        self._folder, self._stop = folder, threading.Event()
        self._began = self._ended = 0.0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Clock:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            text = "".join(log.read_text(errors="replace") for log in self._folder.glob("log*"))
            if not self._began and "run five-faults in" in text:
                self._began = time.monotonic()
            if not self._ended and "\nfinished: " in text:
                self._ended = time.monotonic()


def judge(run: str, outside: float, html: Path) -> int:
    """Show a run and draw its page; 0 where the ledger's sum is within 1 % of the clock outside."""
    for command in (["show", run], ["report", run, "--html", str(html)]):
        subprocess.run([str(Path(sys.executable).with_name("raytf")), *command], check=True)
    booked = sum(timeline.account(timeline.timeline(ledger.read(Storage(run)))).values())
    print(f"the ledger's sum is {booked:.2f} s; the clock outside says {outside:.2f} s: {booked / outside - 1:+.2%}")
    return 0 if abs(booked - outside) <= 0.01 * outside else 1


if __name__ == "__main__":
    main(tyro.cli(Arguments))
