"""Tries a step of a new run's model in another process while Ray starts, to show mistakes before workers start.

If a finished run is trained further, or a run's command has changed, that process builds the model for a comparison. On
two cores this delays a run without mistakes by one or two seconds. On a busy machine, where the answer would come too
late, nothing is tried. An error ends the run only if workers would fail in the same way: on CPUs, and because of a
mistake in the code, not something that this machine lacks. The driver compares settings and data of a finished run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raytf.config import canonical_text
from raytf.config.identity import beside
from raytf.data.sources import Source
from raytf.errors import ExactnessError, JobError, RaytfError, RunMismatchError, StorageError, WholeBatchError
from raytf.storage.storage import Storage
from raytf.training import model_probe, run_identity
from raytf.training.job import Sources, TrainingJob

#: A machine with more processes than this for each CPU is busy.
_BUSY = 1.5
#: Keys of a runtime environment that may install packages, or run code before anything else.
_PACKAGES = ("pip", "uv", "conda", "container", "image_uri", "worker_process_setup_hook")
#: Timeout for importing TensorFlow and building the model, on a busy machine.
_SECONDS = 600
#: Number of records with which a worker builds its model.
_SAMPLE = 2
#: File in the run's folder with the configuration of its model, from which a message can say where models differ.
_ARCHITECTURE = "architecture.json"


def is_busy(load: float, cpus: int) -> bool:
    """Return whether a machine with this load in the last minute would try a model too late."""
    return load > _BUSY * cpus


def has_own_environment(runtime_env: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether workers, with Ray's `runtime_env`, get variables, packages or a hook that this process does not
    have."""
    variables = runtime_env.get("env_vars") or {}
    return any(environ.get(name) != value for name, value in variables.items()) or any(map(runtime_env.get, _PACKAGES))


def is_decisive(error: RaytfError, has_more: bool, is_here: bool) -> bool:
    """Return whether workers would fail in the same way as the process that tried.

    Args:
        has_more: whether workers have GPUs or an environment that this process does not have.
        is_here: whether workers run on this machine alone.
    """
    if has_more or isinstance(error, (WholeBatchError, ExactnessError)):  # these lead to other settings
        return False
    return is_here or not isinstance(error, JobError) or error.is_bug


@contextlib.contextmanager
def rehearsing(job: TrainingJob, train: Source | None, before: Mapping[str, str] | None = None) -> Iterator[Rehearsal]:
    """Start to try a job's model, in a process that ends with the `with` statement.

    Args:
        train: the training data; None tries nothing.
        before: the identity of the run in storage; the model is then compared with it instead of being tried.
    """
    if train is None or job.config.strategy.has_servers or is_busy(os.getloadavg()[0], os.cpu_count() or 1):
        yield Rehearsal(None)
        return
    with model_probe.started(job, train, job.plan.micro_batch_size, trains=before is None) as asked:
        yield Rehearsal(asked, lambda answer: check_model(job, before or {}, answer))


class Rehearsal:
    """A model that another process tries; `check` is called with the answer, and raises an error if it is wrong."""

    def __init__(
        self, asked: model_probe.ModelProbe | None, check: Callable[[Mapping[str, str]], None] = lambda answer: None
    ):
        self._asked, self._check = asked, check

    def poll(self, say: Callable[[str], None], has_more: bool, is_here: bool) -> None:
        """Show remarks on the model, or raise its error if workers would fail in the same way. Never wait."""
        if self._asked is None:
            return
        try:
            answer = self._asked.answer(0)
            if answer is not None:
                self._asked = None
                self._check(answer)
                for line in answer.get(model_probe.REMARKS, "").splitlines():
                    say(line)
        except RaytfError as error:
            self._asked = None
            if is_decisive(error, has_more, is_here):
                raise


