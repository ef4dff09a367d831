"""Checks that a run's records are consistent: the digest chain over its steps, and its checkpoints.

Nothing is recomputed here. A change of a single record breaks the chain. A forgery of all records is detected only
when steps are recomputed: see `chance`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytf.checkpoint import manifest, naming, verify
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.checkpoint.verify import Worth
from raytf.distributed import step_digest
from raytf.errors import CheckpointError, DamagedFileError, RunMismatchError, StorageError
from raytf.runs import digest_log, run_log
from raytf.storage.storage import Storage

_NO_DIGESTS = "steps have no digests: the chain covers only their losses, and no step can be recomputed"


@dataclass(frozen=True)
class Records:
    """The result of checking a run's records.

    Attributes:
        problems: contradictions, one line each.
        notes: records that could not be checked, one line each.
        checkpoints: names of the complete checkpoints, in the order of their steps.
        steps: number of steps in the log.
        has_digests: whether the last step has digests, so that it can be recomputed.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    checkpoints: tuple[str, ...]
    steps: int
    has_digests: bool = True


@dataclass(frozen=True)
class Interval:
    """The steps between two checkpoints, which can be recomputed; `begin` is None for the start of the run."""

    begin: str | None
    end: str

    @property
    def steps(self) -> range:
        """Return the steps to compute, counted from 1."""
        first = 0 if self.begin is None else naming.split_name(self.begin)[0]
        return range(first + 1, naming.split_name(self.end)[0] + 1)


def check(run: Storage) -> Records:
    """Check all records of a run's steps, and every byte of its checkpoints."""
    problems: list[str] = []
    notes: list[str] = []
    findings = verify.verify(run)
    for finding in findings:
        if finding.state in (Worth.DAMAGED, Worth.NEWER):
            problems.append(f"checkpoint {finding.name}: {'; '.join(finding.problems)}")
    whole = sorted((f.name for f in findings if f.state is Worth.WHOLE), key=naming.split_name)
    try:
        chains = _chains(run, problems, notes)
    except DamagedFileError as error:
        problems.append(f"{error.file}: {error.reason}")
        chains = {}
    kept: dict[str, str] = {}
    for name in whole:
        try:
            kept[name] = manifest.link(run, name).sha256
            problems += _problems_of(run, name, chains, kept, notes)
        except StorageError as error:
            if error.kind != "missing":  # a live run deletes old checkpoints
                raise
            kept.pop(name, None)
    notes = list(dict.fromkeys(notes))
    return Records(tuple(problems), tuple(notes), tuple(kept), len(chains), _NO_DIGESTS not in notes)


def intervals(checkpoints: Sequence[str]) -> list[Interval]:
    """Return the intervals from the run's beginning to the first checkpoint, and from each one to the next."""
    by_step = {naming.split_name(name)[0]: name for name in checkpoints}
    names = [by_step[step] for step in sorted(by_step)]
    before: list[str | None] = [None, *names]
    return [Interval(begin, end) for begin, end in zip(before, names, strict=False)]


def draw(of: Sequence[Interval], share: float, seed: int | None = None) -> list[Interval]:
    """Return random intervals, at least one, with a share (0 to 1) of all steps; unpredictable without a seed."""
    generator: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
    left, chosen = list(of), list[Interval]()
    wanted = share * sum(len(each.steps) for each in of)
    while left and (not chosen or sum(len(each.steps) for each in chosen) < wanted):
        chosen.append(left.pop(generator.randrange(len(left))))
    return sorted(chosen, key=lambda each: each.steps.start)


def chance(computed: int, of: int, forged: int = 1) -> float:
    """Return the probability that at least one of `forged` steps is among `computed` of `of` steps, drawn at random."""
    missed = 1.0
    for i in range(min(forged, of)):
        missed *= max(0, of - computed - i) / (of - i)
    return 1.0 - missed


def _chains(run: Storage, problems: list[str], notes: list[str]) -> dict[int, bytes]:
    """Return the chain after each step of the log; add a problem if a step is missing."""
    table, digests = run_log.read_steps(run.uri), digest_log.read(run, run_log.STEPS)
    steps = table["step"]
    gaps = np.flatnonzero(np.diff(steps, prepend=0) != 1)
    if len(gaps):
        at = int(gaps[0])
        before = int(steps[at - 1]) if at else 0
        problems.append(f"the log of steps jumps from step {before} to step {int(steps[at])}")
        return {}
    chains, chain = {}, step_digest.GENESIS
    for step, loss, rate in zip(*(table[name].tolist() for name in ("step", "loss", "learning_rate")), strict=True):
        kept = digests.of(step)
        chain = step_digest.chained(chain, step, [(loss, rate)], [b"" if kept is None else kept[1]])
        chains[step] = chain
    if len(steps) and digests.of(int(steps[-1])) is None:
        notes.append(_NO_DIGESTS)
    return chains


def _problems_of(
    run: Storage, name: str, chains: dict[int, bytes], kept: dict[str, str], notes: list[str]
) -> list[str]:
    """Return how a checkpoint contradicts the log of steps and the checkpoint before it."""
    problems, step = [], naming.split_name(name)[0]
    try:
        body = manifest.read(run, name)
    except (CheckpointError, RunMismatchError) as error:
        return [str(error)]
    chain = CheckpointDocument.parse(body["document"]).chain
    if not chain:
        notes.append("checkpoints of an older raytf have no chain")
    elif step in chains and chains[step].hex() != chain:
        problems.append(f"checkpoint {name}: the chain over the log of steps differs from the chain in its manifest")
    elif step not in chains and chains:
        problems.append(f"checkpoint {name}: the log of steps ends before step {step}")
    before = body.get("before")
    if before is not None:
        known = kept.get(before["name"])
        if known is not None and known != before["sha256"]:
            problems.append(f"checkpoint {before['name']}: its manifest is not the one that preceded {name}")
    return problems
