"""Faults of storage, of clocks, and of the user, who gives a command twice; see `faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.stress.simulate.group import Run

if TYPE_CHECKING:
    from tests.stress.simulate.faults import Fault

#: Host on which the command is given a second time.
DESK = "desk"


def later(run: Run, seconds: float, call: Callable[..., None], *args: object) -> None:
    """Have a fault end after some seconds."""

    def end() -> None:
        run.checks.last_fault = run.world.now
        call(*args)

    run.world.after(seconds, end)


def out(run: Run, fault: Fault) -> None:
    """Storage refuses for a while."""
    _trouble(run, fault, "is_out", "storage is out")


def lossy(run: Run, fault: Fault) -> None:
    """Storage makes writes, and their answers are lost."""
    _trouble(run, fault, "is_lossy", "answers of storage are lost")


def slow(run: Run, fault: Fault) -> None:
    """Storage answers late."""
    _trouble(run, fault, "is_slow", "storage is slow")


def late(run: Run, fault: Fault) -> None:
    """Storage lists what was there before."""
    _trouble(run, fault, "is_late", "storage lists late")


def _trouble(run: Run, fault: Fault, what: str, text: str) -> None:
    run.world.tell(f"{text} for {fault.seconds:g} s")

    def add(count: int) -> None:
        setattr(run.store, what, getattr(run.store, what) + count)
        run.store.troubled[""] = run.world.now

    add(1)
    later(run, fault.seconds, add, -1)


def cut_off(run: Run, fault: Fault) -> None:
    """A host does not reach storage: the driver's, or that of workers."""
    number = fault.who % (len(run.hosts) + 1)
    _cut_off(run, [*run.hosts, run.driver.process.host][number], fault.seconds)


def _cut_off(run: Run, host: str, seconds: float) -> None:
    run.world.tell(f"{host} does not reach storage for {seconds:g} s")
    if host in run.store.cut_off:
        return
    run.store.cut_off.add(host)

    def end() -> None:
        run.store.cut_off.discard(host)
        run.store.troubled[host] = run.world.now

    later(run, seconds, end)


def second_command(run: Run, fault: Fault) -> None:
    """The same command is given on another host, while the first driver is well, frozen, or cut off from storage."""
    process = run.driver.process
    host = DESK if process.host != DESK else "head"
    if any(driver.process.is_alive and driver.process.host == host for driver in run.drivers):
        return
    if fault.other % 3 == 1 and process.is_alive and not process.is_frozen:
        run.world.tell(f"{process.name} is frozen for {fault.seconds:g} s")
        process.freeze()
        process.troubled = run.world.now + fault.seconds
        later(run, fault.seconds, process.thaw)
    if fault.other % 3 == 2:
        _cut_off(run, process.host, fault.seconds)
    run.give_command(host)


def wrong_clock(run: Run, fault: Fault) -> None:
    """The wall clock of a host jumps."""
    host = [*run.hosts, run.driver.process.host][fault.who % (len(run.hosts) + 1)]
    seconds = (fault.other - 50) * 1e4
    run.world.tell(f"the clock of {host} jumps by {seconds:g} s")
    run.world.clock_errors[host] = run.world.clock_errors.get(host, 0.0) + seconds
