"""How old the newest copies of a run's state are: the time that a failure would cost now."""

from __future__ import annotations

import bisect

from raytf.runs.ledger import Event

#: Tier -> field of a sign of life with the step of its newest copy.
TIERS = {"durable": "checkpoint", "memory": "snapshot"}


class CopyAges:
    """Goes through a run's events in order.

    Attributes:
        steps: of the newest copy of each tier; 0 as long as there is none, None where the one that there was is lost.
    """

    def __init__(self) -> None:
        self.steps: dict[str, int | None] = dict.fromkeys(TIERS, 0)
        #: The present history of the run; steps go up.
        self._at_steps: list[int] = []
        self._times: list[float] = []

    def see(self, event: Event) -> None:
        """Take in the next event."""
        kind = event["kind"]
        if kind == "attempt":
            step, tier = int(event.get("from_step") or 0), event.get("tier")
            self._pass(event["time"], step)
            # What a group begins with is a copy that is still there; it would not have taken an older one.
            self.steps["memory"] = step if tier == "memory" else None if tier == "durable" else 0
            if tier == "durable":
                self.steps["durable"] = max(step, self.steps["durable"] or 0)
        elif kind in ("phase", "progress") and event.get("phase") != "starting":
            self._pass(event["time"], int(event.get("step") or 0))
            for tier, field in TIERS.items():
                if event.get(field) is not None:
                    self.steps[tier] = int(event[field])

    def seconds(self, now: float) -> dict[str, float]:
        """Age of each tier's newest copy, without a tier that has lost its own; nothing before the first step."""
        if not self._times:
            return {}
        return {tier: max(0.0, now - self._when(step)) for tier, step in self.steps.items() if step is not None}

    def _pass(self, time: float, step: int) -> None:
        keep = bisect.bisect_left(self._at_steps, step)
        del self._at_steps[keep:], self._times[keep:]
        self._at_steps.append(step)
        self._times.append(time)

    def _when(self, step: int) -> float:
        after = bisect.bisect_left(self._at_steps, step)
        if after == 0:
            return self._times[0]
        if after == len(self._times):
            return self._times[-1]
        low, high = self._at_steps[after - 1], self._at_steps[after]
        share = (step - low) / (high - low)
        return self._times[after - 1] + share * (self._times[after] - self._times[after - 1])
