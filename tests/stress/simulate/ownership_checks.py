"""What must be so of the lease, and of what is written in its name, checked at each request to storage."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from raytf.checkpoint import naming
from raytf.runs.lease_decisions import STALE_SECONDS, Found
from tests.stress.simulate.saving import Saver
from tests.stress.simulate.world import Violation

if TYPE_CHECKING:
    from tests.stress.simulate.group import Driver, Run

_PROCESS_NUMBER = re.compile(rb'"pid": (\d+)')
#: Seconds between two looks.
_LOOK_SECONDS = 5.0
#: Seconds in which a process notices what has become of its lease, and tells it, once nothing is wrong with it.
_NOTICE_SECONDS = 45.0


class OwnershipChecks:
    """Of one run.

    Args:
        run: whose lease it is.

    Attributes:
        late: checkpoints that were completed by who had lost the run between its look at the lease and its write.
        unannounced: checkpoints that were completed while the driver could not be told.
    """

    def __init__(self, run: Run):
        self._run, self._store = run, run.store
        self.late: set[str] = set()
        self.unannounced: set[str] = set()
        #: When a driver has taken the lease or renewed it last, and since when it is another's.
        self._renewed: dict[Driver, float] = {}
        self._lost: dict[Driver, float] = {}
        #: Drivers that have told that the lease cannot be renewed.
        self._in_trouble: set[Driver] = set()
        self._newest = ""
        #: Checkpoints from which workers have begun.
        self._restored: set[str] = set()
        run.world.after(_LOOK_SECONDS, self._look)

    @property
    def owner(self) -> Driver | None:
        """The driver whose lease is in storage."""
        return self._driver_of(self._store.lease)

    def claim(self, driver: Driver, text: bytes, version: str | None) -> None:
        """A driver's request to take the lease has arrived."""
        before = self.owner
        if not self._store.swap_lease(text, version):
            return
        self._run.world.tell(f"{driver.process.name} has the lease")
        self._renewed[driver] = self._run.world.now
        if before is not None and before is not driver:
            self._lost[before] = self._run.world.now
            if self._is_well(before):
                raise Violation(f"{driver.process.name} takes the run although {before.process.name} is well")

    def renew(self, driver: Driver, text: bytes, version: str) -> bool:
        """A driver's request to renew the lease has arrived; returns whether it was carried out."""
        before = self.owner
        if not self._store.swap_lease(text, version):
            return False
        if before is not driver:
            raise Violation(f"{driver.process.name} renews another driver's lease")
        self._renewed[driver] = self._run.world.now
        return True

    def delete(self, driver: Driver) -> None:
        """A driver's request to delete the lease has arrived."""
        if self.owner not in (driver, None):
            raise Violation(f"{driver.process.name} deletes another driver's lease")
        self._store.delete_lease()

    def refused(self, driver: Driver) -> None:
        """A driver's command ends, since another one owns the run."""
        self._run.world.tell(f"{driver.process.name} is refused")
        since = driver.began - STALE_SECONDS
        if all(at < since for other, at in self._renewed.items() if other is not driver):
            raise Violation(f"{driver.process.name} is refused although nobody renews the lease")

    def said(self, driver: Driver, text: str) -> None:
        """A driver has told the user something about the lease."""
        self._run.world.tell(f"{driver.process.name} says: {text}")
        if "cannot be renewed" in text:
            self._in_trouble.add(driver)
        if "renewed again" in text:
            self._in_trouble.discard(driver)
            if self._run.world.now - max(self._renewed[driver], self._trouble(driver)) > _NOTICE_SECONDS:
                raise Violation(f"{driver.process.name} says that the lease is renewed, and it is not")

    def written(self, saver: Saver, found: Found, name: str, is_known: bool) -> None:
        """A rank has completed a checkpoint."""
        if not is_known:
            self.unannounced.add(name)
        self._check_owner(saver, found, f"completes {name}")
        if not self._owns(saver, self._store.lease):
            self.late.add(name)
            return
        attempt = naming.attempt_of(name)
        if attempt < self._newest:
            raise Violation(f"{name} sorts before what was written earlier: {self._newest}")
        self._newest = attempt
        self._run.checks.written(name)

    def deleting(self, saver: Saver, found: Found, name: str) -> None:
        """A rank deletes a checkpoint, or what there is of it."""
        if name not in self._store.manifests:
            return
        if naming.attempt_of(name) != saver.attempt:
            self._check_owner(saver, found, f"deletes {name}")
        if name in self._restored and name == naming.restore_order(self._store.manifests)[0]:
            raise Violation(f"{saver.owner} deletes {name}, from which others have begun, and there is no later one")

    def restored(self, name: str) -> None:
        """A rank begins with a checkpoint; with nothing where the name is empty."""
        self._restored.add(name)

    def skipped(self, name: str) -> None:
        """A rank could not restore a checkpoint that was listed."""
        if name in self._store.manifests and name not in self.late:
            raise Violation(f"checkpoint {name} cannot be restored")

    def _check_owner(self, saver: Saver, found: Found, what: str) -> None:
        if not self._owns(saver, found):
            raise Violation(f"a worker of {saver.owner} {what}, and its driver does not own the run")

    def _owns(self, saver: Saver, found: Found) -> bool:
        driver = self._driver_of(found)
        return driver is not None and driver.process.name == saver.owner

    def _driver_of(self, found: Found) -> Driver | None:
        return None if found is None else self._run.drivers[_number_of(found[0]) - 1]

    def _trouble(self, driver: Driver) -> float:
        """Return when something was wrong last with a driver or what it sees of storage."""
        now = self._run.world.now
        process = driver.process
        return now if process.is_frozen else max(min(now, process.troubled), self._store.trouble_at(process.host))

    def _is_well(self, driver: Driver) -> bool:
        """Whether a driver is able to renew its lease. An outage of storage for all does not excuse a loss."""
        process, since = driver.process, self._run.world.now - _NOTICE_SECONDS
        is_cut = process.host in self._store.cut_off or self._store.troubled.get(process.host, float("-inf")) > since
        return process.is_alive and not (process.is_frozen or process.troubled > since or is_cut)

    def _look(self) -> None:
        now = self._run.world.now
        for driver in self._run.drivers:
            if not driver.process.is_alive or driver.process.is_frozen:
                continue
            name, quiet = driver.process.name, now - self._trouble(driver)
            if driver in self._lost and driver.lease.is_held and min(quiet, now - self._lost[driver]) > _NOTICE_SECONDS:
                raise Violation(f"{name} has lost the run and does not end")
            if not driver.lease.is_held and min(quiet, now - driver.began) > _NOTICE_SECONDS:
                raise Violation(f"{name} neither takes the run nor is refused")
            silent = now - max(self._renewed.get(driver, now), driver.process.troubled)
            if driver.lease.is_held and silent > _NOTICE_SECONDS and driver not in self._in_trouble:
                raise Violation(f"{name} does not tell that its lease is not renewed")
        self._run.world.after(_LOOK_SECONDS, self._look)


def _number_of(text: bytes) -> int:
    """Return the number of the driver whose lease this is."""
    matched = _PROCESS_NUMBER.search(text)
    assert matched is not None
    return int(matched[1])
