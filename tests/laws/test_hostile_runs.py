"""Whatever is done to a run's folder, every command says so in a line, soon, and nothing else is touched."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from raytf.checkpoint import manifest
from raytf.checkpoint.commit import Commit
from raytf.checkpoint.durable import DurableSave, DurableTier, Keep
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.restore import Restorer
from raytf.commands import report, runs, show, verify
from raytf.config.identity import differences
from raytf.config.train_config import TrainConfig
from raytf.driver import preflight
from raytf.driver.monitor import reader
from raytf.errors import RaytfError
from raytf.inference import versions
from raytf.runs import history, inventory, ledger, run_log
from raytf.runs.lease import Lease
from raytf.runs.run_state import Run
from raytf.storage import strict_json
from raytf.storage.storage import Storage
from tests.laws.mutations import mutate
from tests.laws.run_folder import RECORDS, STEPS, make

#: No command may take longer, however the run's folder is.
MOST_SECONDS = 10
GOOD = {"good-finished": ("finished", 300), "good-stopped": ("killed", 1000)}


class OneRank:
    """A group of one worker."""

    rank, world_size = 0, 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def share(self, data: bytes) -> bytes:
        return data


class NoSnapshots:
    """Memory of the nodes, which is empty."""

    def candidates(self) -> list[Any]:
        return []


def resume(uri: str, run_name: str) -> int | None:
    """What a driver and its first worker read before they train; the step that they go on from, None for a new run."""
    config = TrainConfig.of(run=run_name, storage=uri)
    run = Storage(uri).child(run_name)
    preflight.check_folder(run)
    stored = preflight.stored_identity(run)
    preflight.compare_strategy(stored, config)
    preflight.stored_shards(stored)
    now = iter(range(10**6))
    with Lease(
        run, lambda text: None, lambda: float(next(now)), lambda seconds: None, lambda: ledger.latest_term(run)
    ) as lease:
        if preflight.finished(run, 300) is not None:
            return 300
        preflight.compare_batch(stored, config, RECORDS)
        book = reader.RunLedger(run, lease.owner["term"])
        book.read_earlier()
        book.figures.update()
        book.figures.gauges()
        book.flush()
        earlier = tuple(run_log.attempt_names(run))
        durable = DurableTier(
            run, GroupAttempt("20270116T080000.000-cccccc", earlier=earlier), Keep(1), lambda text: None
        )
        restorer = Restorer(NoSnapshots(), durable, OneRank(), lambda text: None)  # type: ignore[arg-type]
        restorer.begin(None)
        found = restorer.find(lambda c: [differences(c.document.identity, {}), None][1])
        run_log.read_attempts(run)
        save(durable, 1000)
        return None if found is None else found.step


def save(durable: DurableTier, step: int) -> None:
    """The next checkpoint, after which old ones go."""
    commit = Commit(durable, 1)
    commit.begin(DurableSave(step, {"model/0": np.zeros(3, np.float32)}))
    while not commit.is_idle:
        commit.advance(commit.votes())
        time.sleep(0.0005)
    durable.settle(MOST_SECONDS)


def look(uri: str, name: str, page: Path, is_drawn: bool = True) -> dict[str, Any]:
    """All commands that read a run, as their `main` does; what each came to.

    Args:
        is_drawn: `raytf show` draws its tables, which takes as long as all else.
    """
    place, out = f"{uri}/{name}", {}
    calls: dict[str, Callable[[], Any]] = {
        "runs": lambda: _runs(uri),
        "show": lambda: _show(place, is_drawn),
        "report": lambda: report.main(report.Report(place, html=str(page))),
        "verify": lambda: verify.main(verify.Verify(place)),
        "verify --json": lambda: verify.main(verify.Verify(place, json=True)),
        "serve": lambda: versions.inspect(versions.models_of(place)[0]),
        "resume": lambda: resume(uri, name),
    }
    for command, call in calls.items():
        with _seconds(command), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                out[command] = call()
            except SystemExit as error:
                out[command] = error.code
            except RaytfError as error:  # `cli` makes a line of it, and exit code 2
                out[command] = error
    assert {out["verify"], out["verify --json"]} <= {0, 1} or isinstance(out["verify"], RaytfError)
    for error in out.values():
        assert not isinstance(error, RaytfError) or (str(error) and "Traceback" not in str(error))
    return out


def _runs(uri: str) -> list[Run]:
    found = inventory.survey(Storage(uri), lambda text: None, lambda seconds: None)
    runs.listing(found, 2e9)
    json.loads(runs.document(found), parse_constant=_refuse)
    return found


def _show(place: str, is_drawn: bool) -> None:
    seconds = itertools.count()
    run = history.load(place, lambda: float(next(seconds)), lambda seconds: None)
    if is_drawn:
        show.show(run, Console(file=io.StringIO(), width=100))
    json.loads(strict_json.dumps(show.document(run)), parse_constant=_refuse)


def _refuse(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@contextlib.contextmanager
def _seconds(what: str) -> Iterator[None]:
    """Fail where something takes too long."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{what} takes longer than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fingerprint(folder: Path, without: str) -> dict[str, str]:
    """What is in a folder, but in one run of it."""
    found = {}
    for base, folders, names in os.walk(folder):
        if Path(base) == folder:
            folders[:] = [name for name in folders if name != without]
        for name in names:
            path = Path(base) / name
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        found[base] = ""
    return found


