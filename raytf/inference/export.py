"""Exports of a trained model: versions for TensorFlow Serving, a .keras file, ONNX.

A run exports its model at its end. Any checkpoint can be exported later, also while its run continues.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from raytf import _keras, _tensorflow
from raytf.checkpoint import codec, durable, variables, verify
from raytf.checkpoint.variables import weights_sha256
from raytf.checkpoint.verify import CheckpointFinding, Worth
from raytf.config.objective import MetricObjective
from raytf.errors import CheckpointError, ConfigError, JobError, not_installed, one_line
from raytf.inference import architecture, trained_model, versions
from raytf.inference.architecture import KERAS_FILE, WEIGHTS_FILE
from raytf.inference.user_model import run_user_code
from raytf.runs import run_log
from raytf.runs.program_output import Explained
from raytf.runs.run_state import main_goal
from raytf.storage.storage import Storage
from raytf.storage.untrusted_json import attempt

FOLDER = "export"
LAST, BEST = "last", "best"
_STEP_DIGITS = 15


@dataclass(frozen=True)
class Exported:
    """The result of `export_run`.

    Attributes:
        place: location of the model, as shown to users.
        version: number of the version; None for a file.
        step: global steps that the weights have seen; None where it is not known.
        is_new: False where the newest version held these weights already.
    """

    place: str
    version: int | None
    step: int | None
    is_new: bool = True


#: Topics that a program explains only once.
_SERVING, _FILE = "export for serving", "model.keras"


def obstacles(model: keras.Model) -> list[Explained]:
    """Return what will keep a model from being exported or loaded again, a line each. Nothing is written.

    Call it before training: at its end it is too late to change the model.
    """
    problems = []
    try:
        with _quiet():
            _trace(model)
    except Exception as error:  # whatever the model's own code raises
        problems.append(
            Explained(
                f"the model cannot be exported for serving, Keras says: {type(error).__name__}: "
                f"{one_line(error, 200)}... Give it one input, or a list or dict of them, as keras.Model(inputs, "
                "outputs) does.",
                _SERVING,
            )
        )
    return [*problems, *(Explained(text, _FILE) for text in architecture.obstacles(model))]


def _trace(model: keras.Model) -> None:
    """Make a signature of the model: the part of `model.export` that can fail before it writes files."""
    archive = keras.export.ExportArchive()
    function = archive.track_and_add_endpoint("serve", model, _keras.input_signature(model))
    _tensorflow.make_signatures({"serving_default": function})


def export(
    model: keras.Model,
    run: Storage,
    step: int,
    digest: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Export the model at the end of a run: its weights by variable, the next version in `export/` (signature
    `serving_default`), and `model.keras`.

    Where the newest version holds these weights already, as after a run that died at its end, it stays the newest.

    Args:
        digest: `weights_sha256` of the model, where it is known.
        say: called with what cannot be written, and what there is in its place.

    Returns:
        What was written, name -> location: `saved_model` and `keras`, each where the model allows it; `weights` where
        there is no `keras`, which `load_weights` puts into a model.

    Raises:
        StorageError: storage refuses.
    """
    target = run.child(FOLDER)
    notes: dict[str, Any] = {"run": _name(run), "step": step, "weights_sha256": digest or weights_sha256(model)}
    written: dict[str, str] = {}
    # First, and by variable, whatever a layer saves of itself: `fit` puts these weights into the program's model.
    run.put(WEIGHTS_FILE, _weights_bytes(model))
    try:
        version = _holding(target, notes["weights_sha256"]) or _publish(model, target, notes)
        written["saved_model"] = target.locate(version.name)
    except JobError as error:
        say(Explained(f"the model is not exported for serving: {one_line(error, 300)}", _SERVING))
    try:
        run.put(KERAS_FILE, _keras_bytes(model))
        written["keras"] = run.locate(KERAS_FILE)
    except JobError as error:  # it can be served all the same
        written["weights"] = run.locate(WEIGHTS_FILE)
        text = f"there is no {KERAS_FILE}, but {WEIGHTS_FILE} for raytf.load_weights: {one_line(error, 300)}"
        say(Explained(text, _FILE))
    return written


