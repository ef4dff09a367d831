"""Ranks that wait while the number of workers changes."""

from __future__ import annotations

import time

from raytf.training.context import Context
from raytf.training.heartbeat import Activity

#: Seconds between two looks of waiting ranks whether to go on.
_LOOK_SECONDS = 0.1


def park(context: Context) -> None:
    """Save this step, since the number of workers is about to change, and wait to be replaced or released."""
    reporter = context.reporter
    context.show("resizing")
    saved = context.saving.save_now()
    context.show("resizing")  # before the answer: the next group takes nothing older than what the driver knows
    reporter.answer(saved)
    with context.pulse.doing(Activity.PARK):
        while not context.sum([float(reporter.is_released())])[0]:
            time.sleep(_LOOK_SECONDS)
    context.show("training")
