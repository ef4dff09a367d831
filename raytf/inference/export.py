"""The model's life after training: versions for TensorFlow Serving, a .keras file, ONNX.

The end of a run exports its model; later, any checkpoint can be exported, also of a run that goes on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from raytf.checkpoint import audit, codec, durable, variables
from raytf.checkpoint.audit import Finding, State
from raytf.checkpoint.variables import weights_sha256
from raytf.config.objective import Goal
from raytf.errors import CheckpointError, ConfigError, JobError, ModelError, one_line
from raytf.inference import architecture, versions
from raytf.inference.user_model import run_user_code, with_precision
from raytf.runs import run_log
from raytf.runs.inventory import main_goal
from raytf.storage.storage import Storage
from raytf.storage.untrusted_json import attempt

FOLDER, KERAS_FILE, WEIGHTS_FILE = "export", "model.keras", "weights.safetensors"
LAST, BEST = "last", "best"
_STEP_DIGITS = 15


@dataclass(frozen=True)
class Exported:
    """What `export_run` did.

    Attributes:
        place: of the model, as a person would look for it.
        version: number of the version; None for a file.
        step: global steps that the weights have seen; None where nobody said it.
        is_new: False where the newest version held these weights already.
    """

    place: str
    version: int | None
    step: int | None
    is_new: bool = True


def obstacles(model: keras.Model) -> list[str]:
    """What will keep a model from being exported or loaded again, one line each; it is tried, and nothing is written.

    To be asked before training: at its end it is too late to change the model.
    """
    found = []
    try:
        with quiet():
            _trace(model)
    except Exception as error:  # whatever the model's own code raises
        found.append(
            f"the model cannot be exported for serving, Keras says: {type(error).__name__}: {one_line(error, 200)}... "
            "Give it one input, or a list or dict of them, as keras.Model(inputs, outputs) does."
        )
    return [*found, *architecture.obstacles(model)]


def _trace(model: keras.Model) -> None:
    """What of `model.export` can fail before there are files: its function is traced, and made a signature."""
    from keras.src.export.export_utils import get_input_signature
    from tensorflow.python.saved_model.signature_serialization import canonicalize_signatures

    archive = keras.export.ExportArchive()
    function = archive.track_and_add_endpoint("serve", model, get_input_signature(model))
    canonicalize_signatures({"serving_default": function})


def export(
    model: keras.Model,
    run: Storage,
    step: int,
    digest: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Export the model at the end of a run: the next version in `export/` (signature `serving_default`), `model.keras`.

    Where the newest version holds these weights already, as after a run that died at its end, it stays the newest.

    Args:
        digest: `weights_sha256` of the model, where it is known.
        say: told what cannot be written, and what there is in its place.

    Returns:
        What was written, name -> location: `saved_model` and `keras`, each where the model allows it; `weights` where
        it does not, which `load_weights` puts into a model.

    Raises:
        StorageError: storage refuses.
    """
    target = run.child(FOLDER)
    notes: dict[str, Any] = {"run": _name(run), "step": step, "weights_sha256": digest or weights_sha256(model)}
    written: dict[str, str] = {}
    try:
        version = _holding(target, notes["weights_sha256"]) or _publish(model, target, notes)
        written["saved_model"] = target.locate(version.name)
    except JobError as error:
        say(f"the model is not exported for serving: {one_line(error, 300)}")
    try:
        run.put(KERAS_FILE, _keras_bytes(model))
        written["keras"] = run.locate(KERAS_FILE)
    except JobError as error:  # it can be served all the same
        run.put(WEIGHTS_FILE, _weights_bytes(model))
        written["weights"] = run.locate(WEIGHTS_FILE)
        say(f"there is no {KERAS_FILE}, but {WEIGHTS_FILE} for raytf.load_weights: {one_line(error, 300)}")
    return written