def stored(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the identity that a run stored in its result; empty if there is none, or if it is not a mapping."""
    identity = result.get("identity")
    return {str(k): str(v) for k, v in identity.items()} if isinstance(identity, dict) else {}


def compare(job: TrainingJob, sources: Sources, before: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Refuse the result of a run that had other settings, another model or other data.

    Args:
        job: the current job, which has not been sent to any worker yet.
        sources: the job's data.
        before: the identity that the run stored.
        say: called with a line about properties that could not be compared.

    Raises:
        RunMismatchError: the job differs from the run; the message says where.
        RaytfError: the model cannot be built.
    """
    if not before:
        say("the run stored nothing about its settings, data and model, so they were not compared")
        return
    now = run_identity.of_run(job, sources)
    now = _without_varying_data(before, now, sources)
    _refuse(job, before, now)
    missing = [key for key in (run_identity.STRUCTURE, *run_identity.DATA, run_identity.CODE) if key not in before]
    if missing:
        say(f"this run was made by an older raytf, which did not store {', '.join(missing)}: these were not compared")
    described = describe(job, sources.train)
    if model_probe.CANNOT in described:
        say(f"the model was not compared: {described[model_probe.CANNOT]}")
        return
    config = described.pop(model_probe.CONFIG, "")
    where = ""
    if described[run_identity.STRUCTURE] != before.get(run_identity.STRUCTURE, described[run_identity.STRUCTURE]):
        where = _first_difference(Storage(job.run_uri), config)
    _refuse(job, before, now | described, where)


def check_model(job: TrainingJob, before: Mapping[str, str], described: Mapping[str, str]) -> None:
    """Refuse to train a run further with another model.

    Args:
        job: the current job.
        before: the identity that the run stored. If it has no model, nothing is compared.
        described: the description of the current model; see `ModelProbe.answer`.

    Raises:
        RunMismatchError: the models differ; the message says where.
    """
    keys = [key for key in before if key.startswith("model ") and key in described]
    difference = run_identity.resume_mismatch({key: before[key] for key in keys}, {key: described[key] for key in keys})
    if difference:
        where = _first_difference(Storage(job.run_uri), described.get(model_probe.CONFIG, ""))
        raise RunMismatchError(
            f"run {job.config.run_name!r} in storage was made with another model: {where}{difference}. "
            f"{beside(job.config)}"
        )


def _refuse(job: TrainingJob, before: Mapping[str, str], now: Mapping[str, str], where: str = "") -> None:
    model = ("model ", run_identity.CODE)
    known = {
        key: value for key, value in before.items() if key in now or not key.startswith((*model, *run_identity.DATA))
    }
    difference = run_identity.result_mismatch({k: v for k, v in known.items() if k in now or k != "training data"}, now)
    if difference:
        raise RunMismatchError(
            f"run {job.config.run_name!r} has finished with other settings, so its result does not apply: "
            f"{where}{difference}. Use the same settings as before. {beside(job.config)}"
        )


def _first_difference(run: Storage, config: str) -> str:
    """Describe the first difference between the run's model and the current one; empty if Keras could not serialize
    both."""
    try:
        stored = json.loads(run.get_or_none(_ARCHITECTURE) or b"{}").get("config")
        difference = canonical_text.first_difference(
            canonical_text.canonical(stored, False), json.loads(config or "null")
        )
    except (StorageError, ValueError, RecursionError, AttributeError, TypeError):
        return ""  # then the message says only that they differ
    return f"{difference}; " if difference and stored and config else ""


def _without_varying_data(before: Mapping[str, str], now: dict[str, str], sources: Sources) -> dict[str, str]:
    """Return the current identity without data that change each time they are read, which cannot be compared."""
    kept = dict(now)
    for key, name in run_identity.DATA.items():
        source = getattr(sources, name)
        if source is not None and before.get(key, now[key]) != now[key] and run_identity.contents(source) != now[key]:
            kept = {k: v for k, v in kept.items() if k != key and not (name == "train" and k == "training data")}
    return kept


def describe(job: TrainingJob, train: Source) -> dict[str, str]:
    """Describe the job's model, which another process builds.

    Returns:
        The description, as in `ModelProbe.answer`.

    Raises:
        RaytfError: the function raised, or returned a model that cannot be trained.
    """
    try:
        with model_probe.started(job, train, _SAMPLE) as probe:
            answer = probe.answer(_SECONDS)
    except JobError as error:
        raise JobError(
            f"this run has finished, but the current model, which must be compared with it, cannot be built: {error}",
            error.traceback,
        ) from None
    return answer or {model_probe.CANNOT: f"the process that builds it took more than {_SECONDS} s"}
