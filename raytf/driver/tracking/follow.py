"""Report a run to trackers while it trains, in the background, and at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from raytf.checkpoint import manifest
from raytf.config.train_config import TrainConfig
from raytf.driver.tracking import trackers
from raytf.driver.tracking.trackers import CallbackTracker, Tracker, committed, unknown
from raytf.errors import ConfigError, RaytfError, one_line
from raytf.runs import history, run_log
from raytf.runs.report.page import draw
from raytf.storage.storage import Storage

_MODEL_FILE = "model.keras"
#: Used in place of a flag for the program's own tracker callbacks.
OWN_CALLBACKS = "callbacks"
#: Seconds between two reports. If a report takes long, the wait is this many times the report's duration.
_SECONDS, _TIMES = 5.0, 10.0


class Following:
    """A tracker that follows a run.

    Args:
        flag: flag of the tracker; `OWN_CALLBACKS` for the program's callbacks.
        say: prints a line for the user about a problem.
    """

    def __init__(self, run: Storage, tracker: Tracker, flag: str, say: Callable[[str], None]):
        self._run, self._tracker, self._flag, self._say = run, tracker, flag, say
        self._name = "the tracker's callback" if flag == OWN_CALLBACKS else f"--track {flag}"
        self._lock = threading.Lock()
        self._known_steps: dict[str, int] = {}
        self._has_trouble = False
        #: The newest checkpoint at the last report.
        self._newest: list[str] = []

    def open(self, config: TrainConfig) -> None:
        """Open the run, or raise a ConfigError if the tracker refuses."""
        try:
            self._tracker.open(trackers.read_known(self._run).key, name_of(self._run), parameters(config))
        except RaytfError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._name}: {type(error).__name__}: {one_line(error, 300)}. Set it up as its documentation "
                "describes, or leave it out."
            ) from error

    def advance(self, always: bool = True) -> None:
        """Report new points. A problem is shown once, and the report is repeated the next time.

        Args:
            always: whether to read the steps even if there is no new checkpoint.
        """
        with self._lock:
            try:
                newest = manifest.list_complete(self._run)[:1]
                if newest == self._newest and not always and not self._has_trouble:
                    return
                self._newest = newest
                points = committed(self._run)
                names = {name for point in points for name in point.values} - self._known_steps.keys()
                if names:
                    last_steps = self._tracker.last_steps(names)
                    self._known_steps.update({name: last_steps.get(name, 0) for name in names})
                new = unknown(points, self._known_steps)
                if new:
                    self._tracker.tell(new)
                    self._known_steps.update({name: point.step for point in new for name in point.values})
                self._has_trouble = False
            except Exception as error:  # raised by the tracker's library or its server
                self._trouble(error, "retrying later")
                self._known_steps.clear()  # the tracker may already have some of the points

    def finish(self) -> None:
        """Report the rest of a run that has finished, with its report page and its model."""
        self.advance()
        try:
            self._tracker.keep(_artifacts(self._run))
        except Exception as error:
            self._trouble(error, "the report and the model of this run may be missing there")
        if not self._has_trouble:
            before = trackers.read_known(self._run)
            dataclasses.replace(before, complete=tuple(sorted({*before.complete, self._flag}))).write(self._run)

    def close(self, is_finished: bool) -> None:
        try:
            self._tracker.close(is_finished)
        except Exception as error:
            self._trouble(error, "its run may be left open")

    def _trouble(self, error: Exception, then: str) -> None:
        if not self._has_trouble:
            self._has_trouble = True
            self._say(f"{self._name}: {type(error).__name__}: {one_line(error, 200)}; {then}")


@contextlib.contextmanager
def tracked(
    config: TrainConfig, run: Storage, say: Callable[[str], None], own: CallbackTracker | None = None
) -> Iterator[None]:
    """Report the run to trackers during the `with` statement. The run counts as finished if no error is raised in it.

    Args:
        run: the run's folder, with the lease held.
        say: prints a line about a problem with a tracker, which does not stop the run.
        own: the program's own tracker callbacks.

    Raises:
        ConfigError: a tracker could not be opened.
    """
    flag = config.run.track
    following = [] if flag is None else [Following(run, _made(flag, run), flag, say)]
    following += [] if own is None else [Following(run, own, OWN_CALLBACKS, say)]
    with contextlib.ExitStack() as opened:
        for tracker in following:
            tracker.open(config)
            opened.callback(tracker.close, False)  # in case the next tracker cannot be opened
        opened.pop_all()
    stop, is_finished = threading.Event(), False
    thread = threading.Thread(target=_follow, args=(following, stop), name="raytf-track", daemon=True)
    if following:
        thread.start()
    try:
        yield
        is_finished = True
    finally:
        stop.set()
        if following:
            thread.join()
        for tracker in following:
            if is_finished:
                tracker.finish()
            else:
                tracker.advance()
            tracker.close(is_finished)


def has_all(config: TrainConfig, run: Storage, own: CallbackTracker | None = None) -> bool:
    """Return whether the tracker of the flag and the program's callbacks have received the whole run."""
    wanted = {flag for flag in (config.run.track, None if own is None else OWN_CALLBACKS) if flag is not None}
    return not wanted or wanted <= set(trackers.read_known(run).complete)


def _follow(following: Sequence[Following], stop: threading.Event) -> None:
    taken = 0.0
    while not stop.wait(max(_SECONDS, _TIMES * taken)):
        began = time.monotonic()
        for tracker in following:
            tracker.advance(always=False)
        taken = time.monotonic() - began


def _made(flag: str, run: Storage) -> Tracker:
    trackers.check(flag)
    if flag == "mlflow":
        return trackers.MlflowTracker()
    if flag == "wandb":
        return trackers.WandbTracker()
    return trackers.TensorBoardTracker(run) if flag == "tensorboard" else trackers.FileTracker(flag)


def name_of(run: Storage) -> str:
    """Return the name of a run for people, which is NAME/n for a program's n-th `fit`."""
    *_, before, last = ["", *run.locate("").rstrip("/").split("/")]
    return f"{before}/{last}" if last.isdecimal() and before else last


def parameters(config: TrainConfig) -> dict[str, str]:
    """Return the settings by the names of their flags, except those on where to keep and show a run."""
    sections = config.settings
    return {name: str(value) for name, value in config.values.items() if sections[name] != "run" and value is not None}


def _artifacts(run: Storage) -> dict[str, bytes]:
    page = draw(history.load(run.uri), run_log.read_steps(run.uri)).encode("utf-8", "backslashreplace")
    model = run.get_or_none(_MODEL_FILE)
    return {"report.html": page} | ({} if model is None else {_MODEL_FILE: model})
