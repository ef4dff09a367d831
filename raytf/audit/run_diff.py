"""Finds the first step at which two runs differ, and the reason, as far as their folders show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytf.checkpoint import manifest
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.config.canonical_text import plainly
from raytf.data.order import EpochOrder
from raytf.data.plan import StepPlan
from raytf.distributed import step_digest
from raytf.distributed.step_digest import LOSS, Difference
from raytf.errors import CheckpointError, DamagedFileError
from raytf.runs import digest_log, run_log
from raytf.runs.digest_log import RunDigests
from raytf.storage.storage import Storage
from raytf.storage.untrusted_json import LARGE, decode

#: Keys of the identity that do not affect training.
_ANSWERS = ("validation data", "test data", "model compiled metrics")
#: Keys of the identity whose values are hashes; the architecture file describes the same in words.
_HASHES = ("model architecture", "model structure")
_ARCHITECTURE = "architecture.json"
#: Matches the result of `raytf.training.run_identity.contents` for arrays. Runs do not record the blocks of other data.
_ARRAYS = re.compile(r"\d+ records, CRC-32 ")
_SIZES = ("training records", "--global-batch-size", "--logical-shards", "--seed")


@dataclass(frozen=True)
class RunTrace:
    """The steps and settings of a run, read from its folder.

    Attributes:
        place: the folder, for people.
        steps: columns of `raytf.read_steps`.
        identity: settings, data and model, from its newest readable checkpoint.
        architecture: the model's configuration; None if it cannot be read.
    """

    place: str
    steps: Mapping[str, np.ndarray]
    digests: RunDigests
    identity: Mapping[str, str] = field(default_factory=dict)
    architecture: Any = None


@dataclass(frozen=True)
class Parting:
    """The difference between two runs.

    Attributes:
        same: number of steps, from the first one, that are equal in both runs.
        step: the first step that differs; None if all steps that both runs have are equal.
        difference: the shards and tensors that differ; None if digests cannot show them.
        settings: differences in settings, data and model: the key, and its value in each run.
        rates: a step (the last equal one or else `step`) and its learning rate in each run, if the rates differ.
        is_loss_equal: whether `step` has the same loss in both runs.
        records: numbers of each run's records in the shards that differ; None if unknown.
    """

    same: int
    step: int | None
    difference: Difference | None
    settings: tuple[tuple[str, str, str], ...]
    rates: tuple[int, float, float] | None = None
    is_loss_equal: bool = False
    records: tuple[list[int] | None, list[int] | None] = (None, None)

    @property
    def has_other_weights(self) -> bool:
        """Return whether the weights before the step differ: all shards and their losses differ then."""
        differs = self.difference
        is_forward_equal = differs is not None and self.is_loss_equal and LOSS not in differs.tensors
        return differs is not None and differs.is_everywhere and not is_forward_equal


def load(run: Storage) -> RunTrace:
    """Return the trace of a run, read from its folder."""
    identity: Mapping[str, str] = {}
    for name in manifest.list_complete(run):
        try:
            identity = CheckpointDocument.parse(manifest.read(run, name)["document"]).identity
            break
        except CheckpointError:  # an earlier checkpoint has the same identity
            continue
    return RunTrace(
        run.locate(""), run_log.read_steps(run.uri), digest_log.read(run, run_log.STEPS), identity, _architecture(run)
    )


def part(one: RunTrace, other: RunTrace) -> Parting:
    """Find the first step at which two runs differ, and what differs between them."""
    settings = tuple(_settings(one, other))
    count = min(len(one.steps["step"]), len(other.steps["step"]))
    for i in range(count):
        step = int(one.steps["step"][i])
        difference = _difference(one, other, step)
        is_loss_equal = bool(np.array_equal(one.steps["loss"][i], other.steps["loss"][i], equal_nan=True))
        if difference is not None or not is_loss_equal:
            shards = () if difference is None else difference.shards
            ours, theirs = (record_numbers(trace.identity, step, shards) for trace in (one, other))
            return Parting(i, step, difference, settings, _rates(one, other, i), is_loss_equal, (ours, theirs))
    return Parting(count, None, None, settings)


def why(parting: Parting) -> list[str]:
    """Return the reasons why the runs differ, for people, the likeliest first."""
    lines = [f"{key}: {a} and {b}" for key, a, b in parting.settings]
    if parting.rates is not None and not any("learning_rate" in line for line in lines):
        step, a, b = parting.rates
        lines.append(f"learning rate of step {step}: {a:g} and {b:g}")
    if parting.step is None:
        return lines
    if parting.difference is None:
        lines.append(f"loss of step {parting.step}: the digests of these runs cannot be compared")
    elif parting.has_other_weights:
        if parting.step == 1:
            lines.append("all shards differ: the initial weights differ, or the computation with them does")
        else:
            before = f"the weights after step {parting.step - 1}"
            lines.append(f"all shards differ, so {before} do: their update differed, or a machine changed them")
    else:
        where = f"{_shards(parting.difference)} in {_tensors(parting.difference)}"
        lines.append(f"{where}; the weights before the step are the same")
        lines += _records(parting)
        if not parting.settings:
            lines.append("settings, data and model are the same: a machine computed wrongly, or the data changed")
    return lines


def _records(parting: Parting) -> list[str]:
    ours, theirs = parting.records
    if not ours or not theirs:
        return []
    if ours == theirs:
        return [f"both runs had {_listed(ours)} of the data there"]
    return [f"one run had {_listed(ours)} of its data there, the other one {_listed(theirs)}"]


def _listed(records: Sequence[int], most: int = 64) -> str:
    return f"records {', '.join(map(str, records[:most]))}{' ...' * (len(records) > most)}"


def _tensors(differs: Difference, most: int = 8) -> str:
    """Return the tensors that differ, with the forward pass first."""
    names = sorted(differs.tensors, key=lambda name: name != LOSS)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "unknown tensors"


def _shards(differs: Difference) -> str:
    if differs.is_everywhere:
        return "all shards differ"
    if len(differs.shards) == 1:
        return f"shard {differs.shards[0]} of the batch differs"
    several = ", ".join(map(str, differs.shards[:8])) or "(unknown)"
    return f"shards {several} of the batch differ"


def _difference(one: RunTrace, other: RunTrace, step: int) -> Difference | None:
    """Return how the digests of a step differ; None if they are equal or cannot be compared."""
    a, b = one.digests.of(step), other.digests.of(step)
    if a is None or b is None or (a[0].shards, a[0].kind) != (b[0].shards, b[0].kind) or a[1] == b[1]:
        return None
    if a[0] != b[0]:  # the models have different sets of weights
        return Difference(tuple(range(a[0].shards)), (), a[0].shards)
    return step_digest.difference(a[0], a[1], b[1])


def _rates(one: RunTrace, other: RunTrace, i: int) -> tuple[int, float, float] | None:
    for at in (max(0, i - 1), i):
        a, b = one.steps["learning_rate"][at], other.steps["learning_rate"][at]
        if a != b:
            return int(one.steps["step"][at]), float(a), float(b)
    return None


def _settings(one: RunTrace, other: RunTrace) -> Iterator[tuple[str, str, str]]:
    """Yield the differences in settings, data and model, as short texts."""
    a, b = one.identity, other.identity
    if not a or not b:
        return
    is_model = False
    for key in sorted(a.keys() | b.keys()):
        before, after = plainly(a.get(key, "nothing")), plainly(b.get(key, "nothing"))
        if before == after or key in _ANSWERS:
            continue
        if key in _HASHES:
            is_model = True
            continue
        inner = list(_of_json(before, after))
        whole = [(key, _short(before, 120), _short(after, 120))]
        yield from ((f"{key}, {path}", x, y) for path, x, y in inner) if inner else whole
    if is_model:
        named = list(_paths(one.architecture, other.architecture, ""))[:8]
        yield from ((f"model, {path}", x, y) for path, x, y in named)
        if not named:
            yield "model", "one structure", "another structure, which the folders do not describe"


def _of_json(before: str, after: str) -> Iterator[tuple[str, str, str]]:
    """Yield the differences within texts that end with a JSON object, such as an optimizer's settings."""
    try:
        a, b = (json.loads(text[text.index("{") :]) for text in (before, after))
    except ValueError:
        return
    if before[: before.index("{")] == after[: after.index("{")]:
        yield from _paths(a, b, "")


