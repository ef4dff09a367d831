"""Audits under many faults: `python -m tests.stress.audits --faults 1000 --undisturbed 100000`.

Ranks are threads of one process (`tests.tf.audited`), so that a fault takes a second; all that decides and computes is
raytf's: the step with its audit, the comparison of weights, who is blamed and to which step the run goes back. After
each fault the run goes back to that step, the fault is gone, as if its machine were, and the weights at the end have to
be those of an undisturbed run.

A fault is a bit that flips in an encoded gradient, in a weight or in a record of the batch; once, now and then (with
one chance in three each time) or always; on one of two to four ranks. Since it is known which shard of which step is
audited by whom, it is known in which step each fault has to be found, or that no audit can see it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.audit.shard_audit import Standing
from raytf.checkpoint.replicas import Digest, Replicas
from raytf.checkpoint.variables import weights_sha256
from raytf.data.pipeline import CallBatch
from raytf.distributed import step_agreement
from raytf.errors import ReplicaError
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.training.auditing import Audits
from raytf.training.session import Place
from tests.tf.audited import ALL, NONE, SOURCE, Group

STEPS, COPIES = 32, 8
WHERE, HOW = ("gradient", "weights", "batch"), ("once", "now and then", "always")
#: Of which a full epoch of the data has so many.
FULL = 4


class Ranks:
    """What ranks that are threads add up."""

    def __init__(self, size: int):
        self.world_size, self._parts = size, [np.zeros(0)] * size
        self._barrier = threading.Barrier(size, timeout=120)

    def of(self, rank: int) -> Any:
        def add(values: np.ndarray) -> np.ndarray:
            self._parts[rank] = np.asarray(values)
            self._barrier.wait()
            total = sum(self._parts[1:], self._parts[0])
            self._barrier.wait()
            return total

        return SimpleNamespace(rank=rank, world_size=self.world_size, sum=add)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong: from a step on, on a rank; `at` says in which of its shards, if it happens once."""

    where: str
    how: str
    rank: int
    step: int
    at: int
    bit: int

    def now(self, step: int, draw: random.Random) -> int:
        """Which of the rank's shards of a step are hit."""
        if self.how == "always":
            return ALL if step >= self.step else NONE
        if self.how == "once":
            return self.at if step == self.step else NONE
        return draw.randrange(4) if step >= self.step and draw.random() < 1 / 3 else NONE


