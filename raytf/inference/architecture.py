"""The files with which any checkpoint of a run becomes a model again.

architecture.json    the model's configuration as Keras serializes it, and what one record looks like
model.keras          the model at the end of the run, where Keras can save it
weights.safetensors  its weights by variable
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import random
import sys
import zipfile
import zlib
from typing import Any

import keras

from raytf import _keras
from raytf.config import precision
from raytf.config.precision import Precision
from raytf.data import tree
from raytf.data.sources.base import Spec
from raytf.errors import ConfigError, DamagedFileError, JobError, ModelError, one_line
from raytf.inference import own_run, untrusted_model
from raytf.inference.own_run import overrides_step
from raytf.inference.user_model import run_user_code, takes_training, with_precision
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

FILE, KERAS_FILE, WEIGHTS_FILE = "architecture.json", "model.keras", "weights.safetensors"
_VERSION = 1
#: A model of more is not made a second time only to see whether it can be.
_MOST_PARAMETERS = 20_000_000
_LEAF = "__array__"
#: Nested models make deep configurations.
_DEPTH = 400
_SHAPE = untrusted_json.record(
    {},
    {
        "version": untrusted_json.whole,
        "config": untrusted_json.values(untrusted_json.anything),
        "problem": untrusted_json.text,
    },
)
#: Bytes of one record: far more than fits into a step.
_MOST_ELEMENTS = 2**28
_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64", "string"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def describe(model: keras.Model, x: Any, others: tuple[Any, Any] = (None, None), records: int = 1) -> bytes:
    """Return the contents of the file, with the reason where Keras cannot serialize the model.

    Args:
        x: inputs of one or more records, nested.
        others: their labels and weights, which metrics and a `train_step` of the model's own need.
        records: how many there are in a shard, which such a `train_step` needs.
    """
    document: dict[str, Any] = {
        "version": _VERSION,
        "keras": keras.__version__,
        "inputs": _spec(x),
        "records": records,
        "batch": [None if part is None else _spec(part) for part in (x, *others)],
        # A model of one's own class has the policies of its layers from here alone.
        "precision": dataclasses.asdict(precision.of_process()),
    }
    try:
        return json.dumps({**document, "config": keras.saving.serialize_keras_object(model)}, indent=1).encode()
    except Exception as error:  # a layer's own get_config may raise whatever it likes
        return json.dumps({**document, "problem": f"{type(error).__name__}: {one_line(error, 300)}"}, indent=1).encode()


def obstacles(model: keras.Model) -> list[str]:
    """Return what will keep Keras from making the model again, in a line; the weights are not copied."""
    layer = next((layer for layer in _keras.layers_within(model) if isinstance(layer, keras.layers.Lambda)), None)
    if layer is not None:
        return [
            f"layer {layer.name!r} is a Lambda, whose Python code keras.saving.load_model does not run. Make it a "
            "layer of a class with get_config(); Result.load_model() takes the job's model function."
        ]
    drawn = random.getstate()  # layers that are made draw seeds, of which other ranks know nothing
    own = {type(layer).__name__: type(layer) for layer in _keras.layers_within(model)}  # also those of a script
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
        if model.count_params() <= _MOST_PARAMETERS:
            config.pop("compile_config", None)
            keras.saving.deserialize_keras_object(config, custom_objects=own)
    except Exception as error:  # a layer's own get_config or from_config may raise whatever it likes
        return [
            f"the model cannot be made again from its configuration, Keras says: {type(error).__name__}: "
            f"{_reason(error, 200)}... "
            "In its classes, define get_config() with the arguments of their __init__, and register them "
            "(keras.saving.register_keras_serializable); Result.load_model() takes the job's model function."
        ]
    finally:
        random.setstate(drawn)
    return []


def precision_of(run: Storage) -> Precision:
    """Return the dtypes with which the run's model computes, or Keras's defaults where the run has none."""
    return precision.parse(_document(run).get("precision"))


def call(model: keras.Model, run: Storage) -> None:
    """Call a model with one record of zeros like the run's, which builds all of its weights."""
    document = _document(run)
    if overrides_step(model) and model.compiled and document.get("batch"):
        own_run.build(model, tuple(_zeros(document["batch"], _records(document))))
        return
    if all(layer.built for layer in _keras.layers_within(model)):
        return  # a call with zeros might not be allowed, as with labels of a loss that is a layer
    inputs = document.get("inputs")
    if inputs is not None:
        x = _zeros(inputs)
        run_user_code("the model", lambda: model(x, training=False) if takes_training(model) else model(x))


