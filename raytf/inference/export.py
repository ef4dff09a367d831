"""Exports a trained model: as a version for TensorFlow Serving, a .keras file, or ONNX.

A run exports its model at its end. Any checkpoint can be exported later, even while its run continues.
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
        step: global step of the weights; None if it is unknown.
        is_new: False if the newest version already held these weights.
    """

    place: str
    version: int | None
    step: int | None
    is_new: bool = True


#: Topics that a program explains only once.
_SERVING, _FILE = "export for serving", "model.keras"


def obstacles(model: keras.Model) -> list[Explained]:
    """Return one line for each reason why the model cannot be exported or loaded again. Nothing is written.

    Call this before training, while the model can still be changed.
    """
    problems = []
    try:
        with _quiet():
            _trace(model)
    except Exception as error:  # whatever the model's own code raises
        problems.append(
            Explained(
                f"the model cannot be exported for serving. Keras reported: {type(error).__name__}: "
                f"{one_line(error, 200)}... Give it one input, or a list or dict of inputs, as keras.Model(inputs, "
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

    If the newest version already holds these weights, as after a run that died while exporting, no version is added.

    Args:
        digest: `weights_sha256` of the model, if it is known.
        say: called with a line for each file that cannot be written, which names the file that replaces it.

    Returns:
        The locations of the exports, by name: `saved_model` and `keras`, each if the model allows it. Without `keras`,
        there is `weights`, which `load_weights` loads into a model.

    Raises:
        StorageError: storage refuses.
    """
    target = run.child(FOLDER)
    notes: dict[str, Any] = {"run": _name(run), "step": step, "weights_sha256": digest or weights_sha256(model)}
    written: dict[str, str] = {}
    # First, and by variable even if a layer saves other values: `fit` loads them into the program's model.
    run.put(WEIGHTS_FILE, _weights_bytes(model))
    try:
        version = _holding(target, notes["weights_sha256"]) or _publish(model, target, notes)
        written["saved_model"] = target.locate(version.name)
    except JobError as error:
        say(Explained(f"the model is not exported for serving: {one_line(error, 300)}", _SERVING))
    try:
        run.put(KERAS_FILE, _keras_bytes(model))
        written["keras"] = run.locate(KERAS_FILE)
    except JobError as error:  # it can still be served
        written["weights"] = run.locate(WEIGHTS_FILE)
        text = f"no {KERAS_FILE} is written, only {WEIGHTS_FILE} for raytf.load_weights: {one_line(error, 300)}"
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
    """Export the weights of one of a run's checkpoints, or of the run's end.

    Args:
        uri: the run's folder.
        to: folder of versions or files; `export/` of the run by default.
        step: `last`, `best` or a number of global steps.
        kind: saved_model, keras or onnx.
        modules: names or files of modules that register classes of the model.
        trust: run code from the configuration, such as that of Lambda layers.
        say: called with a line about the weights that are exported.

    Raises:
        ConfigError: there is no such run or checkpoint; the message lists the checkpoints.
        CheckpointError: the checkpoint is damaged.
        ModelError: the model cannot be rebuilt.
        StorageError: storage refuses.
    """
    run = Storage(uri)
    target = run.child(FOLDER) if to is None else Storage(to)
    if to is None and run.is_local and os.path.islink(target.root):
        raise ConfigError(
            f"{target.root} is a link, which may lead into another run. To export there, pass --to {target.root}."
        )
    findings = verify.inspect(run)
    result, damaged = attempt(lambda: run_log.read_result(run))
    if damaged is not None:
        say(f"ignoring the run's result: {damaged}")
    if not findings and result is None:
        raise ConfigError(
            f"{run.locate('')} is not a run: it has no checkpoints. Expected STORAGE/NAME; `raytf runs` lists the runs."
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
        ConfigError: there is no such checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    good = [finding for finding in findings if finding.state is Worth.WHOLE]
    if not good:
        raise ConfigError("the run has no whole checkpoint yet. `raytf verify RUN` lists its checkpoints.")
    if step == LAST:
        return good[0]
    if step == BEST:
        return _best(good)
    steps = ", ".join(str(s) for s in sorted({finding.step for finding in good}))
    if not (step.isascii() and step.isdecimal() and len(step) <= _STEP_DIGITS):
        raise ConfigError(f"--step {step}: expected a number of steps, last or best. Checkpoints: {steps}.")
    for finding in good:
        if finding.step == int(step):
            return finding
    for finding in findings:
        if finding.step == int(step) and finding.problems:
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged: {finding.problems[0]}. Whole checkpoints: {steps}."
            )
    raise ConfigError(f"--step {step}: there is no checkpoint of this step. Checkpoints: {steps}; --keep keeps more.")


def _best(good: list[CheckpointFinding]) -> CheckpointFinding:
    kept = next((f.document.best for f in good if f.document.best), None)
    if kept is not None:
        # --keep-best decided which values are better; the checkpoint that it kept has exactly this value.
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
            f"--step best: no checkpoint was saved at the end of an epoch, where {goal.metric} is known. Train with "
            "--keep-best METRIC, or pass a number of steps."
        )
    return next(finding for finding in good if finding.name == name)


def _is_final(findings: list[CheckpointFinding], result: dict[str, Any] | None) -> bool:
    """Return whether no checkpoint is newer than the run's end, which has the weights that callbacks restored."""
    return result is not None and all(finding.step <= result["steps"] for finding in findings)


def _copy_final(run: Storage, target: Storage, result: dict[str, Any], say: Callable[[str], None]) -> Exported | None:
    """Copy the version that the run exported at its end, or return None if it was deleted. Needs no model."""
    own, digest, step = run.child(FOLDER), result.get("weights_sha256"), result["steps"]
    exported = versions.whole(versions.inspect(own))
    # A version without a mark is from an older raytf, which exported only at the end of a run.
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
    """Refuse ONNX if the packages that write it are not installed.

    Raises:
        ConfigError: a package is missing; the message says what to install.
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
    """Have Keras export a model to a path that does not exist yet.

    Keras numbers unnamed inputs in the order in which a process makes them. Here, they get the names of their layers
    from the configuration, so that clients find the same names in every version.
    """
    for tensor in getattr(model, "inputs", None) or []:
        made_by = _keras.made_by(tensor)
        if made_by is not None:
            tensor.name = made_by.name
    with _quiet():
        run_user_code("model.export", lambda: model.export(path, format=kind, verbose=False))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the output of Keras's export and the logs of TensorFlow, which do not help a user of raytf."""
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
