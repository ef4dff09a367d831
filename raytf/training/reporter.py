"""What rank 0 tells while it trains: the driver, Ray Train's dashboard, TensorBoard; and the files of callbacks."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.train

from raytf.errors import one_line
from raytf.runs.run_log import MirroredFolder
from raytf.runs.status import SaveTrouble, Status
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob
from raytf.training.monitor_client import Question

_STATUS_SECONDS = 0.5
#: Between two questions to the driver's monitor whether the ranks must save and wait.
_ASK_SECONDS = 0.25
#: Between two questions for what the driver measures.
_MEASURE_SECONDS = 5.0
#: Ray's controller takes one report a poll; more frequent ones would wait for it.
_REPORT_SECONDS = 2.0
#: For which the end of training waits until Ray Train has taken all reports.
_LAST_REPORT_SECONDS = 10.0
#: Epochs whose metrics a status has: as many as may end between two of them.
_HISTORY_EPOCHS = 50
#: Files of callbacks that are kept with each copy of the state in memory; larger ones are read from storage again.
_PACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Saves:
    """What there is of a run's state outside of its workers.

    Attributes:
        checkpoint: step of the newest one on storage.
        snapshot: step of the newest copy in memory.
        snapshot_bytes: of this rank's part of it.
        stall_seconds: for which training stood still to save or copy.
        trouble: since when saves fail, if they do.
    """

    checkpoint: int | None
    snapshot: int | None = None
    snapshot_bytes: int = 0
    stall_seconds: float = 0.0
    trouble: SaveTrouble | None = None


class Reporter:
    """One rank's voice.

    Args:
        job: whose driver listens.
        storage: the run's folder.
        rank, world_size: of this worker.
        attempt: name of this start of the worker group.
    """

    def __init__(self, job: TrainingJob, storage: Storage, rank: int, world_size: int, attempt: str):
        self._job, self._storage, self._attempt = job, storage, attempt
        self._rank, self._world_size = rank, world_size
        self._files = MirroredFolder(storage, "files") if rank == 0 else None
        self._tensorboard = MirroredFolder(storage, "tensorboard") if rank == 0 else None
        self._writer: Any = None
        self._reported_at = self._status_at = time.monotonic()
        self._status_step = 0
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._teller: threading.Thread | None = None
        self._question: Question[int] | None = None
        self._asked_at = 0.0
        self._ticket = 0
        self._measuring: Question[dict[str, float]] | None = None
        self._measured_at = 0.0
        self._measured: dict[str, float] = {}

    @property
    def files(self) -> str:
        """Local folder for files of callbacks; empty but on rank 0."""
        return self._files.path if self._files else ""

    def resume(self, step: int, files: dict[str, bytes] | None = None) -> None:
        """The run goes on from a step: get the files that an earlier attempt left.

        Args:
            files: those of `pack_files`, where they are at hand.
        """
        self._status_step = step
        if self._files is not None:
            self._files.fetch(files)

    def pack_files(self) -> dict[str, bytes] | None:
        """The callbacks' files, where storage does not have them by itself and they are small; from rank 0."""
        return self._files.pack(_PACK_BYTES) if self._files is not None else None

    def upload(self) -> None:
        """Copy files that changed to storage."""
        for folder in (self._files, self._tensorboard):
            if folder is not None:
                folder.upload()

    def upload_anew(self) -> None:
        """Have the next upload copy all files: a late write may have replaced newer ones."""
        for folder in (self._files, self._tensorboard):
            if folder is not None:
                folder.forget()

    def is_status_due(self) -> bool:
        return self._rank == 0 and time.monotonic() - self._status_at >= _STATUS_SECONDS

    def is_report_due(self) -> bool:
        return self._rank == 0 and time.monotonic() - self._reported_at >= _REPORT_SECONDS

    def show(
        self,
        phase: str,
        step: int,
        saves: Saves,
        metrics: dict[str, float] | None = None,
        history: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Tell the driver where the run is; from rank 0."""
        if self._rank != 0:
            return
        job, plan, now = self._job, self._job.plan, time.monotonic()
        done, seconds = step - self._status_step, now - self._status_at
        rate = done / seconds if done > 0 and seconds else 0.0
        latest = step if phase == "training" and step < job.total_steps else max(0, step - 1)
        status = Status(
            step=step,
            total=job.total_steps,
            epoch=latest // plan.steps_per_epoch + 1,
            epochs=-(-job.total_steps // plan.steps_per_epoch),
            workers=self._world_size,
            metrics=metrics or {},
            samples_per_second=rate * plan.global_batch_size,
            seconds_left=(job.total_steps - step) / rate if rate else None,
            checkpoint=saves.checkpoint,
            snapshot=saves.snapshot,
            snapshot_bytes=saves.snapshot_bytes,
            stall_seconds=saves.stall_seconds,
            phase=phase,
            trouble=saves.trouble,
            history=list(history[-_HISTORY_EPOCHS:]),
        )
        job.monitor.update(status)
        self._status_at, self._status_step = now, step

    def say(self, message: str) -> None:
        """A line for the user that every rank would say; rank 0 does."""
        if self._rank == 0:
            self.say_here(message)

    def say_here(self, message: str) -> None:
        """A line for the user, from any rank."""
        self._job.monitor.say(message)

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened that the ledger must know, from any rank; never waits."""
        self._job.monitor.event(kind, {"rank": self._rank, **fields})

    def is_parking_wanted(self) -> bool:
        """Whether the ranks must save and wait, as the monitor said when it was last asked; never waits for it."""
        if self._rank != 0:
            return False
        now = time.monotonic()
        if self._question is None and now - self._asked_at >= _ASK_SECONDS:
            self._question, self._asked_at = self._job.monitor.ask_wanted(), now
        elif self._question is not None and self._question.is_answered():
            self._ticket, self._question = self._question.answer(), None
        return self._ticket != 0

    def answer(self, saved: bool) -> None:
        """Tell that the ranks wait, and whether they could save; from rank 0."""
        if self._rank == 0:
            self._job.monitor.answer(self._ticket, saved)

    def is_released(self) -> bool:
        """Whether the ranks that wait may train on; asks the monitor from rank 0 and waits for the answer."""
        if self._rank != 0:
            return False
        released, wanted = self._job.monitor.released(self._ticket)
        if released:
            self._ticket = wanted
        return released

    def report(self, metrics: dict[str, Any], checkpoint: str | None = None) -> None:
        """Show metrics and the place of a complete checkpoint in Ray Train; every rank must call it. Never waits."""
        if not self._job.config.strategy.uses_ray_train:
            return
        if checkpoint is not None:
            # As a metric, not as Ray's checkpoint: for each of those Ray's controller writes its registry to storage,
            # and where storage refuses in that moment the run is over.
            metrics = {**metrics, "checkpoint": self._storage.locate(f"checkpoints/{checkpoint}")}
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell, daemon=True, name="raytf-report")
            self._teller.start()
        self._reports.put(metrics)
        self._reported_at = time.monotonic()

    def finish(self) -> None:
        """Wait until Ray Train has what was reported, which it may have lost all interest in."""
        if self._teller is not None:
            self._reports.put(None)
            self._teller.join(_LAST_REPORT_SECONDS)

    def _tell(self) -> None:
        # Ray Train takes a report when all ranks have made it and its controller has the time, which has to ask Ray for
        # this and that: where the GCS is gone, not before it is there again. Training does not need the answer.
        while (metrics := self._reports.get()) is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.train.report(metrics)

    def _measures(self) -> dict[str, float]:
        """Goodput and restarts, as the driver last knew them; never waits."""
        now = time.monotonic()
        if self._measuring is None and now - self._measured_at >= _MEASURE_SECONDS:
            self._measuring, self._measured_at = self._job.monitor.ask_measured(), now
        elif self._measuring is not None and self._measuring.is_answered():
            self._measured, self._measuring = self._measuring.answer(), None
        return self._measured

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers for TensorBoard; from rank 0."""

        def write(summary: Any) -> None:
            more = {"world_size": float(self._world_size), **self._measures()}
            for name, value in {**values, **more}.items():
                summary.scalar(name, value)

        self._summarize(write, step)

    def histograms(self, values: dict[str, Any], step: int) -> None:
        """Write how tensors are distributed for TensorBoard; from rank 0. Those that are not finite are left out: a
        loss scale that turned out too large, which has no distribution."""

        def write(summary: Any) -> None:
            for name, value in values.items():
                if np.isfinite(value).all():
                    summary.histogram(name, value)

        self._summarize(write, step)

    def graph(self, graph: Any) -> None:
        """Write a graph of TensorFlow for TensorBoard; from rank 0."""
        self._summarize(lambda summary: summary.graph(graph), 0)

    def _summarize(self, write: Callable[[Any], None], step: int) -> None:
        """Write with TensorFlow's summaries, given to `write`. A disk that is full ends that, not training."""
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
            self.say(f"TensorBoard files are not written any more: {one_line(error)[-200:]}")
