"""Lets the ranks save and wait, before the run stops or while the number of workers changes."""

from __future__ import annotations

import time

from raytf.runs.status import PARKED
from raytf.training.context import Context
from raytf.training.heartbeat import Activity

#: Seconds between two polls of waiting ranks whether they may train on.
_POLL_SECONDS = 0.1


def park(context: Context) -> None:
    """Save the current step because the run stops or the number of workers is about to change, and wait to be ended,
    replaced or released."""
    reporter = context.reporter
    context.show(PARKED)
    saved = context.saving.save_now()
    # Before the answer: the next group resumes from no checkpoint older than the newest that the driver knows.
    context.show(PARKED)
    reporter.answer(saved)
    with context.pulse.doing(Activity.PARK):
        while not context.sum([float(reporter.is_released())])[0]:
            time.sleep(_POLL_SECONDS)
    context.show("training")
