"""A run without faults is left alone: no hang is found, no straggler named, no group started again.

    python -m tests.stress.undisturbed --minutes 60

Trains undisturbed_job.py, with validation after each short epoch, frequent checkpoints and a callback of 45 s now and
then, for so long, and counts what it says. With --load so many processes keep the CPUs busy all the while.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from raytf.testing import Job, environment

JOB = Path(__file__).with_name("undisturbed_job.py")
#: What a run says of a hang, of a straggler and of a new start.
ALARMS = (
    "made no progress",
    "was stopped while it started",
    " is slow: ",
    "starting again",
    "is left out",
    "no step lost",
)


@dataclass(frozen=True)
class Arguments:
    """Train without faults and count false alarms."""

    minutes: float = 60.0
    """How long."""
    workers: int = 2
    """How many."""
    hang_seconds: float = 30.0
    """As the flag of a job."""
    load: int = 0
    """Processes that keep a CPU busy each."""


def burn() -> None:
    while True:
        pass


def main(arguments: Arguments) -> int:
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(arguments.load)]
    with tempfile.TemporaryDirectory(prefix="raytf-undisturbed-") as folder:
        storage, status = Path(folder), Path(folder) / "status.json"
        flags = ["--storage", folder, "--run", "a", "--status-file", status, "--epochs", 1_000_000]
        flags += ["--workers", arguments.workers, "--hang-seconds", arguments.hang_seconds]
        command = [sys.executable, str(JOB), *map(str, flags), "--checkpoint-every-seconds", "10"]
        with Job(command, storage / "log", environment(), status_file=status) as job:
            job.until(lambda: job.step)
            for burner in burners:
                burner.start()
            end = time.monotonic() + 60 * arguments.minutes
            while job.is_running and time.monotonic() < end:
                time.sleep(1)
            alive, step = job.is_running, job.step or 0
            for burner in burners:
                burner.kill()
            if alive:
                job.process.send_signal(signal.SIGINT)
                with contextlib.suppress(AssertionError):
                    job.ended(60)
            output, epochs = job.output, job.output.count("val_loss")
        alarms = [line for line in output.splitlines() if any(alarm in line for alarm in ALARMS)]
        starts = len(list(storage.glob("a/attempts/*.json")))
    print(f"{arguments.minutes:g} minutes, {step} steps, {epochs} validations, {starts} start: {len(alarms)} alarms")
    print(*alarms, *([] if alive else [output]), sep="\n")
    return 0 if alive and not alarms and starts == 1 and epochs else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
