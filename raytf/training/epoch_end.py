"""What every rank does after the last step of an epoch, and after the last step of a run that ends inside an epoch."""

from __future__ import annotations

from raytf.training.context import Context
from raytf.training.heartbeat import Activity


def end_epoch(context: Context) -> None:
    """Validate, run the callbacks' `on_epoch_end`, log, report to Ray Train, and keep the state if it is the best."""
    state, reporter = context.state, context.reporter
    epoch = context.job.epoch_of(state.step - 1)
    logs = context.logs() | _validate(context, epoch)
    context.callbacks.run("on_epoch_end", epoch, dict(logs))
    state.stopped_early = context.callbacks.stopped
    state.history.append({"epoch": epoch, "step": state.step, **logs})
    context.program.model.reset_metrics()
    if context.is_first_rank:
        reporter.scalars({f"epoch_{name}": value for name, value in logs.items()}, state.step)
        reporter.note(f"epoch {epoch + 1}: " + ", ".join(f"{name} {value:.4f}" for name, value in logs.items()))
    is_best = False
    if context.is_at_epoch_end:
        context.saving.check_goal(logs)
        is_best = context.saving.is_best()
    # Only rank 0 knows the answers; the sum gives them to every rank.
    is_report_due, is_best_somewhere = context.sum([float(reporter.is_report_due()), float(is_best)])
    if is_report_due:
        with context.pulse.doing(Activity.REPORT):
            reporter.report({**logs, "epoch": epoch, "step": state.step})
    if is_best_somewhere:
        context.saving.keep_best()


def _validate(context: Context, epoch: int) -> dict[str, float]:
    """Loss and metrics over the validation data; empty if this epoch is not validated."""
    source = context.program.sources.validation
    if source is None or (epoch + 1) % context.job.validation_freq:
        return {}
    context.show("validating")
    with context.pulse.doing(Activity.VALIDATION):
        found = context.evaluators.evaluate("validation", source, context.pulse.progress)
    return {f"val_{name}": value for name, value in found.items()}
