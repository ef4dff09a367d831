"""Saves before the driver exits on SIGTERM (`ray job stop`, the end of a pod), SIGHUP (a closed terminal) or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from raytf.cluster.ray_watch import Loss
from raytf.config import program
from raytf.training.process.heartbeat_types import Activity
from raytf.training.process.monitor_client import MonitorClient

#: Seconds that a save may take. The sender of the signal may wait for less time: Ray waits 3 s.
SAVE_SECONDS = 120.0
#: Seconds that a save may take if Ray is lost.
LOST_SECONDS = 7.5
#: Seconds to wait for the step of a save.
_DURABLE_SECONDS = 2.0
#: Seconds between two checks for the answer to a save.
_LOOK_SECONDS = 0.02
#: Seconds between two checks whether the `with` statement is over.
_END_SECONDS = 1.0
#: Descriptions of the signals.
_NAMES = {signal.SIGTERM: "told to stop (SIGTERM)", signal.SIGHUP: "the terminal was closed (SIGHUP)"}
_INTERRUPTED = "interrupted"


@contextlib.contextmanager
def saving_first(monitor: MonitorClient, say: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """Make the ranks save on SIGTERM, SIGHUP and SIGINT inside the `with` statement.

    After the save, SIGTERM and SIGHUP end the process, and SIGINT raises KeyboardInterrupt. A second signal does not
    wait for the save. A SIGHUP that is ignored stays ignored.

    A thread reads signals from a pipe, because the main thread waits for Ray, which lets it handle signals only once a
    second. Outside the main thread, this function changes nothing.

    Args:
        leave: called before the process exits, with the reason for the ledger; writes remaining records and releases
            the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ending = _GracefulEnd(monitor, say, leave)
    ours: dict[int, Any] = {signal.SIGTERM: _nothing, signal.SIGHUP: _nothing, signal.SIGINT: ending.interrupt}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as `nohup` does
        del ours[signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in ours}
    for number in ours:
        signal.signal(number, ours[number])
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=ending.watch, args=(reader, others), daemon=True)
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
    """Do nothing: the thread that reads the pipe acts on the signal."""


class _GracefulEnd:
    """Saves and ends the process when a signal arrives. `over` is set at the end of the `with` statement."""

    def __init__(self, monitor: MonitorClient, say: Callable[[str], None], leave: Callable[[str], None]):
        self._monitor, self._say, self._leave = monitor, say, leave
        self.over = threading.Event()
        #: The first signal, how often Ctrl-C was pressed, and whether the save is over, successful or not.
        self._first: int | None = None
        self._interrupts, self._is_saved = 0, False

    def interrupt(self, number: int, frame: Any) -> None:
        """Handle Ctrl-C in the main thread, which has called `fit`."""
        self._interrupts += 1
        if self._interrupts > 1 or self._is_saved:
            raise KeyboardInterrupt

    def watch(self, reader: int, others: int) -> None:
        """Read signals from a pipe until it is closed, and copy them to the descriptor `others`, unless it is -1."""
        with open(reader, "rb", buffering=0) as pipe:
            while not self.over.is_set():
                if not select.select([pipe], [], [], _END_SECONDS)[0]:
                    continue
                numbers = pipe.read(64)
                if not numbers:
                    return
                if others != -1:
                    with contextlib.suppress(OSError):
                        os.write(others, numbers)
                for number in numbers:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        if number not in (*_NAMES, signal.SIGINT):
            return
        if self._first is None:
            self._first = number
            threading.Thread(target=self._end, args=(number,), daemon=True).start()
        elif number != signal.SIGINT:
            os._exit(128 + number)

    def _end(self, number: int) -> None:
        reason = _NAMES.get(signal.Signals(number), _INTERRUPTED)
        saved: bool | None = False
        # The process must exit even if something goes wrong here.
        with contextlib.suppress(Exception, SystemExit):
            self._say(
                f"{reason}: saving first" + ("; Ctrl-C again to leave at once" if number == signal.SIGINT else "")
            )
        step = None
        with contextlib.suppress(Exception):
            saved = save(self._monitor)
            step = self._monitor.durable(_DURABLE_SECONDS) if saved else None
        self._is_saved = True
        if self.over.is_set():
            return  # the run has finished, and this process exits anyway
        result = "no workers were training" if saved is None else "saved" if saved else "not saved"
        result += f" step {step}" if step else ""
        if number == signal.SIGINT:
            with contextlib.suppress(Exception, SystemExit):
                self._say(f"{reason}: {result}")
            if self._interrupts == 1:  # else the main thread is leaving already, and must not be interrupted there
                os.kill(os.getpid(), signal.SIGINT)  # now the main thread raises KeyboardInterrupt
            return
        try:
            with contextlib.suppress(Exception, SystemExit):
                self._leave(f"{reason}, {result}")
            # The last line, after the workers' messages and the last status.
            with contextlib.suppress(Exception, SystemExit):
                self._say(f"{reason}: {result}; {program.from_last_checkpoint()}")
        finally:
            os._exit(128 + number)


def saved_before(monitor: MonitorClient, loss: Loss, leave: Callable[[str], None]) -> str:
    """Make the living ranks save after a loss that ends this process, and return the outcome in words."""
    saved = loss.is_reachable and save(monitor, LOST_SECONDS)
    outcome = "the workers saved first" if saved else "the workers could no longer save"
    leave(f"{loss.text}, {outcome}")
    return outcome


def save(
    monitor: MonitorClient, seconds: float = SAVE_SECONDS, clock: Callable[[], float] = time.monotonic
) -> bool | None:
    """Make the ranks save, wait for the save, and return whether it succeeded; None if no workers are training."""
    deadline = clock() + seconds

    def left() -> float:
        return max(0.0, deadline - clock())

    try:
        ticket = monitor.park(seconds, is_stop=True)
        while clock() < deadline:
            answer, group, wanted = monitor.saving(ticket, left())
            if answer is not None:
                return bool(answer)
            if all(sighting.beat.activity is Activity.START for sighting in group):  # also if there is no group
                return None
            if wanted != ticket:  # a resize has replaced the request
                ticket = monitor.park(left(), is_stop=True)
            time.sleep(_LOOK_SECONDS)
    except ray.exceptions.RayError:
        pass
    return False