def load(run: Storage, make: Callable[[], keras.Model] | None = None) -> keras.Model:
    """The model as a run left it at its end.

    Args:
        make: the job's model function, for a model that Keras does not make again by itself.

    Raises:
        ModelError: the run left none, or it cannot be made again.
    """
    why = f"the run left no {KERAS_FILE}"
    if run.exists(KERAS_FILE):
        try:
            with _keras_file(run) as file, with_precision(architecture.precision_of(run)):
                return run_user_code("loading the model", lambda: keras.saving.load_model(file))
        except JobError as error:
            why = one_line(error, 300)
    if make is not None:
        return load_weights(run, make)
    raise ModelError(
        f"{run.locate('')} holds no model that Keras makes again by itself: {why}. Give the function that makes it: "
        "Result.load_model(model), or raytf.load_weights(run, model)."
    )


def load_weights(run: Storage, model: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """A model with the weights that a run ended with, or, where it has not ended, with those of its newest checkpoint.

    Args:
        model: with the layers of the run's own, or the function that makes it.

    Raises:
        ModelError: there are no weights, or they are of another model.
    """
    with with_precision(architecture.precision_of(run)):
        made = model if isinstance(model, keras.Model) else run_user_code("the model function", model)
        if not isinstance(made, keras.Model):
            raise ModelError(f"the model function returned {type(made).__name__}. Expected a keras.Model.")
        architecture.call(made, run)
    result = run_log.read_result(run)
    try:
        _put_weights(made, run)
    except (CheckpointError, JobError) as error:
        raise ModelError(f"the weights of {run.locate('')} are of another model: {one_line(error, 300)}") from error
    wanted = (result or {}).get("weights_sha256")
    if wanted and weights_sha256(made) != wanted:
        raise ModelError(
            f"the model with the weights of {run.locate('')} is not what the run ended with (weights_sha256 {wanted}). "
            "Give the model function of the job."
        )
    return made


def _put_weights(model: keras.Model, run: Storage) -> None:
    """Give a model a run's weights, from whatever holds them."""
    is_over = run_log.read_result(run) is not None
    if is_over and (data := run.get_or_none(WEIGHTS_FILE)) is not None:
        _restore(model, codec.decode(data))
    elif is_over and run.exists(KERAS_FILE):
        with _keras_file(run) as file:
            run_user_code("loading the weights", lambda: model.load_weights(file))
    else:
        finding = next((f for f in audit.inspect(run) if f.state is State.WHOLE), None)
        if finding is None:
            raise ModelError(f"{run.locate('')} holds no weights: it has neither an end nor a whole checkpoint.")
        _restore(model, durable.load(run, finding.name).tensors)


def _restore(model: keras.Model, tensors: dict[str, Any]) -> None:
    named = variables.weights(model)
    variables.restore(named, _renamed(tensors, list(named)))


@contextlib.contextmanager
def _keras_file(run: Storage) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = os.path.join(folder, KERAS_FILE)
        with open(file, "wb") as out:
            out.write(run.get(KERAS_FILE))
        architecture.check_archive(file)
        yield file


def export_run(
    uri: str,
    to: str | None = None,
    step: str = LAST,
    kind: str = "saved_model",
    modules: tuple[str, ...] = (),
    trust: bool = False,
    say: Callable[[str], None] = print,
) -> Exported:
    """Export the weights of one of a run's checkpoints, or what the run has learned in the end.

    Args:
        uri: the run's folder.
        to: folder of versions or files; `export/` of the run by default.
        step: `last`, `best` or a number of global steps.
        kind: saved_model, keras or onnx.
        modules: names or files of modules that register classes which the model needs.
        trust: run code that the configuration holds, as of Lambda layers.
        say: told what is exported.

    Raises:
        ConfigError: there is no such run or checkpoint; it says which there are.
        CheckpointError: the checkpoint is damaged.
        ModelError: the model cannot be made again.
        StorageError: storage refuses.
    """
    run = Storage(uri)
    target = run.child(FOLDER) if to is None else Storage(to)
    if to is None and run.is_local and os.path.islink(target.root):
        raise ConfigError(f"{target.root} is a link, and may lead into another run. Say where to: --to {target.root}.")
    findings = audit.inspect(run)
    result, damaged = attempt(lambda: run_log.read_result(run))
    if damaged is not None:
        say(f"without the run's end: {damaged}")
    if not findings and result is None:
        raise ConfigError(
            f"{run.locate('')} is no run: it has no checkpoints. Expected STORAGE/NAME; `raytf runs` lists them."
        )
    final = result if step == LAST and _is_final(findings, result) else None
    if final is not None and kind == "saved_model":
        copied = _copy_final(run, target, final, say)
        if copied is not None:
            return copied
    if final is not None and kind == "keras" and run.exists(KERAS_FILE):
        say(f"step {final['steps']}, from the end of the run")
        return _put_file(target, run.get(KERAS_FILE), final["steps"], kind)
    finding = choose(findings, step)
    say(f"step {finding.step}, from checkpoint {finding.name}")
    model = _load(run, finding, modules, trust)
    notes: dict[str, Any] = {"run": _name(run), "step": finding.step, "weights_sha256": weights_sha256(model)}
    if kind == "saved_model":
        before = _holding(target, notes["weights_sha256"])
        version = before or _publish(model, target, notes)
        return Exported(target.locate(version.name), version.number, finding.step, before is None)
    data = _keras_bytes(model) if kind == "keras" else _onnx_bytes(model)
    return _put_file(target, data, finding.step, kind)


def choose(findings: list[Finding], step: str) -> Finding:
    """The checkpoint to export.

    Args:
        findings: all checkpoints, the newest first.
        step: `last`, `best` or a number.

    Raises:
        ConfigError: there is none such.
        CheckpointError: it is damaged.
    """
    good = [finding for finding in findings if finding.state is State.WHOLE]
    if not good:
        raise ConfigError("the run has no whole checkpoint yet. `raytf verify RUN` says what it has.")
    if step == LAST:
        return good[0]
    if step == BEST:
        return _best(good)
    steps = ", ".join(str(s) for s in sorted({finding.step for finding in good}))
    if not (step.isascii() and step.isdecimal() and len(step) <= _STEP_DIGITS):
        raise ConfigError(f"--step {step}: expected a number of steps, last or best. There are checkpoints of {steps}.")
    for finding in good:
        if finding.step == int(step):
            return finding
    for finding in findings:
        if finding.step == int(step) and finding.problems:
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged: {finding.problems[0]}. Whole are {steps}."
            )
    raise ConfigError(
        f"--step {step}: there is no checkpoint of that step. There are those of {steps}; --keep keeps more."
    )


