"""The driver's work besides Ray Train: read the monitor, write the ledger, and export the run's figures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytf
from raytf.checkpoint.invalidated_states import VoidStates
from raytf.config.command_line import EXIT_AGAIN
from raytf.config.train_config import TrainConfig
from raytf.driver.monitor import actor as monitor_actor
from raytf.driver.monitor.actor import Monitor
from raytf.errors import StorageError, one_line
from raytf.runs import ledger, metrics, timeline
from raytf.runs.display import Display
from raytf.runs.events import INTERRUPTED, Driver, RunEvent
from raytf.runs.lease import Lease
from raytf.runs.metrics import Metrics, RunFigures
from raytf.runs.program_output import Explained, ProgramOutput
from raytf.runs.status import Status, StatusFile
from raytf.storage.storage import Storage
from raytf.training.process.monitor_client import MonitorClient

#: Seconds between two reads of the monitor.
_POLL_SECONDS = 0.3
#: Seconds to wait for the monitor's reply, during the run and at its end.
_READ_SECONDS, _LAST_READ_SECONDS = 30.0, 5.0
#: Seconds between two signs of life in the run's folder, for people who watch the run from another machine.
_SIGN_SECONDS = 1.0
#: Seconds between two writes of the ledger. A driver that is killed loses the events since the last write.
_FLUSH_SECONDS = 3.0


class RunLedger(ledger.Ledger):
    """The ledger of this driver, with the figures of the run.

    Attributes:
        clock: the clock that times all events.
    """

    def __init__(self, run: Storage, term: int):
        super().__init__(run, ledger.name_of(term))
        self.clock = ledger.EventClock.of_now()
        self.figures = RunFigures(self.clock)
        self._has_earlier = False
        #: The latest status, and the time when it arrived: None once a sign of life has reported the status.
        self._status: Status | None = None
        self._heard: float | None = None

    def add(self, events: Iterable[ledger.Event]) -> None:
        events = list(events)
        super().add(events)
        self.figures.add(events)

    def show(self, status: Status) -> None:
        """Keep the latest status for the next sign of life, unless it equals the status before it."""
        if status != self._status:
            self._status, self._heard = status, self.clock()

    def sign_latest(self) -> None:
        """Write a sign of life if a new status has arrived since the last one."""
        heard, self._heard = self._heard, None
        if heard is not None and self._status is not None:
            self.sign({"time": heard, "kind": "progress", **self._status.row()})

    def note(self, event: RunEvent) -> None:
        """Add an event that this process itself observes, with the current time."""
        self.add([{"time": self.clock(), "kind": event.kind, **event.fields()}])

    def read_earlier(self) -> None:
        """Add the events of the run's earlier drivers to the figures, once, if storage can be read."""
        if not self._has_earlier:
            self._has_earlier = True
            with contextlib.suppress(StorageError):
                self.figures.update(ledger.read(self._run, before=self.name))


@contextlib.contextmanager
def _in_background(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread during the `with` statement. Then set the event to stop it, and wait up to 5 s."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)


@contextlib.contextmanager
def booked(run: Storage, config: TrainConfig, term: int) -> Iterator[RunLedger]:
    """Keep a ledger, written every few seconds in the background, until the `with` statement ends.

    Args:
        config: the settings of the run; the first event records those that differ from their defaults.
        term: the term of this driver; see `ledger.latest_term`.
    """
    book = RunLedger(run, term)
    book.note(Driver("started", os.getpid(), socket.gethostname(), settings=config.changed, versions=_versions()))

    def write(stop: threading.Event) -> None:
        flushed = time.monotonic()
        while not stop.wait(_SIGN_SECONDS):
            if time.monotonic() - flushed >= _FLUSH_SECONDS:
                book.flush()
                flushed = time.monotonic()
            book.sign_latest()

    try:
        with _in_background("raytf-ledger", write):
            try:
                yield book
            except KeyboardInterrupt:
                book.note(Driver("ended", outcome="stopped", why=INTERRUPTED))
                raise
            except BaseException as error:
                book.note(Driver("ended", outcome="failed", why=one_line(error, 300) or type(error).__name__))
                raise
    finally:
        book.flush()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "raytf": raytf.__version__}
    for package in ("ray", "tensorflow", "keras", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # TensorFlow's builds have several names
            versions[package] = importlib.metadata.version(package)
    return versions


def add_times(document: dict[str, Any], run: Storage, book: RunLedger) -> None:
    """Add the run's duration, its time by category, its goodput and its speed, unless the ledger cannot be read."""
    book.flush()
    document["samples_per_second"] = 0.0
    with contextlib.suppress(StorageError):
        spans = timeline.timeline(ledger.read(run))
        seconds = timeline.account(spans)
        records = document["samples"] / document["steps"] if document["steps"] else 0.0  # per step, on average
        document["samples_per_second"] = timeline.steps_per_second(spans) * records
        document["seconds"] = seconds
        document["wall_seconds"] = sum(seconds.values())
        document["goodput"] = timeline.goodput(seconds)


@contextlib.contextmanager
def monitoring(
    attempts: Sequence[str], void: VoidStates | None = None, epoch: Callable[[], float] = time.time
) -> Iterator[MonitorClient]:
    """Run a Monitor until the `with` statement ends. If its process dies earlier, Ray restarts it with the same
    state within a second or two; calls wait for the restart.

    Args:
        attempts: names of the run's worker groups so far.
        void: states of the run that are no longer valid.
        epoch: the clock that times events, in seconds since the epoch.
    """
    # Keep it on the driver's node: on another node it could die while the run continues, and lose its state.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made = ray.remote(Monitor).options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
    with monitor_actor.held() as known:
        states = [] if void is None else void.plain()
        options = {"epoch": epoch, "memo": known, "call": _task, "is_another": _is_another, "void": states}
        actor: Any = made.remote(list(attempts), **options)
        try:
            yield MonitorClient(actor)
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)  # keepers hold a handle to it, and exit a minute after it


