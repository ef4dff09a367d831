"""A simulated driver's lease of the run: `raytf.runs.lease_decisions` decides, and simulated storage holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from raytf.errors import RunInUseError, StorageError
from raytf.runs import lease_decisions
from tests.stress.simulate.storage import Request, Steps, Task

if TYPE_CHECKING:
    from tests.stress.simulate.group import Driver, Run


class SimulatedLease:
    """Takes the run for a driver, renews the lease, and ends the driver when it is lost.

    Args:
        run: to take.
        driver: that takes it.

    Attributes:
        owner: the driver, as the lease names it.
        is_held: whether the driver believes that it owns the run.
    """

    def __init__(self, run: Run, driver: Driver):
        self._run, self._driver, self._store = run, driver, run.store
        number, host = driver.number, driver.process.host
        self.owner: dict[str, Any] = {
            "id": driver.process.name, "host": host, "boot": host, "pid": number, "started": str(number), "term": 0
        }  # fmt: skip
        self.is_held = self._is_leaving = False

    def begin(self) -> None:
        """Try to take the run."""
        self._start(self._own())

    def conclude(self, finish: Callable[[], None]) -> None:
        """End the run, as `fit` does: only its owner writes the result."""
        self._start(self._conclude(finish))

    def _start(self, steps: Steps) -> None:
        Task(self._store, self._driver.process, steps)

    def _own(self) -> Steps:
        try:
            yield from self._carry_out(lease_decisions.taking(self.owner, "run", "lease"))
        except (RunInUseError, StorageError) as error:
            yield from self._leave(str(error), isinstance(error, RunInUseError))
            return
        self.is_held = True
        self._store.terms[self.owner["term"]] = self._run.world.now
        self._run.owned(self._driver)
        yield from self._carry_out(lease_decisions.renewing(self.owner, "run"), is_renewal=True)
        if not self._is_leaving:
            self._run.command_ended(self._driver, "another process took the run over")

    def _conclude(self, finish: Callable[[], None]) -> Steps:
        try:
            found = yield Request(self._store.read_lease)
            lease_decisions.check(found, self.owner["id"], "run")
        except (RunInUseError, StorageError) as error:
            yield from self._leave(str(error))
        else:
            finish()

    def _leave(self, why: str, is_refused: bool = False) -> Steps:
        self._is_leaving = True
        if is_refused:
            self._run.ownership.refused(self._driver)
        with contextlib.suppress(StorageError):
            yield from self._carry_out(lease_decisions.giving_back(self.owner["id"]))
        self._run.command_ended(self._driver, why)

    def _carry_out(self, decisions: lease_decisions.Decisions, is_renewal: bool = False) -> Steps:
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                command = decisions.send(answer) if error is None else decisions.throw(error)
            except StopIteration:
                return
            if is_renewal and self._is_leaving:
                return
            answer = error = None
            try:
                answer = yield from self._answer(command)
            except StorageError as trouble:
                error = trouble

    def _answer(self, command: lease_decisions.Command) -> Generator[Request | float, Any, Any]:
        store, checks, driver = self._store, self._run.ownership, self._driver
        match command:
            case lease_decisions.Read():
                return (yield Request(store.read_lease))
            case lease_decisions.Claim(text, version):
                yield Request(partial(checks.claim, driver, text, version), True)
            case lease_decisions.Renew(text, version):
                return (yield Request(partial(checks.renew, driver, text, version), True))
            case lease_decisions.Delete():
                yield Request(partial(checks.delete, driver), True)
            case lease_decisions.Wait(seconds):
                yield seconds
            case lease_decisions.ProcessStart(number):
                other = self._run.drivers[number - 1].process
                return str(number) if other.is_alive else None
            case lease_decisions.LatestTerm():
                return (yield Request(store.latest_term))
            case lease_decisions.Say(text):
                checks.said(driver, text)
        return None