def _untouched(run: Path, kept: Path) -> list[int]:
    """Steps of checkpoints of which every byte is as it was."""
    steps = []
    for folder in sorted((kept / manifest.FOLDER).iterdir()):
        here = run / manifest.FOLDER / folder.name
        with contextlib.suppress(OSError):
            # raytf follows no links to folders.
            is_linked = here.is_symlink() or here.parent.is_symlink()
            is_same = not is_linked and sorted(os.listdir(folder)) == sorted(os.listdir(here))
            if is_same and all(_is_equal(here / name, folder / name) for name in os.listdir(folder)):
                steps.append(int(folder.name.partition("-")[0]))
    return steps


def _is_equal(one: Path, other: Path) -> bool:
    is_alike = one.is_file() and one.stat().st_size == other.stat().st_size
    return is_alike and one.read_bytes() == other.read_bytes()


def try_case(number: int, storage: Path, kept: Path, page: Path, before: dict[str, str]) -> None:
    rng = random.Random(number)
    run = storage / "evil"
    shutil.copytree(kept, run)
    if rng.random() < 0.5:  # stopped, not finished
        (run / "result.json").unlink()
        shutil.copy(storage / "good-stopped" / "lease.json", run)
    done = ["nothing"]
    try:
        done = mutate(rng, run)
        whole = _untouched(run, kept)
        is_drawn = number % 5 == 0 or any(word in str(done) for word in ("ledger", "result", "lease"))
        out = look(str(storage), "evil", page, is_drawn)
        listed = {r.name: (r.state.value, r.step) for r in out["runs"]}
        assert GOOD.items() <= listed.items()
        assert fingerprint(storage, "evil") == before
        assert {path.name for path in page.parent.iterdir()} == {"storage", "kept", "page.html"} or not page.exists()
        if whole and not isinstance(out["resume"], RaytfError):
            assert out["resume"] is not None
            assert out["resume"] >= max(whole), "a whole checkpoint was not found"
        if whole and "evil" in listed:
            assert (listed["evil"][1] or 0) >= max(whole)
    except Exception as error:
        raise AssertionError(f"case {number}, {done}: {traceback.format_exc()}") from error
    finally:
        _remove(run)
        page.unlink(missing_ok=True)


def _remove(run: Path) -> None:
    for base, folders, _ in os.walk(run):
        for name in folders:
            if not os.path.islink(path := os.path.join(base, name)):
                os.chmod(path, 0o700)
    os.system(f"rm -rf '{run}'")  # deeper than shutil.rmtree goes


def try_cases(folder: Path, numbers: range) -> None:
    storage, kept, page = folder / "storage", folder / "kept", folder / "page.html"
    make(Storage(str(kept)), is_finished=True)
    make(Storage(str(storage / "good-finished")), is_finished=True)
    make(Storage(str(storage / "good-stopped")), is_finished=False)
    before = fingerprint(storage, "evil")
    for number in numbers:
        try_case(number, storage, kept, page, before)


def test_a_run_that_nobody_damaged(tmp_path):
    storage = tmp_path / "storage"
    make(Storage(str(storage / "good-finished")), is_finished=True)
    make(Storage(str(storage / "good-stopped")), is_finished=False)
    out = look(str(storage), "good-stopped", tmp_path / "page.html")
    assert {r.name: (r.state.value, r.step) for r in out["runs"]} == GOOD
    assert not any(r.problems for r in out["runs"])
    assert (out["verify"], out["resume"]) == (0, max(STEPS))
    assert out["show"] is out["report"] is None


def test_damaged_runs_end_no_command(tmp_path):
    try_cases(tmp_path, range(300))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(11))
def test_more_damaged_runs_end_no_command(tmp_path, seed):
    try_cases(tmp_path, range(seed * 10**6, seed * 10**6 + 2000))
