"""A run with five faults, its ledger and its page.

    python benchmarks/five_faults.py --html five-faults.html

The MNIST job trains on an elastic cluster of this machine while a worker, a node, Ray Train's controller and the driver
are killed and a node gets notice and ends. Then the ledger is printed with `raytf show`, the page is drawn with
`raytf report`, and the ledger's sum is compared with the wall clock, measured from outside: from the first command's
start to the last one's end, without what it takes to import and leave a process. On two cores it takes 3 minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from raytf import ledger
from raytf.storage import Storage
from raytf.testing import ElasticCluster, Fault, FaultPlan, Kind

ROOT = Path(__file__).parents[1]
FAULTS = (Kind.WORKER, Kind.NODE, Kind.CONTROLLER, Kind.DRAIN, Kind.DRIVER)
#: A run of the small set is over before a fault has come; so many steps a fault, at 64 records each.
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
        command += ["--steps", str(gap * (len(faults) + 1)), "--resize-every-seconds", "5"]
        command += ["--checkpoint-every-seconds", "5", "--storage", str(storage), "--run", "five-faults"]
        command += ["--status-file", str(status)]
        with ElasticCluster(nodes=2) as cluster:
            report = plan.run(command, status, Path(folder) / "log", cluster, folder=ROOT)
        print(report.output if report.code else "", *report.injections, sep="\n")
        if report.code:
            sys.exit(1)
        run = str(storage / "five-faults")
        sys.exit(judge(run, report.seconds, arguments.html))


def judge(run: str, outside: float, html: Path) -> int:
    """Show a run and draw its page; 0 where the ledger's sum is within 1 % of the time that its events span."""
    for command in (["show", run], ["report", run, "--html", str(html)]):
        subprocess.run([str(Path(sys.executable).with_name("raytf")), *command], check=True)
    events = ledger.read(Storage(run))
    booked = sum(ledger.account(ledger.timeline(events)).values())
    clock = events[-1]["time"] - events[0]["time"]
    print(
        f"the ledger's sum is {booked:.1f} s; from its first to its last event {clock:.1f} s; from outside {outside:.1f} s"
    )
    return 0 if abs(booked - clock) <= 0.01 * clock else 1


if __name__ == "__main__":
    main(tyro.cli(Arguments))
