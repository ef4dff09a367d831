"""Helpers for a process: signals, daemon threads, standard error, its age, and the import of TensorFlow."""

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
    """Run work in a new daemon thread. If it hangs, it blocks neither later work nor the exit of the process."""
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
    """Show a spinner with a text on a terminal during the `with` block; show nothing elsewhere.

    Args:
        text: what this process does, such as `importing Ray`.
    """
    is_terminal = False
    with contextlib.suppress(ValueError, AttributeError):  # standard output is closed or missing
        is_terminal = sys.stdout.isatty()
    if not is_terminal or os.environ.get("TERM") == "dumb":
        yield
        return
    from rich.console import Console

    console = Console()
    with console.status(text):
        console.show_cursor(True)  # otherwise it stays hidden if this process is killed
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
    """Disable the cyclic garbage collector during an import, and keep it away from the imported objects later.

    The collector would find nothing, but take a fifth of the 3 to 4 seconds of importing TensorFlow, and a third of the
    time to trace a step after that.
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
    """Hide everything that this process writes to standard error, including the output of native code."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
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
    """Handle signals with `handler` during the `with` block; call this only in the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class EndingSignal:
    """The signal other than Ctrl-C that ended a command, if any."""

    number: signal.Signals | None = None

    @property
    def code(self) -> int:
        """Return the exit code for the signal; without one, that of Ctrl-C."""
        return 128 + (self.number or signal.SIGINT)


@contextmanager
def as_interrupts(ending: EndingSignal) -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP during the `with` block, unless they are handled or ignored
    already. A second signal ends the process. In threads other than the main thread, this does nothing.

    Ray does not propagate any other exception that a signal handler raises.
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
    """Delay SIGINT, SIGTERM and SIGHUP until the end of the `with` block; a second signal ends the process.

    An exception that a handler raises aborts the process if it passes through native code that calls Python, as Ray's
    start does. In threads other than the main thread, this does nothing.
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
    """Return when a live local process started (ticks since boot), or None. With the pid, it identifies the process."""
    try:
        with open(f"/proc/{int(pid)}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def process_age() -> float:
    """Return this process's age in seconds, regardless of changes to the machine's clock."""
    ticks = int(process_start(os.getpid()) or 0)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