class Trials:
    """Runs of a group of ranks."""

    def __init__(self, size: int, every: int, lease: Lease, run: Storage):
        self.group, self.size, self.every = Group(size), size, every
        self._storage, self._owner = run, lease.owner["id"]
        self._variables = [self._of(rank) for rank in self.group.ranks]
        self._first = self._values()
        self.sha256 = self._run(None, random.Random(0))[1]

    @staticmethod
    def _of(rank: Any) -> dict[str, Any]:
        """What a checkpoint has."""
        several = {"m": rank.model.variables, "o": rank.model.optimizer.variables}
        named = {f"{kind}/{i}": v for kind, found in several.items() for i, v in enumerate(found)}
        return named | rank.step.reduction_state()

    def _values(self) -> list[dict[str, np.ndarray]]:
        return [{name: v.numpy() for name, v in named.items()} for named in self._variables]

    def _restore(self, values: list[dict[str, np.ndarray]]) -> None:
        for named, found in zip(self._variables, values, strict=True):
            for name, variable in named.items():
                variable.assign(found[name])

    def _auditors(self) -> tuple[list[Audits], list[Replicas], list[Any]]:
        ranks, audits, replicas = Ranks(self.size), [], []
        groups = [ranks.of(rank) for rank in range(self.size)]
        for rank, named, group in zip(self.group.ranks, self._variables, groups, strict=True):
            digest = Digest([v.value for v in named.values() if v.dtype.startswith("float")])
            replica = Replicas(
                group, named, digest.value, True, lambda text: None, lambda kind, **fields: None, lambda: "here"
            )
            session = SimpleNamespace(
                group=group,
                storage=self._storage,
                place=Place("a"),
                job=SimpleNamespace(lease=self._owner),
                state=SimpleNamespace(step=0),
                plan=self.group.plan,
                config=SimpleNamespace(
                    batch=SimpleNamespace(seed=0), compute=SimpleNamespace(exact=True, audit_every=None)
                ),
                pipeline=rank._pipeline,
                sources=SimpleNamespace(train=SOURCE),
                digest=lambda with_optimizer, digest=digest: digest,
                saving=SimpleNamespace(replicas=replica),
                reporter=SimpleNamespace(
                    event=lambda kind, **fields: None, stand=lambda joined, vouched: None, go_back=self._goes_back
                ),
            )
            audits.append(Audits(session, rank.step, self.every, Standing(), str(group.rank)))
            audits[-1].begin()
            replicas.append(replica)
        return audits, replicas, groups

    def trial(self, fault: Fault, draw: random.Random) -> dict[str, Any]:
        """What becomes of a fault."""
        self._restore(self._first)
        #: The wrong value of a bit in a weight, once it is wrong.
        self._stuck: Any = None
        error, sha256, found, expected, back = *self._run(fault, draw), None
        if isinstance(error, ReplicaError):
            back = self._back
            begin = max(step for step in self._copies if step <= back)
            self._restore(self._copies[begin])
            sha256 = self._run(None, draw, begin)[1]
        named = error.ranks if isinstance(error, ReplicaError) else None
        return {
            **dataclasses.asdict(fault),
            "size": self.size,
            "found": found,
            "expected": expected,
            "named": named,
            "back": back,
            "is_same": sha256 == self.sha256,
        }

    def _run(self, fault: Fault | None, draw: random.Random, begin: int = 0) -> tuple[Any, str, int | None, int | None]:
        """Steps to the end, or to the first that an audit or a comparison of weights stops.

        Returns:
            The error; the weights; the step that was stopped; the step in which the fault has to be seen.
        """
        audits, replicas, groups = self._auditors()
        self._copies = {begin: self._values()} if begin else {0: self._first}
        expected, is_drifting = None, False
        for start in range(begin, STEPS):
            hit = NONE if fault is None else fault.now(start, draw)
            choice = audits[0].choice(start)
            if fault is not None:
                is_drifting |= fault.where == "weights" and hit != NONE
                is_seen = self._is_seen(fault, hit, choice, is_drifting)
                is_told = is_drifting and start % COPIES == 0 and start > 0
                expected = start + 1 if expected is None and (is_seen or is_told) else expected
            errors = self._step(start, fault, hit, choice, draw, (audits, replicas, groups))
            if errors[0] is not None:
                return errors[0], "", start + 1, expected
            if (start + 1) % COPIES == 0:
                self._copies[start + 1] = self._values()
        return None, weights_sha256(self.group.ranks[0].model), None, expected

    def _is_seen(self, fault: Fault, hit: int, choice: Any, is_drifting: bool) -> bool:
        """Whether the audit of a step can see the fault."""
        if choice is None or fault.rank not in (choice.owner, choice.auditor):
            return False
        if fault.where == "weights":
            return is_drifting
        own = self.group.spans[fault.rank]
        # The auditor reads the shard's records after its own, and computes it before them.
        beside = len(own) if fault.where == "batch" else 0
        at = own.index(choice.shard) if fault.rank == choice.owner else beside
        return hit in (ALL, at)

    def _step(self, start, fault, hit, choice, draw, sides) -> list[Any]:
        audits, replicas, groups = sides
        self._inject(fault, hit)

        def one(number: int) -> Any:
            rank, replica = self.group.ranks[number], replicas[number]
            if start % COPIES == 0 and start:
                replica.hash_weights(start)
            told = step_agreement.vector({}, replica.tell())
            try:
                replica.hear(groups[number].sum(told), start)
            except ReplicaError as error:
                self._back = replica.agreed or 0
                return error
            is_auditor = choice is not None and choice.auditor == number
            call = rank._pipeline.submit(start, start + 1, choice.shard if is_auditor else None).result()
            if fault is not None and fault.where == "batch" and fault.rank == number:
                call = _spoilt(call, hit, fault.bit)
            try:
                rank.step(call, np.zeros(1, np.float32), *(() if choice is None else (choice.shard, is_auditor)))
            except tf.errors.OpError:
                return self._settle(number, call, fault, audits[number], draw)
            return None

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))

    def _inject(self, fault: Fault | None, hit: int) -> None:
        for number, encoding in enumerate(self.group.faults):
            is_here = fault is not None and fault.where == "gradient" and fault.rank == number
            encoding.begin(hit if is_here else NONE, 9 if fault is None else fault.bit)
        if fault is not None and fault.where == "weights" and hit != NONE:
            weight = self.group.ranks[fault.rank].model.trainable_variables[1]
            values = weight.numpy().copy()
            word = values.reshape(-1).view(np.uint32)
            self._stuck = ~word[0] & np.uint32(1 << fault.bit) if self._stuck is None else self._stuck
            word[0] = word[0] & ~np.uint32(1 << fault.bit) | self._stuck
            weight.assign(values)

    def _settle(self, number: int, call: CallBatch, fault: Fault | None, audits: Audits, draw: random.Random) -> Any:
        """All ranks find out who was wrong; a fault that goes on does so meanwhile."""
        rank = self.group.ranks[number]
        assert rank.step.audit is not None
        told = rank.step.audit.take()
        assert told is not None
        is_here = fault is not None and fault.rank == number and fault.how != "once"
        if is_here and fault.where == "gradient":
            self.group.faults[number].begin(ALL if fault.how == "always" else draw.randrange(6), fault.bit)
        alone = rank._pipeline.alone
        if is_here and fault.where == "batch":
            bad = fault.how == "always" or draw.random() < 1 / 3
            audits._session.pipeline = SimpleNamespace(
                shards=rank._pipeline.shards,
                alone=lambda shard, step: _spoilt(alone(shard, step), ALL if bad else NONE, fault.bit),
            )
        try:
            audits.settle(call, told)
        except ReplicaError as error:
            return error

    def _goes_back(self, after: int, attempts: Any) -> None:
        self._back = after


