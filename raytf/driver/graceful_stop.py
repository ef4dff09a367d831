"""A driver that is told to end has its run save first: by SIGTERM, as `ray job stop` and a pod's end send it, by
SIGHUP, as of a terminal that is closed, and by Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from raytf.cluster.ray_watch import Loss
from raytf.training.beat import Activity
from raytf.training.monitor_client import MonitorClient

#: Most that a save may take; who sent the signal may have less patience: 3 s are Ray's.
SAVE_SECONDS = 120.0
#: Most that one may take where Ray is lost.
LOST_SECONDS = 7.5
_LOOK_SECONDS = 0.02
#: Between two looks whether the `with` statement is over.
_END_SECONDS = 1.0
#: How people call it.
_NAMES = {signal.SIGTERM: "told to stop (SIGTERM)", signal.SIGHUP: "the terminal is gone (SIGHUP)"}
_INTERRUPTED = "interrupted"


class _Asked:
    """What this process was told so far.

    Attributes:
        first: signal; None as long as there was none.
        interrupts: how often Ctrl-C was pressed.
        is_saved: whether the save is over, well or not.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.interrupts, self.is_saved = 0, False

    def interrupt(self, number: int, frame: Any) -> None:
        """Handles Ctrl-C in the main thread, which is whoever called `fit`."""
        self.interrupts += 1
        if self.interrupts > 1 or self.is_saved:
            raise KeyboardInterrupt


@contextlib.contextmanager
def saving_first(monitor: MonitorClient, say: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """While the `with` statement lasts, SIGTERM, SIGHUP and SIGINT have the ranks save. Then the first two end the
    process, and the third raises KeyboardInterrupt. A second signal does not wait for the save. SIGHUP that is ignored
    stays so.

    Signals are read from a pipe by a thread: the main one waits for Ray, which lets it look at signals only once a
    second. Outside the main thread nothing is changed.

    Args:
        monitor: the driver's.
        say: takes a line for the user.
        leave: writes and gives back what the run's owner has, before the process ends; takes why, for the ledger.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    asked = _Asked()
    ours: dict[int, Any] = {signal.SIGTERM: _nothing, signal.SIGHUP: _nothing, signal.SIGINT: asked.interrupt}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # `nohup` means that
        del ours[signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in ours}
    for number in ours:
        signal.signal(number, ours[number])
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ending = _GracefulEnd(asked, threading.Event(), others, monitor, say, leave)
    thread = threading.Thread(target=ending.watch, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.over.set()
        signal.set_wakeup_fd(others)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join(5)


def _nothing(number: int, frame: Any) -> None:
    """The thread that reads the pipe knows what to do."""


@dataclass(frozen=True)
class _GracefulEnd:
    """Saves and ends the process when it is told to.

    Attributes:
        asked: what this process was told so far.
        over: set at the end of the `with` statement.
        others: file descriptor for signals of whoever had asked for them before, -1 for none.
        monitor, say, leave: as of `saving_first`.
    """

    asked: _Asked
    over: threading.Event
    others: int
    monitor: MonitorClient
    say: Callable[[str], None]
    leave: Callable[[str], None]

    def watch(self, reader: int) -> None:
        """Read signals from a pipe, which is closed at the end."""
        with open(reader, "rb", buffering=0) as pipe:
            while not self.over.is_set():
                if not select.select([pipe], [], [], _END_SECONDS)[0]:
                    continue
                numbers = pipe.read(64)
                if not numbers:
                    return
                if self.others != -1:
                    with contextlib.suppress(OSError):
                        os.write(self.others, numbers)
                for number in numbers:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        if number not in (*_NAMES, signal.SIGINT):
            return
        if self.asked.first is None:
            self.asked.first = number
            threading.Thread(target=self._end, args=(number,), daemon=True).start()
        elif number != signal.SIGINT:
            os._exit(128 + number)

    def _end(self, number: int) -> None:
        said = _NAMES.get(signal.Signals(number), _INTERRUPTED)
        saved: bool | None = False
        # Whatever goes wrong on the way, the process that was told to end does.
        with contextlib.suppress(Exception, SystemExit):
            self.say(f"{said}: saving first" + ("; once more to leave at once" if number == signal.SIGINT else ""))
        with contextlib.suppress(Exception):
            saved = save(self.monitor)
        self.asked.is_saved = True
        if self.over.is_set():
            return  # the run has come to its end meanwhile, and so does this process
        result = "saved" if saved else "not saved" if saved is False else "no workers train that could save"
        if number == signal.SIGINT:
            with contextlib.suppress(Exception, SystemExit):
                self.say(f"{said}: {result}")
            os.kill(os.getpid(), signal.SIGINT)  # which the main thread takes for what it is
            return
        try:
            with contextlib.suppress(Exception, SystemExit):
                self.leave(f"{said}, {result}")
            # The last line: what the workers said until now, and a status, come before it.
            with contextlib.suppress(Exception, SystemExit):
                self.say(f"{said}: {result}; the same command goes on from the last checkpoint")
        finally:
            os._exit(128 + number)


def saved_before(monitor: MonitorClient, loss: Loss, leave: Callable[[str], None]) -> str:
    """Have the ranks that live save, because something has died that this process needs; what to say of it.

    Args:
        monitor: the driver's.
        loss: what has died.
        leave: as of `saving_first`.
    """
    saved = loss.is_reachable and save(monitor, LOST_SECONDS)
    said = "the workers saved first" if saved else "the workers could not save any more"
    leave(f"{loss.text}, {said}")
    return said


def save(
    monitor: MonitorClient, seconds: float = SAVE_SECONDS, clock: Callable[[], float] = time.monotonic
) -> bool | None:
    """Have the ranks save and wait: whether they could, or None where nobody trains.

    Args:
        monitor: the driver's.
        seconds: to wait at most.
    """
    deadline = clock() + seconds

    def left() -> float:
        return max(0.0, deadline - clock())

    try:
        ticket = monitor.park(seconds)
        while clock() < deadline:
            answer, group, wanted = monitor.saving(ticket, left())
            if answer is not None:
                return bool(answer)
            if all(sighting.beat.activity is Activity.START for sighting in group):  # also where there is none
                return None
            if wanted != ticket:  # a resize has come between
                ticket = monitor.park(left())
            time.sleep(_LOOK_SECONDS)
    except ray.exceptions.RayError:
        pass
    return False
