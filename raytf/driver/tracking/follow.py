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
#: In place of a flag.
OWN_CALLBACKS = "callbacks"
#: Seconds between two looks at what is committed, and how much longer than a look took the next one is waited for.
_SECONDS, _TIMES = 5.0, 10.0


class Following:
    """A tracker that follows a run.

    Args:
        flag: of the tracker; `OWN_CALLBACKS` for those of the program.
        say: takes a line for the user about trouble.
    """

    def __init__(self, run: Storage, tracker: Tracker, flag: str, say: Callable[[str], None]):
        self._run, self._tracker, self._flag, self._say = run, tracker, flag, say
        self._name = "the tracker's callback" if flag == OWN_CALLBACKS else f"--track {flag}"
        self._lock = threading.Lock()
        self._known_steps: dict[str, int] = {}
        self._has_trouble = False
        #: The newest checkpoint at the last look.
        self._newest: list[str] = []

    def open(self, config: TrainConfig) -> None:
        """Open the run, or raise a ConfigError if the tracker refuses."""
        try:
            self._tracker.open(trackers.read_known(self._run).key, name_of(self._run), parameters(config))
        except RaytfError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._name}: {type(error).__name__}: {one_line(error, 300)}. Set it up as its own guide says, or "
                "leave it out."
            ) from error

    def advance(self, always: bool = True) -> None:
        """Report what is new. Trouble is shown once, and the report repeated the next time.

        Args:
            always: read the steps even if there is no new checkpoint.
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
            except Exception as error:  # of the tracker's library, or of its server
                self._trouble(error, "it is tried again")
                self._known_steps.clear()  # it may have some of the points

    def finish(self) -> None:
        """Report the rest of a run that has ended, with its page and its model."""
        self.advance()
        try:
            self._tracker.keep(_artifacts(self._run))
        except Exception as error:
            self._trouble(error, "it has no report and no model of this run")
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
    """Report the run to trackers during the `with` statement. The run has finished if nothing is raised in it.

    Args:
        run: its folder, with the lease held.
        say: takes a line about trouble with a tracker, which does not stop the run.
        own: the program's callbacks of trackers.

    Raises:
        ConfigError: a tracker refuses at the start.
    """
    flag = config.run.track
    following = [] if flag is None else [Following(run, _made(flag, run), flag, say)]
    following += [] if own is None else [Following(run, own, OWN_CALLBACKS, say)]
    with contextlib.ExitStack() as opened:
        for tracker in following:
            tracker.open(config)
            opened.callback(tracker.close, False)  # should the next one refuse
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
    """Return whether all trackers have received the run to its end: that of the flag, and the program's callbacks."""
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
    """Return the name of a run for people; that of a program's n-th `fit` is NAME/n."""
    *_, before, last = ["", *run.locate("").rstrip("/").split("/")]
    return f"{before}/{last}" if last.isdecimal() and before else last


def parameters(config: TrainConfig) -> dict[str, str]:
    """Return the settings by the names of their flags, without those that say where to keep and show a run."""
    sections = config.settings
    return {name: str(value) for name, value in config.values.items() if sections[name] != "run" and value is not None}


def _artifacts(run: Storage) -> dict[str, bytes]:
    page = draw(history.load(run.uri), run_log.read_steps(run.uri)).encode("utf-8", "backslashreplace")
    model = run.get_or_none(_MODEL_FILE)
    return {"report.html": page} | ({} if model is None else {_MODEL_FILE: model})
