"""The end of a run: last callbacks, test, export and result."""

from __future__ import annotations

from typing import Any

from raytf.checkpoint import variables
from raytf.config.objective import flat
from raytf.inference import export
from raytf.runs.events import HELD
from raytf.runs.run_log import read_attempts
from raytf.training import program_variables
from raytf.training.context import Context
from raytf.training.heartbeat import Activity


def finish(context: Context) -> dict[str, Any] | None:
    """Test and export the model of a run that has trained.

    Returns:
        The run's result on rank 0, None on any other.
    """
    model, state = context.program.model, context.state
    context.pulse.settle(Activity.END, state.step)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    latest = state.history[-1] if state.history else {}
    logs = {name: value for name, value in latest.items() if name not in ("epoch", "step")}
    metrics = flat(logs)
    is_all = context.job.stop_step is None
    if is_all:
        # Before the test: EarlyStopping restores its best weights here.
        context.callbacks.run("on_train_end", logs)
    source = context.program.sources.test if is_all else None
    if source is not None:
        context.show("testing")
        found = context.evaluators.evaluate("test", source, context.pulse.progress)
        metrics |= {f"test_{name}": value for name, value in flat(found).items()}
    if not context.is_first_rank:
        return None
    result = _result(context, metrics)
    if is_all:
        context.show("exporting")
        context.callbacks.keep(context.attempt.storage)
        program_variables.keep(context.attempt.storage, model, context.job.code)
        say = context.reporter.say
        where = context.attempt.storage, state.step, result["weights_sha256"], say
        result["export"] = export.export(model, *where)
        context.reporter.upload()
    return result


def _result(context: Context, metrics: dict[str, float]) -> dict[str, Any]:
    state, storage = context.state, context.attempt.storage
    attempts = read_attempts(storage)
    plan, digest = context.plan, variables.weights_sha256(context.program.model)
    samples, (epoch, inside) = plan.samples(state.step), plan.locate(state.step)
    return {
        "run": context.config.run.name,
        "status": "finished",
        "metrics": metrics,
        "steps": state.step,
        "epochs": epoch + inside / plan.steps_per_epoch,
        "samples": samples,
        "stopped_early": state.stopped_early,
        "train_seconds": state.train_seconds,
        "imbalance_seconds": state.imbalance_seconds,
        "world_sizes": sorted({a["world_size"] for a in attempts}),
        "restarts": max(0, len(attempts) - 1),
        "regroups": sum(a.get("tier") == HELD for a in attempts),
        "weights_sha256": digest,
        "identity": context.program.identity,
        "history": state.history,
    }
