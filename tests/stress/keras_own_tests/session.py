"""Run Keras's own tests in this process, with `fit` carried out by workers, and note how each one ends.

    python -m tests.stress.keras_own_tests.session --workers N --results FILE --storage FOLDER --tests FILE

The results are lines of JSON: one when a test starts, and one when it has ended. Whoever started this process sees from
them which test it was in when it died.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro

#: The folder that has the package `keras`, with its tests.
SITE = Path(importlib.util.find_spec("keras").origin).parents[1]
#: Test file -> the module that it imports and does not use with the TensorFlow backend. Where that is not installed, an
#: empty module stands for it while the file is imported.
_STUBS = {SITE / "keras" / "src" / "trainers" / "trainer_test.py": "jax"}


@dataclass(frozen=True)
class Arguments:
    """Run some of Keras's own tests."""

    results: Path
    """Lines of JSON are added to this file."""
    storage: Path
    """Folder for runs."""
    tests: Path
    """A JSON list of files of tests, or of the names of tests."""
    workers: int = 0
    """Workers that carry out `fit`; 0 is plain Keras."""


class Results:
    """What is known of tests, in a file of lines that sessions add to."""

    def __init__(self, path: Path):
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text() if self.path.exists() else ""
        # The last line is not whole while it is written, or if its writer was killed.
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    def ended(self) -> dict[str, dict[str, Any]]:
        """Name of a test -> how it ended."""
        return {line["test"]: line for line in self.lines() if "test" in line}

    def files(self) -> list[str]:
        """The files all of whose tests have ended."""
        return [file for line in self.lines() for file in line.get("finished", [])]

    def not_collected(self) -> dict[str, str]:
        """Name of a file -> why its tests could not be collected."""
        return {line["file"]: line["why"] for line in self.lines() if "file" in line}

    def open(self, since: float) -> dict[str, Any] | None:
        """The test that has started since a time (seconds since 1970) and not ended, if there is one."""
        lines = [line for line in self.lines() if line.get("at", 0.0) >= since or "test" in line]
        return lines[-1] if lines and "started" in lines[-1] else None

    def add(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


class Recorder:
    """A plugin of pytest that notes how each test ends.

    Args:
        results: to which lines are added.
        chosen: names of tests that run; all if empty.
        storage: folder of the runs, `FOLDER/NUMBER` for each `fit`.
    """

    def __init__(self, results: Results, chosen: set[str], storage: Path):
        self._results, self._chosen, self._storage = results, chosen, storage
        self._fits, self._began, self._why = 0, 0.0, ""
        self._outcome = "passed"

    def counted(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `fit` that counts its calls."""

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._fits += 1
            return fit(model, *args, **kwargs)

        return call

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for module in {item.module for item in items if isinstance(item, pytest.Function)}:
            _by_value(module)
        missing = self._chosen - {item.nodeid for item in items}
        for name in sorted(missing):
            self._results.add(test=name, outcome="failed", why="pytest did not find this test", fits=0, reached=0)
        ended = self._results.ended()
        items[:] = [i for i in items if i.nodeid not in ended and (not self._chosen or i.nodeid in self._chosen)]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        stub = _STUBS.get(collector.path) if isinstance(collector, pytest.Module) else None
        if stub is None or importlib.util.find_spec(stub) is not None:
            return (yield)
        sys.modules[stub] = types.ModuleType(stub)
        try:
            return (yield)
        finally:
            del sys.modules[stub]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            self._results.add(file=report.nodeid, outcome="not collected", why=_line(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._fits, self._why, self._outcome, self._began = 0, "", "passed", time.monotonic()
        before = self._reached()
        self._results.add(started=item.nodeid, at=time.time())
        result = yield
        seconds = round(time.monotonic() - self._began, 1)
        ended = {"fits": self._fits, "reached": self._reached() - before, "seconds": seconds}
        self._results.add(test=item.nodeid, outcome=self._outcome, why=self._why, **ended)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._outcome == "passed" and report.outcome != "passed":
            self._outcome, self._why = report.outcome, _line(report)

    def _reached(self) -> int:
        """The runs of which a worker has begun an attempt."""
        return sum(any(run.glob("attempts/*.json")) for run in self._storage.glob("tests/*"))


def _by_value(module: types.ModuleType) -> None:
    """Have the code of a module of tests travel to the workers, as that of a program does: they could not import it."""
    import ray

    ray.cloudpickle.register_pickle_by_value(module)


def _line(report: Any) -> str:
    """Why a test did not pass, in one line."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines)[:400] if crash is not None else lines[-1][:400]


@contextlib.contextmanager
def _trained(arguments: Arguments, recorder: Recorder) -> Iterator[None]:
    """While the `with` statement lasts, workers carry out `fit`, or plain Keras does, and its calls are counted."""
    import keras

    from raytf import _keras
    from raytf.config.train_config import TrainConfig
    from raytf.driver import keras_program

    settings = TrainConfig().replace(storage=str(arguments.storage), run="tests", workers=str(arguments.workers or 1))
    by_workers = keras_program.trained_by_workers(settings) if arguments.workers else contextlib.nullcontext()
    with by_workers, _keras.with_fit(recorder.counted(keras.Model.fit)):
        yield


def main(arguments: Arguments) -> int:
    """Run the tests; returns pytest's exit code."""
    from raytf.distributed.gpu import visibility

    names = json.loads(arguments.tests.read_text())
    chosen = {name for name in names if "::" in name}
    files = list(dict.fromkeys(name.partition("::")[0] for name in names))
    results = Results(arguments.results)
    recorder = Recorder(results, chosen, arguments.storage)
    flags = ["-c", "/dev/null", "--rootdir", str(SITE), "--import-mode=importlib", "-q", "-p", "no:cacheprovider"]
    flags += ["-p", "no:xdist", "-p", "no:randomly", "--continue-on-collection-errors", "-W", "ignore"]
    with visibility.unseen(), _trained(arguments, recorder):
        code = int(pytest.main([*flags, *(str(SITE / file) for file in files)], plugins=[recorder]))
    results.add(finished=files)
    return code


def names_of(files: Sequence[str]) -> list[str]:
    """The files of Keras's tests that call `fit`, relative to SITE: all, or those whose name has one of these texts."""
    every = [path for path in sorted((SITE / "keras" / "src").rglob("*_test.py")) if ".fit(" in path.read_text()]
    names = [path.relative_to(SITE).as_posix() for path in every]
    return [name for name in names if not files or any(text in name for text in files)]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
