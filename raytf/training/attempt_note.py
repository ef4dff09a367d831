"""What an attempt leaves on storage when it begins."""

from __future__ import annotations

import threading
import time

from raytf.inference import architecture
from raytf.runs.run_log import write_attempt
from raytf.training.attempt import Attempt
from raytf.training.program import Program


class AttemptNote:
    """Stores that an attempt has begun, and the description of the model that an export needs; rank 0 calls it.

    Args:
        attempt: that has begun.
        program: that is trained.
        origin: the step at which it began, and the tier of its state.
        is_described: whether this process has stored the description before.

    Attributes:
        is_described: whether the description, which may be large, is stored.
    """

    def __init__(self, attempt: Attempt, program: Program, origin: tuple[int, str], is_described: bool):
        self._attempt, self._origin, self._began = attempt, origin, time.time()
        self._lock, self.is_described = threading.Lock(), is_described
        self._described = b""
        if attempt.group.rank == 0 and not is_described:
            x, *others = program.pipeline.sample()
            records = attempt.job.plan.micro_batch_size
            self._described = architecture.describe(program.model, x, tuple(others), records)

    def __call__(self) -> None:
        with self._lock:
            attempt = self._attempt
            write_attempt(attempt.storage, attempt.name, attempt.workers, self._origin, self._began)
            if not self.is_described:
                attempt.storage.put(architecture.FILE, self._described)
                self.is_described = True
