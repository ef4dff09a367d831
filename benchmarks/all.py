"""All benchmarks, one after another; `benchmarks/performance.py` puts their results into the pages of docs/evidence/.

    python -m benchmarks.all --quick
    python -m benchmarks.all --results kept --only step_overhead,distributed
    python -m benchmarks.performance --results kept

Each is a program of its own, such as `python -m benchmarks.step.overhead --json FILE`, with a limit of time. One that
fails is named at the end, and the others run all the same. Ctrl-C and SIGTERM end the one that runs: first as Ctrl-C
would, so that it can end what it has started, then its whole process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

from benchmarks import harness
from raytf._process import signal_handler

ROOT = Path(__file__).parents[1]
#: Minutes that all quick runs together may take.
QUICK_MINUTES = 20.0


@dataclass(frozen=True)
class Entry:
    """A benchmark, its file, and the minutes that it may take; a quick run may take less than that."""

    name: str
    file: str
    minutes: float = 60.0
    quick_minutes: float = 5.0


#: In the order in which they run and are shown.
ENTRIES = (
    Entry("step_overhead", "step/overhead.py"),
    Entry("distributed", "step/workers.py", 120),
    Entry("collective", "step/collective.py"),
    Entry("hosts", "step/hosts.py", 20),
    Entry("input", "data/input.py"),
    Entry("checkpoint_cost", "checkpoint/durable.py", 120),
    Entry("snapshot_cost", "checkpoint/snapshots.py"),
    Entry("exact_cost", "step/exact.py"),
    Entry("digest_cost", "step/digests.py", 120),
    Entry("recovery", "recovery/recovery.py", 180),
    Entry("join", "recovery/join.py", 20),
    Entry("scale", "scale/scale.py", 20),
    Entry("startup", "recovery/startup.py"),
    Entry("step_profile", "step/profile.py", 20),
    Entry("tables", "step/tables.py", 20),
    Entry("goodput", "recovery/goodput.py", 240),  # the longest comes last
)


@dataclass(frozen=True)
class Arguments:
    """Run all benchmarks."""

    quick: bool = False
    """As few and short blocks as still mean something: 20 minutes for all."""
    only: str = ""
    """Names of benchmarks, parted by commas; by default all."""
    results: Path | None = None
    """Folder for the results, beside those of earlier runs. By default a temporary one."""
    folder: Path = ROOT / "benchmarks"
    """Where the programs are."""
    limit_seconds: float | None = None
    """That each may take, whatever is its own limit."""
    grace_seconds: float = 60.0
    """For one that was told to stop to end what it has started."""


class Stopped(Exception):
    """Somebody wants an end; its number is that of the signal."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@dataclass
class Runner:
    """Runs programs, one at a time.

    Attributes:
        folder: where they are.
        results: where each puts NAME.json.
        flags: for all of them.
        grace_seconds: for one that was told to stop.
    """

    folder: Path
    results: Path
    flags: Sequence[str] = ()
    grace_seconds: float = 60.0

    def run(self, entry: Entry, seconds: float) -> str:
        """Run one.

        Args:
            entry: which.
            seconds: that it may take.

        Returns:
            Why there is no result of it; empty where there is one.
        """
        program = self.folder / entry.file
        if not program.exists():
            return f"there is no {entry.file}"
        if seconds <= 0:
            return "not run: no time is left"
        part = self.results / f"{entry.name}.json.part"
        part.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, str(program), *self.flags, "--json", str(part)],
            env=harness.importable(),
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
        finally:
            end(process, self.grace_seconds)
        if code:
            return f"ended with code {code}"
        if not part.exists():
            return "left no result"
        part.replace(self.results / f"{entry.name}.json")
        return ""


def end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """End a program with all that it has started; it may take so long to do that by itself."""
    started: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)  # to it alone: it knows in which order the others have to go
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in started:  # those that have left the group
        with contextlib.suppress(psutil.Error):
            other.kill()
    process.wait()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM raise `Stopped`, once: what follows is clean-up."""

    def stop(number: int, _: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    # Also where a shell in the background had Ctrl-C ignored, which the programs would inherit.
    with signal_handler(stop):
        yield


def chosen(only: str, entries: Sequence[Entry] = ENTRIES) -> list[Entry]:
    """Return the requested benchmarks in the order in which they run; one that is not in the list runs last.

    Args:
        only: their names, parted by commas; empty for all.
    """
    wanted = [name for name in only.replace(" ", "").split(",") if name]
    known = {entry.name for entry in entries}
    others = [Entry(name, f"{name}.py") for name in dict.fromkeys(wanted) if name not in known]
    return [entry for entry in entries if not wanted or entry.name in wanted] + others


def run_all(arguments: Arguments, results: Path) -> dict[str, str]:
    """Run those asked for; why, by name, there is no result of some."""
    runner = Runner(arguments.folder, results, ["--quick"] if arguments.quick else [], arguments.grace_seconds)
    end_at = time.monotonic() + QUICK_MINUTES * 60 if arguments.quick else float("inf")
    failed: dict[str, str] = {}
    for entry in chosen(arguments.only):
        minutes = entry.quick_minutes if arguments.quick else entry.minutes
        limit = minutes * 60 if arguments.limit_seconds is None else arguments.limit_seconds
        print(f"== {entry.name}", flush=True)
        began = time.monotonic()
        why = runner.run(entry, min(limit, end_at - began))
        if why:
            failed[entry.name] = why
        print(f"== {entry.name}: {why or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main(arguments: Arguments) -> int:
    """Run them; the exit code."""
    with contextlib.ExitStack() as stack:
        folder = arguments.results
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raytf-benchmarks-")))
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        try:
            with stoppable():
                failed = run_all(arguments, folder)
        except Stopped as stopped:
            print(f"stopped by {signal.Signals(stopped.number).name}", flush=True)
            return 128 + stopped.number
    for name, why in failed.items():
        print(f"no result of {name}: {why}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
