"""Runs Keras's own tests with `fit` carried out by workers, and writes which of them pass.

    python -m tests.stress.keras_own_tests [--workers 1 2] [--files callbacks/ model_test] [--page FILE.md]

The wheel of Keras carries its tests. Plain Keras runs the files that call `fit` first, which says which tests call it
and which of them fail here without raytf as well. Those that call it then run with workers: all in one process and on
one Ray, with a line of results after each test. A repeated command continues where it was stopped; `--fresh` begins
anew. A test that takes longer than its limit, or that ends its process, has failed, and the others go on in a new one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from raytf.testing import Job, environment
from tests.stress.keras_own_tests import page
from tests.stress.keras_own_tests.session import Results, names_of

ROOT = Path(__file__).parents[3]
#: Seconds that a test may take, and more for each of its calls of `fit`.
_SECONDS, _SECONDS_A_FIT = 300.0, 120.0


@dataclass(frozen=True)
class Arguments:
    """Run Keras's own tests with `fit` carried out by workers."""

    workers: tuple[int, ...] = (1, 2)
    """Numbers of workers, each of which runs all tests."""
    files: tuple[str, ...] = ()
    """Texts of which one is in the path of each file; by default all files that call `fit`."""
    results: Path = ROOT / "build" / "keras_own_tests"
    """Folder for the results."""
    fresh: bool = False
    """Run all tests again, also those of which there is a result."""
    page: Path | None = None
    """Write a page about the results."""


def main(arguments: Arguments) -> int:
    """Run the tests, and say what failed; returns how many are neither passed nor excluded."""
    if arguments.fresh:
        shutil.rmtree(arguments.results, ignore_errors=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    files = names_of(arguments.files)
    plain = Results(arguments.results / "plain.jsonl")
    while remaining := [file for file in files if file not in plain.files()]:
        _run(plain, 0, remaining, {})
    calling = {n: r["fits"] for n, r in plain.ended().items() if n.partition("::")[0] in files and r["fits"]}
    print(f"{len(calling)} tests in {len(files)} files call fit", flush=True)
    tables = {}
    for workers in arguments.workers:
        results = Results(arguments.results / f"workers-{workers}.jsonl")
        while remaining := [name for name in calling if name not in results.ended()]:
            _run(results, workers, remaining, calling)
        tables[workers] = {name: results.ended()[name] for name in calling}
    own = {name: end for name, end in plain.ended().items() if name.partition("::")[0] in files}
    summary = page.Summary(own, {f: why for f, why in plain.not_collected().items() if f in files}, tables)
    print("\n".join(summary.lines()))
    if arguments.page is not None:
        arguments.page.write_text(page.page(summary, arguments.page))
    return len(summary.failed())


def _run(results: Results, workers: int, names: Sequence[str], fits: dict[str, int]) -> None:
    """Run tests in one process until they have ended, it dies, or one of them takes too long.

    Raises:
        RuntimeError: the process ended before its first test.
    """
    known, began = len(results.lines()), time.time()
    shown = known
    with tempfile.TemporaryDirectory(prefix="raytf-keras-tests-") as folder:
        place = Path(folder)
        (place / "tests").write_text(json.dumps(list(names)))
        command = [sys.executable, "-m", "tests.stress.keras_own_tests.session", "--workers", workers]
        command += ["--results", results.path, "--storage", place / "runs", "--tests", place / "tests"]
        env = environment(KERAS_BACKEND="tensorflow", PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="3")
        if "RAY_ADDRESS" in os.environ:
            env["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
        with Job([*map(str, command)], results.path.with_suffix(".log"), env, place) as job:
            why = ""
            while job.is_running and not why:
                time.sleep(0.5)
                shown += _show(results.lines()[shown:])
                started = results.open(began)
                limit = _SECONDS + _SECONDS_A_FIT * fits.get(started["started"], 0) if started else 0.0
                if started and time.time() - started["at"] > limit:
                    why = f"it took longer than {limit:.0f} s"
            job.kill()
            _show(results.lines()[shown:])
            started = results.open(began)
            if started is not None:
                why = why or f"its process ended with exit code {job.process.returncode}"
                results.add(test=started["started"], outcome="failed", why=why, fits=1, reached=1)
            elif len(results.lines()) == known:
                raise RuntimeError(f"no test has run:\n{job.output[-3000:]}")


def _show(lines: Sequence[dict[str, Any]]) -> int:
    """Print how tests have ended; returns the number of lines."""
    for line in lines:
        if "test" in line:
            print(f"{line['outcome']:8} {line['test']}  {line['why']}", flush=True)
    return len(lines)


if __name__ == "__main__":
    sys.exit(1 if main(tyro.cli(Arguments)) else 0)