def _best(good: list[Finding]) -> Finding:
    kept = next((f.document.best for f in good if f.document.best), None)
    if kept is not None:
        # Which end of the metric is good, the flag said; the checkpoint that was kept has this very value.
        value = Goal(kept[0], is_largest=True).value_at
        found = next((f for f in good if value(f.step, f.document.history) == kept[1]), None)
        if found is not None:
            return found
    goal = main_goal(good[0].document.history)
    if goal is None:
        raise ConfigError("--step best: the run has no metric yet whose name tells what is good. Give a step.")
    name = goal.best({f.name: goal.value_at(f.step, f.document.history) for f in good})
    if name is None:
        raise ConfigError(
            f"--step best: no checkpoint is of the end of an epoch, where {goal.metric} is known. Train with "
            "--keep-best METRIC, or give a step."
        )
    return next(finding for finding in good if finding.name == name)


def _is_final(findings: list[Finding], result: dict[str, Any] | None) -> bool:
    """Whether the run's end is newer than its checkpoints: then it has the weights that callbacks restored."""
    return result is not None and all(finding.step <= result["steps"] for finding in findings)


def _copy_final(run: Storage, target: Storage, result: dict[str, Any], say: Callable[[str], None]) -> Exported | None:
    """Copy what the run's end has exported, of which nothing has to be made again; None where that is gone."""
    own, digest, step = run.child(FOLDER), result.get("weights_sha256"), result["steps"]
    found = versions.whole(versions.look(own))
    # Versions by a raytf that left no mark are of the run's end, the only one that was exported.
    source = next((v for v in found if v.notes.get("weights_sha256", digest) == digest), None)
    if source is None:
        return None
    say(f"step {step}, from the end of the run")
    before = _holding(target, digest)
    if before is None and target.locate("") == own.locate("") and source is found[0]:
        before = source
    if before is not None:
        return Exported(target.locate(before.name), before.number, step, False)
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        versions.download(own, source, folder)
        version = versions.publish(folder, target, {"run": _name(run), "step": step, "weights_sha256": digest})
    return Exported(target.locate(version.name), version.number, step)


