"""A rank's reports while it trains: to the driver, Ray Train and TensorBoard. Also syncs the callbacks' files."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

import numpy as np
import ray
import ray.train

from raytf.errors import one_line
from raytf.runs.program_output import ProgramOutput
from raytf.runs.run_log import MirroredFolder
from raytf.runs.status import Moment, Pace, Status
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob
from raytf.training.process.monitor_client import Answer, Question

#: Seconds between two statuses.
_STATUS_SECONDS = 0.5
#: Seconds between two requests that ask the monitor whether the ranks must save and wait.
_ASK_SECONDS = 0.25
#: Seconds between two requests for the driver's measurements.
_MEASURE_SECONDS = 5.0
#: Seconds between two reports. Ray's controller takes one report per poll, so more frequent reports would queue up.
_REPORT_SECONDS = 2.0
#: The most seconds that the end of training waits until Ray Train has taken all reports.
_LAST_REPORT_SECONDS = 10.0
#: The same for a group whose ranks have met again.
_MET_AGAIN_SECONDS = 1.0
#: Largest total size of callbacks' files that are kept with each copy of the state in memory. Larger files are read
#: from storage again.
_PACK_BYTES = 1 << 20


class LatestAnswer(Generic[Answer]):
    """The monitor's latest answer to a question that is asked repeatedly.

    Args:
        ask: asks the monitor.
        seconds: the minimum time between two questions.
        value: the value until the first answer arrives.
        clock: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        ask: Callable[[], Question[Answer]],
        seconds: float,
        value: Answer,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._ask, self._seconds, self.value, self._clock = ask, seconds, value, clock
        self._question: Question[Answer] | None = None
        self._asked_at = -seconds

    def poll(self) -> Answer:
        """Return the latest answer, without waiting for one."""
        now = self._clock()
        if self._question is None and now - self._asked_at >= self._seconds:
            self._question, self._asked_at = self._ask(), now
        elif self._question is not None and self._question.is_answered():
            self.value, self._question = self._question.answer(), None
        return self.value