def _task() -> str:
    """Return Ray's ID of the current task. A call that Ray retries keeps its ID."""
    return ray.get_runtime_context().get_task_id() or ""


def _is_another() -> bool:
    return ray.get_runtime_context().was_current_actor_reconstructed


class MonitorReader:
    """Reads each message and event of a Monitor exactly once, even if a call fails or the Monitor's process dies.

    Args:
        book: the ledger to which events are added.
    """

    def __init__(self, monitor: MonitorClient, book: RunLedger):
        self._monitor, self._book = monitor, book
        self._lock = threading.Lock()
        self._received = self._noted = 0

    def read(self, seconds: float) -> tuple[Status | str, list[str | ProgramOutput]]:
        """Return the latest status (or the stage, until there is a status), and the messages since the last call.

        Args:
            seconds: how long to wait for an answer.

        Raises:
            RayError: no answer arrived in this time.
        """
        if not self._lock.acquire(timeout=seconds):
            raise ray.exceptions.GetTimeoutError("another thread is reading the monitor")
        try:
            status, messages, events = self._monitor.ask_news(self._received, self._noted).answer(seconds)
            self._received, self._noted = self._received + len(messages), self._noted + len(events)
            self._book.add(events)
            if isinstance(status, Status):
                self._book.show(status)
            return status, messages
        finally:
            self._lock.release()


@contextlib.contextmanager
def listening(reader: MonitorReader, display: Display, status_file: StatusFile, lease: Lease) -> Iterator[None]:
    """Forward the reports of the workers and the controller to the user, the status file and the ledger."""

    def show(seconds: float = _READ_SECONDS) -> None:
        status, messages = reader.read(seconds)
        if isinstance(status, Status):
            status_file.show(status)
        # The reader of the output may have exited (`| head`); rich then raises SystemExit.
        with contextlib.suppress(OSError, SystemExit):
            for message in messages:
                _deliver(message, display)
            if isinstance(status, Status):
                display.show(status)
            elif status:
                display.stage(status)

    def watch(stop: threading.Event) -> None:
        while not stop.wait(_POLL_SECONDS):
            with contextlib.suppress(ray.exceptions.RayError):
                show()
            if lease.lost.is_set():
                with contextlib.suppress(OSError, SystemExit):
                    display.say("error: another process took over this run while this one was suspended; stopping")
                    sys.stdout.flush()
                os._exit(EXIT_AGAIN)

    display.stage("starting the run's controller")
    try:
        with _in_background("raytf-progress", watch):
            yield
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            show(_LAST_READ_SECONDS)


#: Topics that this process has already explained.
_explained: set[str] = set()


def _deliver(message: str | ProgramOutput, display: Display) -> None:
    """Show a message of raytf, or deliver output and warnings of the program's own code in this process."""
    if isinstance(message, Explained):
        if message.topic in _explained:
            return
        _explained.add(message.topic)
    if isinstance(message, str):
        display.say(message)
        return
    try:
        message.deliver()
    except Warning as error:  # a warning filter that was set during the run turns it into an error
        display.say(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def exported(run: str, monitor: MonitorClient, book: RunLedger) -> Iterator[None]:
    """Export the run's figures to Ray's metrics and TensorBoard every few seconds, in a thread of its own, since this
    may wait for storage."""

    def export(stop: threading.Event) -> None:
        book.read_earlier()
        if stop.is_set():  # reading took so long that the connection to Ray may have changed
            return
        shown = Metrics(run, book.figures)
        while True:
            shown.show()
            with contextlib.suppress(ray.exceptions.RayError):
                monitor.measure({"goodput": book.figures.goodput, "restarts": float(book.figures.restarts)})
            if stop.wait(metrics.SECONDS):
                break
        shown.show()

    with _in_background("raytf-metrics", export):
        yield
