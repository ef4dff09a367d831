"""What every rank does after the last step of an epoch, and after the last step of a run that ends inside an epoch."""

from __future__ import annotations

from typing import Any

from raytf.config.objective import flat
from raytf.runs.status import number_text
from raytf.training.context import Context
from raytf.training.heartbeat import Activity


class EpochEnd:
    """The end of one epoch. If a worker is lost in it, it is run again, and what is done of it is not done twice.

    Args:
        context: of the rank, after the epoch's last step.

    Attributes:
        step: that step.
    """

    def __init__(self, context: Context):
        self.step = context.state.step
        self._epoch = context.job.epoch_of(self.step - 1)
        self._logs = context.logs()
        self._validated: dict[str, Any] | None = None
        self._is_noted = self._is_reported = False

    def run(self, context: Context) -> None:
        """Validate, run the callbacks' `on_epoch_end`, log, report to Ray Train, keep the state if it is the best."""
        state, reporter = context.state, context.reporter
        if context.sum([float(self._validated is None)])[0]:
            self._validated = _validate(context, self._epoch, self._logs)
        logs = context.callbacks.end_epoch(self._epoch, self._logs | (self._validated or {}))
        state.stopped_early = context.callbacks.stopped
        if not self._is_noted:
            self._note(context, logs)
        is_best = False
        if context.is_at_epoch_end:
            context.saving.check_goal(logs)
            is_best = context.saving.is_best()
        # Only rank 0 knows the answers; the sum gives them to every rank.
        is_report_due, is_best_somewhere = context.sum([float(reporter.is_report_due()), float(is_best)])
        if is_report_due and not self._is_reported:
            self._is_reported = True
            with context.pulse.doing(Activity.REPORT):
                reporter.report({**flat(logs), "epoch": self._epoch, "step": state.step})
        if is_best_somewhere:
            context.saving.keep_best()

    def _note(self, context: Context, logs: dict[str, Any]) -> None:
        self._is_noted = True
        context.state.history.append({"epoch": self._epoch, "step": self.step, **logs})
        context.program.model.reset_metrics()
        if context.is_first_rank:
            numbers = flat(logs)
            context.reporter.scalars({f"epoch_{name}": value for name, value in numbers.items()}, self.step)
            said = ", ".join(f"{name} {number_text(value)}" for name, value in numbers.items())
            context.reporter.note(f"epoch {self._epoch + 1}: {said}")


def _validate(context: Context, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
    """Loss and metrics over the validation data; empty if this epoch is not validated."""
    source = context.program.sources.validation
    if source is None or not context.job.validates_after(epoch):
        return {}
    context.show("validating")
    with context.pulse.doing(Activity.VALIDATION):
        found = context.evaluators.evaluate("validation", source, context.pulse.progress)
    context.show("training", flat(logs))  # from here on, the time is that of steps again
    return {f"val_{name}": value for name, value in found.items()}
