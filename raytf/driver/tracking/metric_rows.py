"""The numbers of committed steps and epochs for trackers, and how far each tracker has them."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytf.checkpoint import manifest, naming
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.config.objective import flat
from raytf.errors import ConfigError
from raytf.runs import run_log
from raytf.storage.storage import Storage

#: Names of the numbers of each step, and of an epoch's mean loss.
LOSS, RATE, EPOCH_LOSS = "loss", "learning_rate", "epoch_loss"
#: Keys in an entry of the history beside its metrics.
_NO_METRICS = ("epoch", "step")
#: In the run's folder.
FILE = "tracking.json"


@dataclass(frozen=True)
class Point:
    """Numbers of a step.

    Attributes:
        step: global step, counted from 1.
        values: loss and learning rate of the step; at the end of an epoch, its metrics too.
    """

    step: int
    values: dict[str, float]


def committed(run: Storage) -> list[Point]:
    """Return points of all steps up to the end of a run or, before its end, up to its newest checkpoint.

    Raises:
        RaytfError: a file of the run is damaged, or storage refuses.
    """
    result = run_log.read_result(run) or {}
    last, history = result.get("steps", 0), result.get("history", [])
    complete = manifest.list_complete(run)
    if complete and naming.split_name(complete[0])[0] > last:
        body = manifest.read(run, complete[0])
        last, history = body["step"], CheckpointDocument.parse(body["document"]).history
    steps = run_log.read_steps(run.uri)
    values = {
        int(step): {LOSS: float(loss), RATE: float(rate)}
        for step, loss, rate in zip(steps["step"], steps["loss"], steps["learning_rate"], strict=True)
        if step <= last
    }
    for entry in history:
        if entry.get("step", last + 1) <= last:
            values.setdefault(entry["step"], {}).update(_of_epoch(entry))
    return [Point(step, values[step]) for step in sorted(values)]


def _of_epoch(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an epoch, by the names that a tracker gets; each step has a loss and a rate already."""
    names = {LOSS: EPOCH_LOSS, RATE: f"epoch_{RATE}"}
    return {names.get(name, name): float(value) for name, value in flat(entry).items() if name not in _NO_METRICS}


def unknown(points: Iterable[Point], last_steps: Mapping[str, int]) -> list[Point]:
    """Return the points without what a tracker already has.

    Args:
        points: in the order of their steps.
        last_steps: the last step that it knows of, by the name of the number.
    """
    left = []
    for point in points:
        values = {name: value for name, value in point.values.items() if point.step > last_steps.get(name, 0)}
        if values:
            left.append(Point(point.step, values))
    return left


@dataclass(frozen=True)
class Known:
    """The contents of the file.

    Attributes:
        key: by which trackers know the run.
        complete: flags of those that were told of all of it.
        heard: last global step that the program's own callbacks of trackers were told of.
    """

    key: str
    complete: tuple[str, ...] = ()
    heard: int = 0

    def write(self, run: Storage) -> None:
        run.put(FILE, json.dumps(dataclasses.asdict(self)).encode())


def read_known(run: Storage) -> Known:
    """Return what is known of a run; a new key is written down before a tracker hears of it.

    Raises:
        ConfigError: the file is damaged.
    """
    text = run.get_or_none(FILE)
    if text is None:
        known = Known(uuid.uuid4().hex)
        known.write(run)
        return known
    try:
        document = json.loads(text)
        return Known(str(document["key"]), tuple(map(str, document["complete"])), int(document.get("heard", 0)))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{run.locate(FILE)} is damaged. Remove it: trackers then see another run.") from None