class Reporter:
    """Sends one rank's messages, events, status and metrics.

    Args:
        job: the run, whose monitor gets the reports.
        storage: the run's folder.
        rank: this worker's rank; None before it has met the others, if another worker reports for the group.
        world_size: number of workers.
    """

    def __init__(self, job: TrainingJob, storage: Storage, rank: int | None, world_size: int):
        self._job, self._storage = job, storage
        self._files: MirroredFolder | None = None
        self._tensorboard: MirroredFolder | None = None
        self._writer: Any = None
        self.take_place(rank, world_size, "")
        self._reported_at = self._status_at = time.monotonic()
        self._pace = Pace()
        self._samples_per_step = job.plan.samples(job.plan.steps_per_epoch) / job.plan.steps_per_epoch
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._report_thread: threading.Thread | None = None
        #: Whether ranks were lost, or have joined.
        self._has_met_again = False
        #: The ticket of the request that the ranks save and wait; 0 if there is none.
        self._ticket: LatestAnswer[int] = LatestAnswer(job.monitor.ask_wanted, _ASK_SECONDS, 0)
        #: Goodput and restarts, which the driver measures.
        self._measured: LatestAnswer[dict[str, float]] = LatestAnswer(job.monitor.ask_measured, _MEASURE_SECONDS, {})

    def take_place(self, rank: int | None, world_size: int, attempt: str) -> None:
        """Set this worker's rank, the number of workers, and the name of the attempt."""
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        if rank == 0 and self._files is None:
            self._files = MirroredFolder(self._storage, "files")
            self._tensorboard = MirroredFolder(self._storage, "tensorboard")

    @property
    def files(self) -> str:
        """Return the local folder for the callbacks' files; empty on all ranks but rank 0."""
        return self._files.path if self._files else ""

    def resume(self, files: dict[str, bytes] | None = None) -> None:
        """Fetch the files of an earlier attempt, to resume.

        Args:
            files: what `pack_files` returned, if it was kept in memory.
        """
        if self._files is not None:
            self._files.fetch(files)

    def met_again(self) -> None:
        """Drop reports that the ranks had not agreed on before they met again."""
        self._status_at, self._has_met_again = time.monotonic(), True
        self._pace = Pace()
        with contextlib.suppress(queue.Empty):
            while True:
                self._reports.get_nowait()

    def pack_files(self) -> dict[str, bytes] | None:
        """Return the contents of the callbacks' files, by relative path; empty if they are written to storage directly.

        Returns:
            None if they are too large, and on all ranks but rank 0.
        """
        return self._files.pack(_PACK_BYTES) if self._files is not None else None

    def upload(self) -> None:
        """Copy files that changed to storage."""
        for folder in (self._files, self._tensorboard):
            if folder is not None:
                folder.upload()

    def upload_anew(self) -> None:
        """Make the next upload copy all files, because a late write may have replaced newer files."""
        for folder in (self._files, self._tensorboard):
            if folder is not None:
                folder.forget()

    def is_status_due(self) -> bool:
        return self._rank == 0 and time.monotonic() - self._status_at >= _STATUS_SECONDS

    def is_report_due(self) -> bool:
        return self._rank == 0 and time.monotonic() - self._reported_at >= _REPORT_SECONDS

    def show(self, status: Status) -> None:
        """Send the run's status to the driver, with the run's pace added; from rank 0."""
        now = time.monotonic()
        moment = Moment(status.step, now - status.trace_seconds, status.phase == "training", status.stall_seconds)
        self._pace.see(moment)
        self._job.monitor.update(
            replace(
                status,
                samples_per_step=self._samples_per_step,
                samples_per_second=self._pace.steps_per_second * self._samples_per_step,
                seconds_left=self._pace.seconds_left(status.total - status.step),
            )
        )
        self._status_at = now

    def say(self, message: str | ProgramOutput) -> None:
        """Print a line for the user that is the same on every rank, or pass on what the program's code printed; only
        rank 0 sends it."""
        if self._rank == 0:
            self.say_here(message)

    def note(self, message: str) -> None:
        """Print a line of progress, as `say` does, unless the user asked for silence."""
        if self._job.verbose:
            self.say(message)

    def stage(self, text: str) -> None:
        """Show what this worker is about to do before it trains; only rank 0 sends it."""
        if self._rank == 0:
            self._job.monitor.stage(text)

    def say_here(self, message: str | ProgramOutput) -> None:
        """Print a line for the user, from any rank."""
        self._job.monitor.say(message)

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event in the ledger, from any rank, without waiting."""
        self._job.monitor.event(kind, {"rank": self._rank, **fields})

    def stand(self, joined: int, vouched: int) -> None:
        """Report the step at which this process joined, and the last step at which an audit confirmed it."""
        self._job.monitor.stand(ray.get_runtime_context().get_node_id(), os.getpid(), joined, vouched)

    def go_back(self, after: int, attempts: Sequence[str]) -> None:
        """Report that these attempts' states after a step are invalid, and wait until the monitor knows."""
        self._job.monitor.go_back(after, attempts)

    def is_parking_wanted(self) -> bool:
        """Return whether the ranks must save and wait, by the monitor's latest answer, without waiting for one."""
        return self._rank == 0 and self._ticket.poll() != 0

    def answer(self, saved: bool) -> None:
        """Report to the monitor that the ranks wait, and whether they could save; from rank 0."""
        if self._rank == 0:
            self._job.monitor.answer(self._ticket.value, saved)

    def is_released(self) -> bool:
        """Return whether the waiting ranks may continue. Rank 0 asks the monitor and waits; others return False."""
        if self._rank != 0:
            return False
        released, wanted = self._job.monitor.released(self._ticket.value)
        if released:
            self._ticket.value = wanted
        return released

    def report(self, metrics: dict[str, Any], checkpoint: str | None = None) -> None:
        """Report metrics and the path of a complete checkpoint to Ray Train; every rank must call it. Never waits."""
        if not self._job.config.strategy.uses_ray_train:
            return
        if checkpoint is not None:
            # As a metric, not as a Ray checkpoint: for each Ray checkpoint the controller writes its registry to
            # storage, and if that write fails, it ends the run.
            metrics = {**metrics, "checkpoint": self._storage.locate(f"checkpoints/{checkpoint}")}
        if self._report_thread is None:
            self._report_thread = threading.Thread(target=self._send_reports, daemon=True, name="raytf-report")
            self._report_thread.start()
        self._reports.put(metrics)
        self._reported_at = time.monotonic()

    def finish(self) -> None:
        """Wait until Ray Train has taken all reports, with a timeout, since it may have stopped taking them."""
        if self._report_thread is not None:
            self._reports.put(None)
            # Ray Train may wait for a report of a rank that was lost.
            self._report_thread.join(_MET_AGAIN_SECONDS if self._has_met_again else _LAST_REPORT_SECONDS)

    def _send_reports(self) -> None:
        # A call of `ray.train.report` waits until all ranks have made it and the controller has taken it. The
        # controller itself waits for Ray, for instance until a lost GCS is back. Training must not wait for that.
        while (metrics := self._reports.get()) is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.train.report(metrics)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers for TensorBoard; from rank 0."""

        def write(summary: Any) -> None:
            more = {"world_size": float(self._world_size), **self._measured.poll()}
            for name, value in {**values, **more}.items():
                summary.scalar(name, value)

        self._summarize(write, step)

    def histograms(self, values: dict[str, Any], step: int) -> None:
        """Write histograms of tensors for TensorBoard; from rank 0. Tensors that are not finite are left out: they
        have no histogram, and too large a loss scale causes them."""

        def write(summary: Any) -> None:
            for name, value in values.items():
                if np.isfinite(value).all():
                    summary.histogram(name, value)

        self._summarize(write, step)

    def graph(self, graph: Any) -> None:
        """Write a TensorFlow graph for TensorBoard; from rank 0."""
        self._summarize(lambda summary: summary.graph(graph), 0)

    def _summarize(self, write: Callable[[Any], None], step: int) -> None:
        """Call `write` with `tf.summary` to write summaries. If it fails, as on a full disk, write no more of them."""
        import tensorflow as tf

        if self._tensorboard is None:
            return
        try:
            if self._writer is None:
                folder = self._tensorboard.path
                self._writer = tf.summary.create_file_writer(folder, filename_suffix=f".{self._attempt}")
            with self._writer.as_default(step):
                write(tf.summary)
        except tf.errors.OpError as error:
            self._tensorboard = None
            self.say(f"TensorBoard files are no longer written: {one_line(error)[-200:]}")