def _spoilt(call: CallBatch, hit: int, bit: int) -> CallBatch:
    """A call with a bit flipped in the first number of one of its shards, or of all."""
    leaves = [np.array(leaf) for leaf in call.leaves]
    numbers = next(leaf for leaf in leaves if leaf.dtype == np.float32)
    for shard in range(numbers.shape[1]):
        if hit in (ALL, shard):
            numbers[0, shard].reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << bit)
    return dataclasses.replace(call, leaves=leaves)


def fault(draw: random.Random, size: int) -> Fault:
    """One at random."""
    where = draw.choice(WHERE)
    bit = draw.randrange(1, 31) if where == "gradient" else draw.randrange(16, 23)
    return Fault(where, draw.choice(HOW), draw.randrange(size), draw.randrange(1, STEPS - 8), draw.randrange(4), bit)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--undisturbed", type=int, default=2000, help="steps, each of them audited")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write every trial to this file")
    flags = parser.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(16)  # ranks wait for each other in operations
    draw, rows, began = random.Random(flags.seed), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Lease(Storage(folder)) as lease:
        run = Storage(folder)
        for size in (2, 3, 4):
            trials = Trials(size, 2, lease, run)
            count = flags.faults // 3 + (size == 2) * (flags.faults % 3)
            rows += [trials.trial(fault(draw, size), draw) for _ in range(count)]
            _tell(size, [row for row in rows if row["size"] == size])
        alarms = 0
        for size in (2, 3, 4):
            alarms += _undisturbed(Trials(size, 1, lease, run), flags.undisturbed // 3)
    print(f"{flags.undisturbed // 3 * 3} undisturbed steps, each of them audited: {alarms} alarms")
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump(rows, file, indent=1)
    bad = [row for row in rows if row["found"] != row["expected"] or row["named"] not in _right(row)]
    bad += [row for row in rows if row["found"] and not row["is_same"]]
    for row in bad:
        print("UNEXPECTED", row)
    print(f"{len(rows)} faults, {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(bad or alarms))


def _right(row: dict[str, Any]) -> list[list[int] | None]:
    """Who may be named: of two ranks that differ each time nobody is, nor of two that have other weights."""
    if row["found"] is None:
        return [None]
    steady = row["how"] != "once" or row["where"] == "weights"
    return [[row["rank"]], *([[], [0, 1]] if row["size"] == 2 and steady else [])]


def _tell(size: int, rows: list[dict[str, Any]]) -> None:
    for where in WHERE:
        for how in HOW:
            some = [row for row in rows if (row["where"], row["how"]) == (where, how)]
            found = [row for row in some if row["found"]]
            named = Counter("right" if row["named"] == [row["rank"]] else "nobody" for row in found)
            late = sum(row["found"] != row["expected"] for row in some)
            same = sum(row["is_same"] for row in found)
            print(
                f"{size} ranks, {where:8} {how:12}: {len(some):3} faults, {len(found):3} found, {late} in another step "
                f"than they had to be; named: {named['right']} right, {named['nobody']} nobody; {same} ended with the "
                "weights of an undisturbed run",
                flush=True,
            )


def _undisturbed(trials: Trials, steps: int) -> int:
    """How many alarms there are in so many steps."""
    alarms = 0
    for _ in range(-(-steps // STEPS)):
        trials._restore(trials._first)
        error, sha256, *_ = trials._run(None, random.Random(0))
        alarms += error is not None or sha256 != trials.sha256
    return alarms


if __name__ == "__main__":
    main()
