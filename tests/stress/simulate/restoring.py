"""How rank 0 of a simulated group finds the state to begin with, in place of `raytf.checkpoint.restore`.

`RestorePlan` decides. What is made up is how keepers and storage answer.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from raytf.checkpoint import naming
from raytf.checkpoint.restore import Candidate, RestorePlan
from raytf.checkpoint.slot_ledger import Generation, generations, is_latest
from raytf.errors import CheckpointError, StorageError
from tests.stress.simulate.arithmetic import expected
from tests.stress.simulate.keepers import Keeper
from tests.stress.simulate.storage import Request, Steps
from tests.stress.simulate.world import Violation

if TYPE_CHECKING:
    from tests.stress.simulate.group import Worker

#: Seconds in which keepers answer, and those whose host does while they do not.
_SURVEY_SECONDS, _BUSY_SECONDS = 3.0, 20.0


class Restored(NamedTuple):
    """A state to begin with.

    Attributes:
        step, state: of it.
        durable: step of the newest checkpoint on storage, as far as it is known.
        name: of the checkpoint; empty for a copy in memory, and for a new run.
    """

    step: int
    state: int
    durable: int | None
    name: str = ""


class Restoring:
    """One look for the newest state.

    Args:
        worker: rank 0.
    """

    def __init__(self, worker: Worker):
        self._worker, self._run = worker, worker.run
        self._asked: list[Keeper] = []
        self._least = 0
        self.found: Restored | None = None

    def find(self) -> Steps:
        """Find the state; while storage is out and is needed, try again."""
        progress, store = self._worker.driver.progress, self._run.store
        known, is_saving = progress.durable, progress.is_saving()
        unknown = self._run.ownership.late | self._run.ownership.unannounced
        stored = [step for name, (step, _) in store.manifests.items() if name not in unknown]
        earlier = [*self._worker.driver.earlier, *self._worker.driver.attempts.values()]
        copies = yield from self._survey(earlier)
        self._least = self._run.memory.checks.restoring(self._asked, earlier)
        plan = RestorePlan.of(copies, known, is_saving)
        has_asked = False
        while self.found is None:
            try:
                if plan.asks_storage:
                    names = yield Request(store.list_complete)
                    plan, has_asked = plan.listed(names), True
                    known = max((naming.split_name(name)[0] for name in names), default=known)
                yield from self._read(plan, known)
                if self.found is None and has_asked:
                    self.found = Restored(0, expected(0), None)
                elif self.found is None:
                    plan = plan.failed()
            except StorageError:
                if plan.asks_storage and plan.can_wait:
                    plan, stored = dataclasses.replace(plan, asks_storage=False), []
                yield 1.0
        self._check([] if has_asked else stored)

    def _survey(self, earlier: list[str]) -> Steps:
        """Ask all keepers what they hold, as `memory_keeper.survey` does."""
        run, me = self._run, self._worker.process
        living = [keeper for keeper in run.memory.living if not run.network.is_cut(me.host, keeper.process.host)]
        late = [k for k in living if k.process.is_frozen or run.memory.late.get(k.process.host)]
        yield _SURVEY_SECONDS if late else 0.01
        self._asked = [keeper for keeper in living if keeper not in late and keeper.is_alive]
        held = {keeper.process.host: list(keeper.held.values()) for keeper in self._asked}
        if late and not is_latest(held, earlier):
            yield _BUSY_SECONDS
            busy = [keeper for keeper in late if not keeper.process.is_frozen and keeper.is_alive]
            self._asked += busy
            held |= {keeper.process.host: list(keeper.held.values()) for keeper in busy}
        return generations(held, earlier)

    def _read(self, plan: RestorePlan, known: int | None) -> Steps:
        for candidate in plan.candidates:
            try:
                if isinstance(candidate, str):
                    step, state = yield Request(partial(self._run.store.load, candidate))
                    self.found = Restored(step, state, step, candidate)
                else:
                    yield self._run.memory.travel("")
                    self.found = self._load(candidate, known)
            except CheckpointError:
                self._skipped(candidate)
            else:
                return

    def _load(self, copy: Generation, known: int | None) -> Restored:
        """Read a copy from any of its keepers."""
        for keeper in self._asked:
            shares = copy.holders.get(keeper.process.host, [])
            slots = [keeper.slots.get(int(share.path)) for share in shares] if keeper.is_alive else []
            if slots and [slot.share if slot else None for slot in slots] == shares:
                first = slots[0]
                assert first is not None
                if any(slot is None or slot.state != first.state for slot in slots):
                    raise Violation(f"the shares of the copy of step {copy.step} are of several states")
                return Restored(copy.step, first.state, max(first.durable or 0, known or 0) or None)
        raise CheckpointError("nobody holds it")

    def _skipped(self, candidate: Candidate) -> None:
        if isinstance(candidate, str):
            self._run.ownership.skipped(candidate)
        else:
            self._least = 0  # it was replaced, or its keeper has died meanwhile

    def _check(self, stored: list[int]) -> None:
        """The newest state that is known is restored; checkpoints count where storage was not asked."""
        assert self.found is not None
        newest = max([self._least, *stored])
        if self.found.step < newest:
            raise Violation(f"step {self.found.step} is restored although there is step {newest}")