def _paths(a: Any, b: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the innermost places at which two JSON values differ."""
    if a is None and b is None:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            yield from _paths(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _paths(x, y, f"{path}[{_layer(y) or place}]")
    elif isinstance(a, list) and isinstance(b, list) and all(map(_layer, [*a, *b])):
        names = [_short(", ".join(str(_layer(each)) for each in layers), 120) for layers in (a, b)]
        yield path, names[0], names[1]
    elif a != b:
        yield path, _short(a), _short(b)


def _layer(value: Any) -> str | None:
    config = value.get("config") if isinstance(value, dict) else None
    return config.get("name") if isinstance(config, dict) else None


def _short(value: Any, most: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _architecture(run: Storage) -> Any:
    """Return the model's configuration; None if it cannot be read."""
    data = run.get_or_none(_ARCHITECTURE, LARGE)
    if data is None:
        return None
    try:
        document = decode(data)
    except (ValueError, DamagedFileError):
        return None
    return document.get("config") if isinstance(document, dict) else None


def record_numbers(identity: Mapping[str, str], step: int, shards: Sequence[int]) -> list[int] | None:
    """Return the record numbers, from 0, of some logical shards in a step; None if `identity` is insufficient."""
    if not _ARRAYS.match(identity.get("contents of the training data", "")):
        return None
    try:
        records, batch, of, seed = (int(identity[key]) for key in _SIZES)
        if min(records, batch, of) < 1:
            return None
        plan = StepPlan(records, batch, of)
        epoch, inside = plan.locate(step - 1)
        order = EpochOrder(plan, None, seed, epoch, 1, identity.get("shuffle") != "off")
        return [int(n) for shard in shards for n in order.of_steps(shard, inside, inside + 1)]
    except (KeyError, ValueError, IndexError):  # raytf did not write this identity
        return None
