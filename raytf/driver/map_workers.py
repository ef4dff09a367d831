"""Runs work other than training on the cluster's workers: a function of each part, with each part counted once.

Each worker is an actor that computes one part at a time. The answer for a part depends on the part alone, never on the
worker or on how often the part was started. So the death of a worker delays the answer but does not change a bit of it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import ray

from raytf.config import terminal_text
from raytf.config.flags import WorkerSection
from raytf.config.train_config import TrainConfig
from raytf.distributed.gpu import visibility
from raytf.driver import preflight
from raytf.driver.connection import connected
from raytf.errors import ClusterError, ConfigError, JobError, RaytfError, one_line

Part = TypeVar("Part")
Answer = TypeVar("Answer")

#: If this many workers die while they compute the same part, the part is the cause.
LOSSES_OF_A_PART = 5
#: The work fails if this many workers in a row die while they start, without a part computed in between.
FRUITLESS_STARTS = 5
#: Seconds between two lines about the progress.
_LINE_SECONDS = 5.0
#: Timeout of each wait for an answer, in seconds.
_LOOK_SECONDS = 1.0


def on_workers(
    function: Callable[[Part], Answer],
    parts: Sequence[Part],
    *,
    workers: WorkerSection | str | int | None = None,
    on_answer: Callable[[int, Answer], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Compute `function(part)` for every part on Ray workers.

    A part whose worker or node is lost is computed again by another worker; its answer counts once. Workers join as the
    cluster has room for them, up to the requested number.

    Args:
        function: a function of the part alone, so a seed must be in the part. It runs in the workers' processes; the
            code that it needs must be installed there, or be in the job's own file.
        parts: the parts of the work, a few times as many as workers. Any objects that can be pickled.
        workers: the number of workers, such as 2 or "1:8"; or a WorkerSection, which also sets each worker's resources.
        on_answer: called in this process with a part's number and its answer, as answers arrive.
        say: called with lines for the user; prints them by default.

    Returns:
        The answers, in the order of the parts.

    Raises:
        JobError: the function raised an error, which ends the work at once.
        RaytfError: something is wrong; the message says in one line what, and how to fix it.
    """
    section = workers if isinstance(workers, WorkerSection) else TrainConfig(workers=workers).cluster
    section.check()
    config = TrainConfig.of(
        workers=section.workers,
        use_gpu=section.use_gpu,
        cpus_per_worker=section.cpus_per_worker,
        gpus_per_worker=section.gpus_per_worker,
        mixed_gpus=True,  # parts are not replicas of one model
    )
    say = say or partial(terminal_text.say, lines=True)
    if not len(parts):
        return []
    typed = contextlib.nullcontext() if isinstance(workers, WorkerSection) else config.named_as_typed()
    with typed, connected(config) as local:
        need = preflight.check_cluster(config, local, say)
        try:
            ray.cloudpickle.dumps(function)
            for part in parts:
                ray.cloudpickle.dumps(part)
        except Exception as error:
            raise ConfigError(
                f"the function or a part cannot be sent to the workers: {type(error).__name__}: {one_line(error, 300)}."
                " Create what cannot be pickled (open files, locks, models) inside the function."
            ) from error
        sent = ray.put(function)
        threads = max(1, int(section.cpus))
        actor = ray.remote(num_cpus=section.cpus, num_gpus=need.get("GPU", 0))(_Worker)
        options = actor.options(scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0)

        def start() -> Any:
            return options.remote(sent, threads)

        pool = _WorkerPool(start, parts, min(section.worker_range[1], len(parts)), say)
        try:
            with _interruptible():
                return pool.run(on_answer)
        finally:
            pool.dismiss()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """End the work cleanly on Ctrl-C, and on SIGTERM from `ray job stop`, where Ray's own handler would abort.

    Raises:
        KeyboardInterrupt, SystemExit: with a message for the user, or the exit code.
    """
    received: list[int] = []

    def end(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt  # the only error of a handler that Ray passes on from a call

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise KeyboardInterrupt("interrupted; the same command starts over.") from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


class _Worker:
    """A process that computes parts, one at a time."""

    def __init__(self, function: Callable[[Any], Any], threads: int):
        visibility.hide_unless_given()
        # TensorFlow and numpy read these when the function imports them.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(threads)
        self._function = function

    def ready(self) -> None:
        """Return once the process has started."""

    def compute(self, number: int, part: Any) -> Any:
        try:
            return self._function(part)
        except RaytfError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise JobError(
                f"part {number} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno}).",
                traceback.format_exc(),
            ) from None


@dataclass
class PartQueue(Generic[Answer]):
    """The parts that wait, the answers so far, and how many workers were lost with each part. Does not use Ray."""

    total: int
    waiting: collections.deque[int] = field(default_factory=collections.deque)
    losses: collections.Counter[int] = field(default_factory=collections.Counter)
    answers: dict[int, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.extend(range(self.total))

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.total

    @property
    def again(self) -> int:
        """Return how many times a part was started again."""
        return self.losses.total()

    def take(self) -> int | None:
        """Return the next part for an idle worker; None if no part waits."""
        return self.waiting.popleft() if self.waiting else None

    def done(self, number: int, answer: Answer) -> None:
        if number in self.answers:
            raise AssertionError(f"part {number} was counted already")
        self.answers[number] = answer

    def lost(self, number: int, why: str) -> None:
        """Put the part of a lost worker first in the queue, or raise an error if too many workers were lost with it."""
        self.losses[number] += 1
        if self.losses[number] >= LOSSES_OF_A_PART:
            raise ClusterError(
                f"{LOSSES_OF_A_PART} workers died while they computed part {number}; the last one: {why}. Make the "
                "parts smaller if memory runs out, or find out what ends the process."
            )
        self.waiting.appendleft(number)


class _WorkerPool:
    """Workers, `most` at a time, and the parts that they compute."""

    def __init__(self, start: Callable[[], Any], work: Sequence[Any], most: int, say: Callable[[str], None]):
        self._start, self._work, self._say = start, work, say
        self._parts: PartQueue[Any] = PartQueue(len(work))
        self._began = time.monotonic()
        self._fruitless = 0
        #: Pending reference -> (worker, its name, number of its part or None while it starts).
        self._asked: dict[Any, tuple[Any, int, int | None]] = {}
        #: The number of parts that each worker has computed, by its name. Handles as keys would keep idle workers
        #: alive.
        self._shares: collections.Counter[int] = collections.Counter()
        self._names = itertools.count()
        for _ in range(most):
            self._start_worker()

    def run(self, on_answer: Callable[[int, Any], None] | None) -> list[Any]:
        parts, reported_at = self._parts, time.monotonic()
        while not parts.is_done:
            ready, _ = ray.wait(list(self._asked), num_returns=1, timeout=_LOOK_SECONDS)
            for reference in ready:
                worker, name, number = self._asked.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise _cause(error) from None
                except ray.exceptions.RayError as error:
                    self._replace(number, one_line(error, 200))
                    continue
                if number is not None:
                    parts.done(number, answer)
                    self._fruitless = 0
                    self._shares[name] += 1
                    if on_answer is not None:
                        on_answer(number, answer)
                self._assign(worker, name)
            if time.monotonic() - reported_at >= _LINE_SECONDS and not parts.is_done:
                reported_at = time.monotonic()
                count = sum(number is not None for _, _, number in self._asked.values())
                self._say(f"{len(parts.answers)} of {parts.total} parts, {count} worker{'s' if count != 1 else ''}")
        self._say(self._summary())
        return [parts.answers[number] for number in range(parts.total)]

    def dismiss(self) -> None:
        for worker, _, _ in self._asked.values():
            ray.kill(worker)
        self._asked.clear()

    def _start_worker(self) -> None:
        worker = self._start()
        self._asked[worker.ready.remote()] = worker, next(self._names), None

    def _assign(self, worker: Any, name: int) -> None:
        number = self._parts.take()
        if number is not None:
            self._asked[worker.compute.remote(number, self._work[number])] = worker, name, number
        # A worker without a part exits here, with its last handle. A part that is computed again gets a new worker.

    def _replace(self, number: int | None, why: str) -> None:
        if number is None:
            self._fruitless += 1
            if self._fruitless >= FRUITLESS_STARTS:
                raise ClusterError(f"{FRUITLESS_STARTS} workers in a row could not start; the last one: {why}.")
        else:
            self._say(f"a worker was lost in part {number}; another one computes it")
            self._parts.lost(number, why)
        self._start_worker()

    def _summary(self) -> str:
        shares = list(self._shares.values())
        again = self._parts.again
        return (
            f"{self._parts.total} parts in {time.monotonic() - self._began:.1f} s by {len(shares)} "
            f"worker{'s' if len(shares) != 1 else ''} ({', '.join(map(str, shares))})"
            + (f"; {again} started again after a worker was lost" if again else "")
        )


def _cause(error: ray.exceptions.RayTaskError) -> RaytfError:
    inner = error.cause
    if isinstance(inner, RaytfError):
        return inner
    return JobError(f"a part failed: {type(inner).__name__}: {one_line(inner, 300)}", str(error))
