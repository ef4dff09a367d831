"""What the driver does beside Ray Train: it listens to the workers, writes the ledger, and shows the run's figures."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf.config.command_line import EXIT_AGAIN
from raytf.driver import crash_safe_memory
from raytf.driver.monitor.actor import Monitor
from raytf.errors import StorageError, one_line
from raytf.runs import ledger, metrics, timeline
from raytf.runs.display import Display
from raytf.runs.events import Driver, RunEvent
from raytf.runs.lease import Lease
from raytf.runs.metrics import Metrics, RunFigures
from raytf.runs.status import Status, StatusFile
from raytf.storage.storage import Storage
from raytf.training.monitor_client import MonitorClient

#: Between two looks at what the monitor has heard, and for an answer.
_POLL_SECONDS, _READ_SECONDS, _LAST_READ_SECONDS = 0.3, 30.0, 5.0
#: A driver that is killed loses so much of the ledger.
_FLUSH_SECONDS = 3.0


class RunLedger(ledger.Ledger):
    """The ledger of this driver, and the figures of the run."""

    def __init__(self, run: Storage):
        super().__init__(run)
        self.figures = RunFigures()
        self._has_earlier = False

    def add(self, events: Iterable[ledger.Event]) -> None:
        events = list(events)
        super().add(events)
        self.figures.add(events)

    def note(self, event: RunEvent) -> None:
        """Add what this process itself sees happen, now."""
        self.add([{"time": time.time(), "kind": event.kind, **event.fields()}])

    def read_earlier(self) -> None:
        """Take what the drivers before this one wrote into the figures, where storage lets."""
        if not self._has_earlier:
            self._has_earlier = True
            with contextlib.suppress(StorageError):
                self.figures.update(ledger.read(self._run, before=self.name))


@contextlib.contextmanager
def _beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread as long as the `with` statement lasts, and 5 s more at most; the event tells it to end."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)


@contextlib.contextmanager
def booked(run: Storage) -> Iterator[RunLedger]:
    """A ledger that is written every few seconds, beside all else, from now to the end of this driver."""
    book = RunLedger(run)
    book.note(Driver("started", os.getpid(), socket.gethostname()))

    def write(stop: threading.Event) -> None:
        while not stop.wait(_FLUSH_SECONDS):
            book.flush()

    try:
        with _beside("raytf-ledger", write):
            try:
                yield book
            except BaseException as error:
                book.note(Driver("ended", outcome="failed", why=one_line(error, 300) or type(error).__name__))
                raise
    finally:
        book.flush()


def add_times(document: dict[str, Any], run: Storage, book: RunLedger) -> None:
    """Where the run's time went, and its goodput; not where the ledger cannot be read."""
    book.flush()
    with contextlib.suppress(StorageError):
        seconds = timeline.account(timeline.timeline(ledger.read(run)))
        document["seconds"] = seconds
        document["goodput"] = timeline.goodput(seconds)


@contextlib.contextmanager
def monitoring(attempts: Sequence[str]) -> Iterator[MonitorClient]:
    """A Monitor, which ends with the `with` statement. Where its process dies before, it comes back as it
    was within a second or two; calls wait for that.

    Args:
        attempts: names of the run's starts of worker groups so far.
    """
    # On the driver's node: on another one it could die while the run lives, and would not find what it knew.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made = ray.remote(Monitor).options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
    with crash_safe_memory.held() as known:
        actor: Any = made.remote(list(attempts), memo=known, call=_task, is_another=_is_another)
        try:
            yield MonitorClient(actor)
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)  # keepers hold a handle of it, and end a minute after it


def _task() -> str:
    """The same for a call that Ray sends again."""
    return ray.get_runtime_context().get_task_id() or ""


def _is_another() -> bool:
    """Whether Ray has started this actor again."""
    return ray.get_runtime_context().was_current_actor_reconstructed


class MonitorReader:
    """Reads a Monitor: everything once, whatever becomes of a question or of the Monitor's process.

    Args:
        monitor: that it reads.
        book: the ledger, to which its events go.
    """

    def __init__(self, monitor: MonitorClient, book: RunLedger):
        self._monitor, self._book = monitor, book
        self._lock = threading.Lock()
        self._told = self._noted = 0

    def read(self, seconds: float) -> tuple[Status | None, list[str]]:
        """The latest status, and what was said since the last time.

        Raises:
            RayError: no answer within this many seconds.
        """
        if not self._lock.acquire(timeout=seconds):
            raise ray.exceptions.GetTimeoutError("somebody else reads")
        try:
            status, messages, events = self._monitor.ask_news(self._told, self._noted).answer(seconds)
            self._told, self._noted = self._told + len(messages), self._noted + len(events)
            self._book.add(events)
            return status, messages
        finally:
            self._lock.release()


@contextlib.contextmanager
def listening(ear: MonitorReader, display: Display, status_file: StatusFile, lease: Lease) -> Iterator[None]:
    """What workers and controller say reaches the user, the status file and the ledger."""

    def show(seconds: float = _READ_SECONDS) -> None:
        status, messages = ear.read(seconds)
        if status is not None:
            status_file.show(status)
        # Who reads the output may have gone (`| head`), which rich takes for the end of the program.
        with contextlib.suppress(OSError, SystemExit):
            for message in messages:
                display.say(message)
            if status is not None:
                display.show(status)

    def watch(stop: threading.Event) -> None:
        while not stop.wait(_POLL_SECONDS):
            with contextlib.suppress(ray.exceptions.RayError):
                show()
            if lease.lost.is_set():
                with contextlib.suppress(OSError, SystemExit):
                    display.say("error: another process took this run over while this one was suspended; stopping")
                    sys.stdout.flush()
                os._exit(EXIT_AGAIN)

    try:
        with _beside("raytf-progress", watch):
            yield
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            show(_LAST_READ_SECONDS)


@contextlib.contextmanager
def exported(run: str, monitor: MonitorClient, book: RunLedger) -> Iterator[None]:
    """Ray's metrics and TensorBoard get the run's figures every few seconds; beside the watch, which never waits."""

    def export(stop: threading.Event) -> None:
        book.read_earlier()
        if stop.is_set():  # storage took its time, and the connection to Ray is another one by now
            return
        shown = Metrics(run, book.figures)
        while True:
            shown.show()
            with contextlib.suppress(ray.exceptions.RayError):
                monitor.measure({"goodput": book.figures.goodput, "restarts": float(book.figures.restarts)})
            if stop.wait(metrics.SECONDS):
                break
        shown.show()

    with _beside("raytf-metrics", export):
        yield