def build_metrics(model: keras.Model, run: Storage) -> None:
    """Build the compiled loss and metrics of a model that was called, as Keras's `fit` does before its first step."""
    if not model.compiled or overrides_step(model):
        return
    batch = _document(run).get("batch")
    if batch:
        with contextlib.suppress(Exception):  # a metric may raise anything; `evaluate` builds it later, or raises it
            _keras.build_compiled(model, tuple(_zeros(batch)))


def _document(run: Storage) -> dict[str, Any]:
    try:
        document = json.loads(run.get_or_none(FILE) or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def rebuild(run: Storage, modules: tuple[str, ...] = (), trust: bool = False) -> tuple[keras.Model, Any]:
    """Return the run's model with meaningless weights, and its optimizer where that keeps averages of the weights.

    Args:
        run: its folder.
        modules: names or files of modules that register classes which the model needs.
        trust: run code that the configuration holds, as of Lambda layers.

    Raises:
        ModelError: the run has kept no model that can be made again; it says what to do.
        DamagedFileError: the file is none that raytf has written.
        ConfigError: a module cannot be imported.
    """
    try:
        document = untrusted_json.read(run, FILE, _SHAPE, untrusted_json.LARGE, _DEPTH)
    except DamagedFileError as error:
        raise DamagedFileError(error.file, error.reason, "The run's next start writes it again.") from None
    if document is None:
        raise ModelError(
            f"{run.locate(FILE)} is missing: an older raytf started this run. Its next start writes the file."
        )
    if document.get("version", 0) > _VERSION:
        raise ModelError(f"{run.locate(FILE)} was written by a newer raytf. Update raytf.")
    if "config" not in document or "inputs" not in document:
        raise ModelError(
            f"the run's model cannot be made again from its configuration, Keras says: {document.get('problem')}. Give "
            "its layers a get_config() and register them (keras.saving.register_keras_serializable), or let the run "
            "finish: its end exports the model as it is."
        )
    config = dict(document["config"])
    compiled = config.pop("compile_config", None) or {}
    optimizer = compiled.get("optimizer") if isinstance(compiled, dict) else None
    _refuse([config, optimizer], run.locate(FILE), trust)
    for module in modules:
        _import(module)
    with with_precision(precision.parse(document.get("precision"))):
        model = _deserialize(config, trust)
        if not isinstance(model, keras.Model):
            raise DamagedFileError(run.locate(FILE), f"it describes a {type(model).__name__}, expected a model")
        try:
            x = _zeros(document["inputs"])
            model(x, training=False) if takes_training(model) else model(x)
        except DamagedFileError:
            raise
        except Exception as error:  # of Keras, TensorFlow, or a layer of the job's own
            raise ModelError(
                f"the model cannot be called on a record as {run.locate(FILE)} describes it: {type(error).__name__}: "
                f"{one_line(error, 300)}"
            ) from error
        return model, _averaging(model, optimizer)


def _refuse(config: Any, where: str, trust: bool) -> None:
    """Refuse parts that read files, and untrusted ones that run code of the configuration.

    Raises:
        ModelError: says which layer would do what.
    """
    parts = untrusted_model.find(config)
    files, code = [part for part in parts if part.reads_files], [part for part in parts if not part.reads_files]
    if files:
        raise ModelError(
            f"the model has {files[0].what}{_more(files)}. raytf makes no model that reads files, whatever is trusted "
            f"(the configuration is {where}). {files[0].fix}"
        )
    if code and not trust:
        raise ModelError(
            f"the model has {code[0].what}{_more(code)}. It would run here, with all that you may do. Pass --trust to "
            f"run it, only if you trust everybody who can write {where}."
        )


def check_archive(file: str) -> None:
    """Refuse a file that would read others, or is not a .keras file.

    Raises:
        DamagedFileError, ModelError: says what is wrong.
    """
    try:
        with zipfile.ZipFile(file) as archive, archive.open("config.json") as member:
            data = member.read(untrusted_json.LARGE + 1)
    except (OSError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedFileError(file, f"it is no .keras file ({one_line(error, 100)})") from error
    if len(data) > untrusted_json.LARGE:
        raise DamagedFileError(file, "its config.json is too large")
    config = untrusted_json.parse(data, file, untrusted_json.values(untrusted_json.anything), _DEPTH)
    _refuse(config, file, trust=True)  # code is refused by Keras's safe mode, unless the process has turned that off


def _reason(error: Exception, limit: int) -> str:
    """Return Keras's reason, which follows the configurations of all enclosing objects."""
    return one_line(str(error).rpartition("Exception encountered:")[2] or error, limit)


def _more(parts: list[untrusted_model.UntrustedPart]) -> str:
    return f" (and {len(parts) - 1} more such)" if len(parts) > 1 else ""


def _deserialize(config: Any, trust: bool) -> Any:
    names = ", ".join(untrusted_model.foreign(config)[:3])  # Keras takes the configuration apart
    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=not trust)
    except Exception as error:
        reason = _reason(error, 300)
        if "safe_mode" in reason or "unsafe" in reason.lower():
            raise ModelError(f"Keras considers the model unsafe: {reason}") from error
        if "Could not locate" in reason or "registered" in reason:
            raise ModelError(
                f"the model needs classes or functions of the job's own{f' ({names})' if names else ''}, and raytf "
                f"imports none because a file names it: {reason} Pass the file that registers them "
                "(keras.saving.register_keras_serializable), as in --module jobs/mine.py."
            ) from error
        raise ModelError(
            f"the model cannot be made again, Keras {keras.__version__} says: {type(error).__name__}: {reason} Where "
            "the model has custom classes of the job, pass the file that registers them, as in --module jobs/mine.py."
        ) from error


def _averaging(model: keras.Model, optimizer: Any) -> Any:
    """Return the optimizer, where the weights to use are averages that it keeps."""
    if not optimizer or '"use_ema": true' not in json.dumps(optimizer):
        return None
    try:
        built: Any = keras.saving.deserialize_keras_object(optimizer)
        built.build(model.trainable_variables)
    except Exception as error:
        raise ModelError(
            f"the optimizer, which averages weights, cannot be made again: {one_line(error, 300)}"
        ) from error
    return built


def _import(name: str) -> None:
    """Import a module by name or file; code under `if __name__ == "__main__"` does not run."""
    try:
        if not name.endswith(".py"):
            sys.path.insert(0, os.getcwd())
            importlib.import_module(name)
            return
        sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
        spec = importlib.util.spec_from_file_location(os.path.basename(name).removesuffix(".py"), name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(f"--module {name} cannot be imported: {one_line(error, 300)}.") from error
    except Exception as error:
        raise JobError(f"--module {name} raised {type(error).__name__}: {one_line(error, 300)}") from error


def _spec(x: Any) -> Any:
    def described(leaf: Any) -> dict[str, Any]:
        return {_LEAF: [keras.backend.standardize_dtype(Spec.of(leaf).dtype), list(leaf.shape[1:])]}

    def with_rows(leaf: Any) -> dict[str, Any]:
        dtype, shape = described(leaf)[_LEAF]
        return {_LEAF: [dtype, shape[1:], shape[0]]}

    return tree.merged(x, with_rows, described)


def _zeros(spec: Any, count: int = 1) -> Any:
    """Return records of zeros, as `_spec` described them."""
    if spec is None:
        return None
    if isinstance(spec, dict) and set(spec) == {_LEAF}:
        dtype, shape, rows = _leaf(spec[_LEAF])
        return keras.ops.convert_to_tensor(Spec((), dtype).zeros((count * rows, *shape)))
    if isinstance(spec, dict):
        return {name: _zeros(part, count) for name, part in spec.items()}
    if not isinstance(spec, list):
        raise DamagedFileError(FILE, "'inputs' describes no record")
    return [_zeros(part, count) for part in spec]


def _records(document: dict[str, Any]) -> int:
    count = document.get("records", 1)
    if untrusted_json.whole(count) or not 0 < count < 2**20:
        raise DamagedFileError(FILE, "'records' is not a number of records")
    return count


def _leaf(value: Any) -> tuple[str, list[int], int]:
    """Return dtype and shape of a row of an array, and how many rows a record has.

    Raises:
        DamagedFileError: it describes none, or one that is larger than any record.
    """
    is_known = isinstance(value, list) and len(value) in (2, 3) and value[0] in _DTYPES
    shape: Any = [*value[1], *value[2:]] if is_known and isinstance(value[1], list) else [None]
    if untrusted_json.each(untrusted_json.whole)(shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise DamagedFileError(FILE, "'inputs' describes no record, or one that is too large")
    return value[0], value[1], value[2] if len(value) > 2 else 1
