"""The progress of a run, and the cost of its restarts, from the statuses of rank 0 and from the run's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytf.runs.events import HELD
from raytf.runs.status import Status, workers_text
from raytf.runs.timeline import RestartPhases, describe
from raytf.training.process.heartbeat_types import LastHeartbeat

#: Seconds between two progress rows in the ledger while a run trains.
PROGRESS_SECONDS = 5.0


class Progress:
    """The progress of a run so far.

    Args:
        attempts: names of the run's worker groups so far.
        now: time of a monotonic clock in seconds, as in all methods.

    Attributes:
        status: latest status of the current group; None until there is one.
        stage: stage of the start, until there is a status; empty if unknown.
        reached: latest global step that was ever reported.
        durable: step of the newest checkpoint in storage, 0 for none; None until a group of this driver has checked.
    """

    def __init__(self, attempts: Sequence[str], now: float):
        self._attempts = list(attempts)
        self._restart, self._starts = RestartPhases(), 0
        self._updated_at = self._noted_at = now
        self.durable: int | None = None
        self._committing = 0
        self.status: Status | None = None
        self.stage = ""
        self.reached = 0

    def update(self, status: Status, now: float) -> tuple[str, dict[str, Any]] | None:
        """Record a status.

        Returns:
            Kind and fields of a row for the ledger if the phase or number of workers changed, or after
            `PROGRESS_SECONDS`; else None.
        """
        before = self.status
        self.status, self.stage, self._updated_at = status, "", now
        self.reached = max(self.reached, status.step)
        self.durable = max(self.durable or 0, status.checkpoint or 0)
        is_new = before is None or (before.phase, before.workers) != (status.phase, status.workers)
        if not is_new and now - self._noted_at < PROGRESS_SECONDS:
            return None
        self._noted_at = now
        return ("phase" if is_new else "progress"), status.row()

    def begin(self, attempt: str, now: float) -> tuple[list[str], int | None]:
        """Record that a worker group starts.

        Returns:
            All attempts before this one, and the step of the newest checkpoint in storage: 0 for none, None until a
            group of this driver has checked.
        """
        self._restart.joined(now)
        before = list(self._attempts)
        self._attempts.append(attempt)
        return before, self.durable

    def commits(self, step: int) -> None:
        """Record that the checkpoint of a step is about to be complete in storage; rank 0 waits for this call."""
        self._committing = max(self._committing, step)

    def is_saving(self) -> bool:
        """Return whether storage may hold a newer checkpoint than the newest known one."""
        return self._committing > (self.durable or 0)

    def is_over(self, attempt: str) -> bool:
        """Return whether a newer worker group than `attempt` has started."""
        return attempt in self._attempts[:-1]

    def go_back(self, step: int) -> None:
        """Roll back to a step, and forget the newest checkpoint, which may be void."""
        self.reached, self.durable = min(self.reached, step), None

    def happened(
        self, kind: str, fields: dict[str, Any], sightings: Sequence[LastHeartbeat], now: float
    ) -> tuple[dict[str, Any], str]:
        """Process an event.

        Args:
            sightings: the latest heartbeat of each rank.
            now: time of a monotonic clock in seconds.

        Returns:
            The fields, completed from the progress so far, and a line for the user, empty for none.
        """
        status = self.status
        known: dict[str, Any] = {}
        if status is not None:
            known = {"step": status.step, "stall": status.stall_seconds, "trace": status.trace_seconds}
        fields = known | fields
        if fields.get("survived"):
            return fields, ""
        if kind in ("fault", "hang"):
            self._failed(fields, status, sightings, now)
        elif kind == "group":
            self._restart.group(now)
            self.status, self.stage = None, f"starting {workers_text(fields['workers'])}"
        elif kind == "waiting":
            room, wanted = fields["possible"], workers_text(fields["wanted"])
            self.stage = f"waiting for {wanted}; the cluster has room for {room}"
        elif kind == "attempt":
            fields["phases"] = self._restart.trains(now, fields["phases"])
            self._starts += 1
            if fields.get("tier") == HELD:
                return fields, self._went_on(fields)
            if self._starts > 1:
                return fields, f"restarted in {describe(fields['phases'])}"
        return fields, ""

    def _went_on(self, fields: dict[str, Any]) -> str:
        """Complete the fields of an attempt whose workers continued in place, and return a line for the user."""
        fields["silent"] = pause = sum(fields["phases"].values())
        workers, step = fields["world_size"], fields["from_step"]
        who = f"{workers} workers continue" if workers > 1 else "1 worker continues"
        return f"{who} after {pause:.1f} s at step {step}, no step lost"

    def _failed(
        self, fields: dict[str, Any], status: Status | None, sightings: Sequence[LastHeartbeat], now: float
    ) -> None:
        # Count from the last status of a group that trained. Other groups have no status, or one with another phase.
        is_training = status is not None and status.phase == "training"
        fields["silent"] = now - self._updated_at if is_training else 0.0
        if is_training:
            # Surviving ranks report their step when they leave; the status arrives only twice a second.
            fields["step"] = max(fields["step"], *(sighting.beat.step for sighting in sightings), 0)
            self.reached = max(self.reached, fields["step"])
        self._restart.fault(now, fields["silent"])
        self.status = None