def _holding(target: Storage, digest: str | None) -> versions.Version | None:
    """The newest version, where it holds these weights."""
    newest = next(iter(versions.whole(versions.look(target))), None)
    return newest if newest is not None and digest and newest.notes.get("weights_sha256") == digest else None


def _load(run: Storage, finding: Finding, modules: tuple[str, ...], trust: bool) -> keras.Model:
    model, optimizer = architecture.rebuild(run, modules, trust)
    named = variables.weights(model, optimizer)
    tensors = durable.load(run, finding.name).tensors
    variables.restore(named, _renamed(tensors, list(named)))
    if optimizer is not None:
        optimizer.finalize_variable_values(model.trainable_variables)
    return model


def _renamed(tensors: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Tensors of model and optimizer by the names that they have here, found by their places.

    The names of an optimizer's hold names of layers, which may be others than in the process that trained.
    """
    here = {_place(name): name for name in wanted}
    parts = {part for part, _ in here}
    return {here.get(_place(name), name): value for name, value in tensors.items() if _place(name)[0] in parts}


def _place(name: str) -> tuple[str, str]:
    part, _, rest = name.partition("/")
    return part, rest.partition("/")[0]


def _name_inputs(model: keras.Model) -> None:
    """Call inputs by their layers, so that clients find the same names in every version.

    Keras numbers tensors without a name as they are made in a process; an input's layer is in the configuration.
    """
    for tensor in getattr(model, "inputs", None) or []:
        made_by = getattr(getattr(tensor, "_keras_history", None), "operation", None)
        if made_by is not None:
            tensor.name = made_by.name


def _publish(model: keras.Model, target: Storage, notes: dict[str, Any]) -> versions.Version:
    _name_inputs(model)
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        saved = os.path.join(folder, "saved_model")
        with quiet():
            run_user_code("model.export", lambda: model.export(saved, format="tf_saved_model", verbose=False))
        return versions.publish(saved, target, notes)


def _keras_bytes(model: keras.Model) -> bytes:
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = os.path.join(folder, KERAS_FILE)
        run_user_code("model.save", lambda: model.save(file))
        with open(file, "rb") as stream:
            return stream.read()


def _weights_bytes(model: keras.Model) -> bytes:
    """Its weights by their places, which needs nothing of the model's code."""
    return codec.encode({name: keras.ops.convert_to_numpy(v) for name, v in variables.weights(model).items()})


def _onnx_bytes(model: keras.Model) -> bytes:
    check_onnx()
    _name_inputs(model)
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = os.path.join(folder, "model.onnx")
        with quiet():
            run_user_code("model.export", lambda: model.export(file, format="onnx", verbose=False))
        with open(file, "rb") as stream:
            return stream.read()


def check_onnx() -> None:
    """Refuse ONNX where what writes it is not installed.

    Raises:
        ConfigError: says what to install.
    """
    try:
        import onnx  # noqa: F401
        import tf2onnx  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--format onnx needs {error.name}, which is not installed: pip install -c constraints.txt -e '.[onnx]'"
        ) from error


def _put_file(target: Storage, data: bytes, step: int, kind: str) -> Exported:
    name = f"model-{step}.{kind}"
    target.put(name, data)
    return Exported(target.locate(name), None, step)


def _name(run: Storage) -> str:
    return run.locate("").rstrip("/").rpartition("/")[2]


@contextlib.contextmanager
def quiet():
    """Keras's export prints and TensorFlow logs; neither tells a user of raytf anything."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
