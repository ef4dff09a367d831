"""Signals, daemon threads and standard error of a process, and the import of TensorFlow."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str = "raytf-save") -> Future[T]:
    """Run in a daemon thread of its own: one that hangs holds up neither the next one nor the end of the process."""
    job: Future[T] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return job


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show on a terminal what this process does, in a line that moves and disappears; nothing elsewhere.

    Args:
        text: such as `importing Ray`.
    """
    is_terminal = False
    with contextlib.suppress(ValueError, AttributeError):  # standard output is closed, or there is none
        is_terminal = sys.stdout.isatty()
    if not is_terminal or os.environ.get("TERM") == "dumb":
        yield
        return
    from rich.console import Console

    console = Console()
    with console.status(text):
        console.show_cursor(True)  # which would stay hidden if this process were killed
        yield


def load_tensorflow() -> None:
    """Import TensorFlow and Keras."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" in sys.modules:
        return
    with no_stderr(), uncollected():
        importlib.import_module("tensorflow")
        importlib.import_module("keras")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without the cyclic garbage collector, for which there is nothing to find, neither now nor later: of the 3
    to 4 seconds that TensorFlow takes, it has a fifth, and of the tracing of a step after that a third.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Hide everything that this process writes to standard error, whoever writes it."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


@contextmanager
def signal_handler(
    handler: Callable[[int, Any], None], numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """Have signals call the handler while the `with` statement lasts; in the main thread alone."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class EndingSignal:
    """The signal that has ended a command, other than Ctrl-C."""

    number: signal.Signals | None = None

    @property
    def code(self) -> int:
        """The exit code; that of Ctrl-C if it was no other signal."""
        return 128 + (self.number or signal.SIGINT)


@contextmanager
def as_interrupts(ending: EndingSignal) -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt while the `with` statement lasts, where nobody else handles or
    ignores them; the second of them ends the process. In the main thread alone.

    Ray lets no other exception of a handler through.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if ending.number is not None:
            os._exit(ending.code)
        ending.number = signal.Signals(number)
        raise KeyboardInterrupt

    both = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in both:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in both:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back until the `with` statement is over; the second of them ends the process.

    What a handler raises must not pass through native code that calls Python, as Ray's start does: that aborts the
    process. In the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)

    all_three = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        with signal_handler(note, [n for n in all_three if signal.getsignal(n) is not signal.SIG_IGN]):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def process_start(pid: int) -> str | None:
    """Return when a live process of this machine started (ticks since boot), or None; a pid alone is used again."""
    try:
        with open(f"/proc/{int(pid)}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def process_age() -> float:
    """Return how many seconds this process lives; no change of the machine's clock matters."""
    ticks = int(process_start(os.getpid()) or 0)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
