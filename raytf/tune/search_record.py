"""The files that a search keeps in storage, next to the runs of its trials.

    NAME/search/search.json       the identity of the search; a command with another one is refused
    NAME/search/lease.json        the current owner of the search
    NAME/search/trials/007.json   how a trial ended
    NAME/trial-007/               a trial's run, like any other; job.log has the output of its command
    NAME/best/                    the best trial's result, model and parameters

A search needs only these files to continue. Ray Tune's own state is not kept. Its restore requires the same number
of trials, loads pickles from storage, and silently starts a new search if a kill truncated the newest state.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from raytf.checkpoint import manifest
from raytf.config.identity import differences
from raytf.config.objective import MetricObjective
from raytf.errors import DamagedFileError, RunMismatchError
from raytf.runs import run_log
from raytf.runs.run_folder import BEST_TRIAL, SEARCH, SEARCH_IDENTITY, TRIAL, TRIAL_RECORD, TRIALS
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

#: Names that `raytf.inference.export` writes into a run's folder, copied here because that module needs Keras.
_EXPORT, _MODEL_FILES = "export", ("model.keras", "weights.safetensors")


class TrialOutcome(enum.Enum):
    """How a trial ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # by the scheduler: other trials were better after the same number of epochs
    FAILED = "failed"


@dataclass(frozen=True)
class TrialRecord:
    """A trial that has ended.

    Attributes:
        number: the trial's number, from 0.
        parameters: values of the searched flags.
        value: the metric at the end; None if the trial has none.
        why: the reason why the trial failed or was stopped.
        history: the number (from 1) and metric of each epoch, for the scheduler when a command continues the search.
        metrics: all metrics at the end.
    """

    number: int
    parameters: dict[str, Any]
    outcome: TrialOutcome
    value: float | None
    epochs: int
    why: str = ""
    history: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def run_name(number: int) -> str:
    """Return the name of a trial's run."""
    return f"{TRIAL}{number:03d}"


def keep_identity(search: Storage, identity: dict[str, str], name: str) -> None:
    """Record the identity of a search in its folder, or raise a RunMismatchError if the folder has another one."""
    before = untrusted_json.read(search, f"{SEARCH}/{SEARCH_IDENTITY}", untrusted_json.values(untrusted_json.text))
    if before is None:
        search.put(f"{SEARCH}/{SEARCH_IDENTITY}", json.dumps(identity, indent=1).encode())
        return
    difference = differences(before, identity)
    if difference:
        raise RunMismatchError(
            f"search {name!r} in storage has other settings: {difference}. Repeat the earlier command, or choose "
            "another --name."
        )


def write(search: Storage, record: TrialRecord) -> None:
    """Record how a trial ended."""
    document = {**asdict(record), "outcome": record.outcome.value}
    search.put(f"{SEARCH}/{TRIALS}/{record.number:03d}.json", json.dumps(document, indent=1).encode())


def read(search: Storage) -> dict[int, TrialRecord]:
    """Return the trials that have ended, by number. A trial whose file is damaged counts as unfinished."""
    records = {}
    for name in search.list(f"{SEARCH}/{TRIALS}"):
        try:
            document = untrusted_json.read(search, f"{SEARCH}/{TRIALS}/{name}", TRIAL_RECORD, untrusted_json.LARGE)
            record = TrialRecord(**{**document, "outcome": TrialOutcome(document["outcome"])})
        except (DamagedFileError, ValueError, TypeError):  # also if the file disappeared, or has unknown fields
            continue
        records[record.number] = record
    return records


def forget(search: Storage, number: int) -> None:
    """Delete the record of a trial's end, so that the trial continues."""
    search.delete(f"{SEARCH}/{TRIALS}/{number:03d}.json")


def best(records: dict[int, TrialRecord], goal: MetricObjective) -> TrialRecord | None:
    """Return the finished trial with the best value, or the first of several with this value."""
    values = {f"{n:06d}": r.value for n, r in records.items() if r.outcome is TrialOutcome.FINISHED}
    name = goal.best(values)
    return None if name is None else records[int(name)]


def keep_best(search: Storage, record: TrialRecord, goal: MetricObjective) -> Storage:
    """Copy the best trial's result, model and newest checkpoint to `best/`, a run's folder like any other.

    The result is copied last, so that a partial copy is not a finished run, and the next command copies it again.
    """
    run, copy = search.child(run_name(record.number)), search.child(BEST_TRIAL)
    result = run.get(run_log.RESULT)
    parameters = {
        "trial": run_name(record.number),
        "run": run.locate(""),
        "parameters": record.parameters,
        "metric": goal.metric,
        "value": record.value,
        "weights_sha256": run_log.parse_result(result, run.locate(run_log.RESULT)).get("weights_sha256"),
    }
    text = json.dumps(parameters, indent=1).encode()
    if copy.get_or_none("parameters.json") == text and copy.get_or_none(run_log.RESULT) == result:
        return copy
    copy.delete(run_log.RESULT)
    for name in ("checkpoints", _EXPORT, *_MODEL_FILES):
        copy.delete(name)
    newest = [f"checkpoints/{name}" for name in manifest.list_complete(run)[:1]]
    for folder in (*newest, _EXPORT):
        names = [file.name for file in run.files(folder)]
        for name in sorted(names, key=lambda n: n.endswith("MANIFEST.json")):  # the manifest makes it a checkpoint
            copy.put(f"{folder}/{name}", run.get(f"{folder}/{name}"))
    for name in _MODEL_FILES:
        data = run.get_or_none(name)
        if data is not None:
            copy.put(name, data)
    copy.put("parameters.json", text)
    copy.put(run_log.RESULT, result)
    return copy