def export_run(
    uri: str,
    to: str | None = None,
    step: str = LAST,
    kind: str = "saved_model",
    modules: tuple[str, ...] = (),
    trust: bool = False,
    say: Callable[[str], None] = print,
) -> Exported:
    """Export the weights of one of a run's checkpoints, or those of its end.

    Args:
        uri: the run's folder.
        to: folder of versions or files; `export/` of the run by default.
        step: `last`, `best` or a number of global steps.
        kind: saved_model, keras or onnx.
        modules: names or files of modules that register classes which the model needs.
        trust: run code that the configuration holds, as of Lambda layers.
        say: called with what is exported.

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
    findings = verify.inspect(run)
    result, damaged = attempt(lambda: run_log.read_result(run))
    if damaged is not None:
        say(f"without the run's end: {damaged}")
    if not findings and result is None:
        raise ConfigError(
            f"{run.locate('')} is not a run: it has no checkpoints. Expected STORAGE/NAME; `raytf runs` lists them."
        )
    final = result if step == LAST and _is_final(findings, result) else None
    if final is not None and kind == "saved_model":
        copied = _copy_final(run, target, final, say)
        if copied is not None:
            return copied
    data = run.get_or_none(KERAS_FILE) if final is not None and kind == "keras" else None
    if final is not None and data is not None:
        say(f"step {final['steps']}, from the end of the run")
        return _put_file(target, data, final["steps"], kind)
    finding = choose(findings, step)
    say(f"step {finding.step}, from checkpoint {finding.name}")
    model = _load(run, finding, modules, trust)
    notes: dict[str, Any] = {"run": _name(run), "step": finding.step, "weights_sha256": weights_sha256(model)}
    if kind == "saved_model":
        before = _holding(target, notes["weights_sha256"])
        version = before or _publish(model, target, notes)
        return Exported(target.locate(version.name), version.number, finding.step, before is None)
    return _put_file(target, _keras_bytes(model) if kind == "keras" else _onnx_bytes(model), finding.step, kind)


def choose(findings: list[CheckpointFinding], step: str) -> CheckpointFinding:
    """Return the checkpoint to export.

    Args:
        findings: all checkpoints, the newest first.
        step: `last`, `best` or a number.

    Raises:
        ConfigError: there is none such.
        CheckpointError: it is damaged.
    """
    good = [finding for finding in findings if finding.state is Worth.WHOLE]
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


def _best(good: list[CheckpointFinding]) -> CheckpointFinding:
    kept = next((f.document.best for f in good if f.document.best), None)
    if kept is not None:
        # The flag decided which values are better; the checkpoint that was kept has this very value.
        value = MetricObjective(kept[0], is_largest=True).value_at
        finding = next((f for f in good if value(f.step, f.document.history) == kept[1]), None)
        if finding is not None:
            return finding
    goal = main_goal(good[0].document.history)
    if goal is None:
        raise ConfigError(
            "--step best: the run has no metric yet whose name shows which values are better. Pass a number of steps."
        )
    name = goal.best({f.name: goal.value_at(f.step, f.document.history) for f in good})
    if name is None:
        raise ConfigError(
            f"--step best: no checkpoint is of the end of an epoch, where {goal.metric} is known. Train with "
            "--keep-best METRIC, or pass a number of steps."
        )
    return next(finding for finding in good if finding.name == name)


def _is_final(findings: list[CheckpointFinding], result: dict[str, Any] | None) -> bool:
    """Return whether the run's end is newer than its checkpoints: then it has the weights that callbacks restored."""
    return result is not None and all(finding.step <= result["steps"] for finding in findings)


def _copy_final(run: Storage, target: Storage, result: dict[str, Any], say: Callable[[str], None]) -> Exported | None:
    """Copy the version that the run's end exported, which needs no model; return None where it was deleted."""
    own, digest, step = run.child(FOLDER), result.get("weights_sha256"), result["steps"]
    exported = versions.whole(versions.inspect(own))
    # A version without a mark is of an older raytf, which exported only at the end of a run.
    source = next((v for v in exported if v.notes.get("weights_sha256", digest) == digest), None)
    if source is None:
        return None
    say(f"step {step}, from the end of the run")
    before = _holding(target, digest)
    if before is None and target.locate("") == own.locate("") and source is exported[0]:
        before = source
    if before is not None:
        return Exported(target.locate(before.name), before.number, step, False)
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        versions.download(own, source, folder)
        version = versions.publish(folder, target, {"run": _name(run), "step": step, "weights_sha256": digest})
    return Exported(target.locate(version.name), version.number, step)


def _holding(target: Storage, digest: str | None) -> versions.Version | None:
    newest = next(iter(versions.whole(versions.inspect(target))), None)
    return newest if newest is not None and digest and newest.notes.get("weights_sha256") == digest else None


def _load(run: Storage, finding: CheckpointFinding, modules: tuple[str, ...], trust: bool) -> keras.Model:
    model, optimizer = architecture.rebuild(run, modules, trust)
    named = variables.weights(model, optimizer)
    tensors = durable.load(run, finding.name).tensors
    variables.restore(named, trained_model.renamed(tensors, list(named)))
    if optimizer is not None:
        optimizer.finalize_variable_values(model.trainable_variables)
    return model


def _publish(model: keras.Model, target: Storage, notes: dict[str, Any]) -> versions.Version:
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        saved = os.path.join(folder, "saved_model")
        _export(model, saved, "tf_saved_model")
        return versions.publish(saved, target, notes)


def check_onnx() -> None:
    """Refuse ONNX where what writes it is not installed.

    Raises:
        ConfigError: it is not; it says what to install.
    """
    try:
        import onnx  # noqa: F401
        import tf2onnx  # noqa: F401
    except ImportError as error:
        raise not_installed("--format onnx", "onnx", error.name) from error


def _weights_bytes(model: keras.Model) -> bytes:
    return codec.encode({name: keras.ops.convert_to_numpy(v) for name, v in variables.weights(model).items()})


def _keras_bytes(model: keras.Model) -> bytes:
    return _written(KERAS_FILE, lambda file: run_user_code("model.save", lambda: model.save(file)))


def _onnx_bytes(model: keras.Model) -> bytes:
    check_onnx()
    return _written("model.onnx", lambda file: _export(model, file, "onnx"))


def _written(name: str, write: Callable[[str], None]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = Path(folder, name)
        write(str(file))
        return file.read_bytes()


def _export(model: keras.Model, path: str, kind: str) -> None:
    """Have Keras export a model to a path that is not there yet.

    Keras numbers inputs without a name as they are made in a process. Here they get the names of their layers, which
    the configuration holds, so that clients find the same names in every version.
    """
    for tensor in getattr(model, "inputs", None) or []:
        made_by = _keras.made_by(tensor)
        if made_by is not None:
            tensor.name = made_by.name
    with _quiet():
        run_user_code("model.export", lambda: model.export(path, format=kind, verbose=False))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Keras's export prints and TensorFlow logs; neither helps a user of raytf."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _put_file(target: Storage, data: bytes, step: int, kind: str) -> Exported:
    name = f"model-{step}.{kind}"
    target.put(name, data)
    return Exported(target.locate(name), None, step)


def _name(run: Storage) -> str:
    return run.locate("").rstrip("/").rpartition("/")[2]
