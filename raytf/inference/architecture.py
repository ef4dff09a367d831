"""The files that turn any checkpoint of a run back into a model.

architecture.json    the model's configuration as Keras serializes it, and the dtypes and shapes of one record
model.keras          the model at the end of the run, if Keras can save it
weights.safetensors  the weights at the end of the run, by variable
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
#: A model with more parameters is not built a second time just to check that it can be.
_MOST_PARAMETERS = 20_000_000
_LEAF = "__array__"
#: The greatest depth of a configuration: nested models have deep ones.
_DEPTH = 400
_SHAPE = untrusted_json.record(
    {},
    {
        "version": untrusted_json.whole,
        "config": untrusted_json.values(untrusted_json.anything),
        "problem": untrusted_json.text,
    },
)
#: The most elements of an array in one record: far more than fit into a step.
_MOST_ELEMENTS = 2**28
_DTYPES = {"bool", "bfloat16", "float16", "float32", "float64", "string"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def describe(model: keras.Model, x: Any, others: tuple[Any, Any] = (None, None), records: int = 1) -> bytes:
    """Return the contents of architecture.json: the model's configuration, or why Keras cannot serialize it.

    Args:
        x: inputs of one or more records, nested.
        others: labels and weights of these records, which metrics and a custom `train_step` need.
        records: number of records in a shard, which a custom `train_step` needs.
    """
    document: dict[str, Any] = {
        "version": _VERSION,
        "keras": keras.__version__,
        "inputs": _spec(x),
        "records": records,
        "batch": [None if part is None else _spec(part) for part in (x, *others)],
        # A model of a custom class gets the policies of its layers only from here.
        "precision": dataclasses.asdict(precision.of_process()),
    }
    try:
        return json.dumps({**document, "config": keras.saving.serialize_keras_object(model)}, indent=1).encode()
    except Exception as error:  # a layer's own get_config may raise anything
        return json.dumps({**document, "problem": f"{type(error).__name__}: {one_line(error, 300)}"}, indent=1).encode()


def obstacles(model: keras.Model) -> list[str]:
    """Return why Keras cannot rebuild the model, as a list of at most one line. No weights are copied."""
    layer = next((layer for layer in _keras.layers_within(model) if isinstance(layer, keras.layers.Lambda)), None)
    if layer is not None:
        return [
            f"layer {layer.name!r} is a Lambda, whose Python code keras.saving.load_model does not run. Replace "
            "it with a layer class that has get_config(), or pass the job's model function to Result.load_model()."
        ]
    drawn = random.getstate()  # new layers draw seeds, which other ranks do not draw
    own = {type(layer).__name__: type(layer) for layer in _keras.layers_within(model)}  # including those of a script
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
        if model.count_params() <= _MOST_PARAMETERS:
            config.pop("compile_config", None)
            keras.saving.deserialize_keras_object(config, custom_objects=own)
    except Exception as error:  # a layer's own get_config or from_config may raise anything
        return [
            f"the model cannot be rebuilt from its configuration. Keras reported: {type(error).__name__}: "
            f"{_reason(error, 200)}... "
            "In its classes, define get_config() with the arguments of __init__, and register them "
            "(keras.saving.register_keras_serializable), or pass the job's model function to Result.load_model()."
        ]
    finally:
        random.setstate(drawn)
    return []


def precision_of(run: Storage) -> Precision:
    """Return the precision of the run's model, or Keras's defaults if the run recorded none."""
    return precision.parse(_document(run).get("precision"))


def call(model: keras.Model, run: Storage) -> None:
    """Call a model with one record of zeros, shaped like the run's records, to build all of its weights."""
    document = _document(run)
    if overrides_step(model) and model.compiled and document.get("batch"):
        own_run.build(model, tuple(_zeros(document["batch"], _records(document))))
        return
    if all(layer.built for layer in _keras.layers_within(model)):
        return  # a call with zeros might fail, such as in a layer that computes a loss from labels
    inputs = document.get("inputs")
    if inputs is not None:
        x = _zeros(inputs)
        run_user_code("the model", lambda: model(x, training=False) if takes_training(model) else model(x))


def build_metrics(model: keras.Model, run: Storage) -> None:
    """Build the compiled loss and metrics of a built model, as Keras's `fit` does before its first step."""
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
    """Return the run's model with arbitrary weights, and its optimizer if that keeps averages of the weights.

    Args:
        run: the run's folder.
        modules: names or files of modules that register classes of the model.
        trust: run code from the configuration, such as that of Lambda layers.

    Raises:
        ModelError: the run has no model that can be rebuilt; the message says what to do.
        DamagedFileError: the file is not as raytf writes it.
        ConfigError, JobError: a module cannot be imported, or its code raised.
    """
    try:
        document = untrusted_json.read(run, FILE, _SHAPE, untrusted_json.LARGE, _DEPTH)
    except DamagedFileError as error:
        raise DamagedFileError(error.file, error.reason, "Start the run again to rewrite it.") from None
    if document is None:
        raise ModelError(
            f"{run.locate(FILE)} is missing: an older raytf started this run. Start the run again to write it."
        )
    if document.get("version", 0) > _VERSION:
        raise ModelError(f"{run.locate(FILE)} was written by a newer raytf. Update raytf.")
    if "config" not in document or "inputs" not in document:
        raise ModelError(
            f"the run's model cannot be rebuilt from its configuration. Keras reported: {document.get('problem')}. "
            "Define get_config() in its layers and register them (keras.saving.register_keras_serializable), or let "
            "the run finish, which exports the model as it is."
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
        except Exception as error:  # from Keras, TensorFlow, or one of the job's layers
            raise ModelError(
                f"the model cannot be called on the record that {run.locate(FILE)} describes: {type(error).__name__}: "
                f"{one_line(error, 300)}"
            ) from error
        return model, _averaging(model, optimizer)


def _refuse(config: Any, where: str, trust: bool) -> None:
    """Refuse parts that read files and, without `trust`, parts that run code from the configuration.

    Raises:
        ModelError: there is such a part; the message says which layer would do what.
    """
    parts = untrusted_model.find(config)
    files, code = [part for part in parts if part.reads_files], [part for part in parts if not part.reads_files]
    if files:
        raise ModelError(
            f"the model has {files[0].what}{_more(files)}. raytf loads no model that reads files, even a trusted one "
            f"(the configuration is {where}). {files[0].fix}"
        )
    if code and not trust:
        raise ModelError(
            f"the model has {code[0].what}{_more(code)}. It would run here with all of your rights. Pass --trust "
            f"only if you trust everybody who can write {where}."
        )


def check_archive(file: str) -> None:
    """Refuse a file that is not a .keras file, or whose model would read other files.

    Raises:
        DamagedFileError, ModelError: the file is refused; the message says why.
    """
    try:
        with zipfile.ZipFile(file) as archive, archive.open("config.json") as member:
            data = member.read(untrusted_json.LARGE + 1)
    except (OSError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedFileError(file, f"it is not a .keras file ({one_line(error, 100)})") from error
    if len(data) > untrusted_json.LARGE:
        raise DamagedFileError(file, "its config.json is too large")
    config = untrusted_json.parse(data, file, untrusted_json.values(untrusted_json.anything), _DEPTH)
    _refuse(config, file, trust=True)  # code is refused by Keras's safe mode, unless the process has turned that off


def _reason(error: Exception, limit: int) -> str:
    """Return Keras's reason, without the configurations of all enclosing objects before it."""
    return one_line(str(error).rpartition("Exception encountered:")[2] or error, limit)


def _more(parts: list[untrusted_model.UntrustedPart]) -> str:
    return f" (and {len(parts) - 1} more such parts)" if len(parts) > 1 else ""


def _deserialize(config: Any, trust: bool) -> Any:
    names = ", ".join(untrusted_model.foreign(config)[:3])  # first, as Keras modifies the configuration
    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=not trust)
    except Exception as error:
        reason = _reason(error, 300)
        if "safe_mode" in reason or "unsafe" in reason.lower():
            raise ModelError(f"Keras considers the model unsafe: {reason}") from error
        if "Could not locate" in reason or "registered" in reason:
            raise ModelError(
                f"the model needs classes or functions of the job{f' ({names})' if names else ''}, and raytf imports "
                f"nothing just because a file names it: {reason} Pass the file that registers them "
                "(keras.saving.register_keras_serializable), as in --module jobs/mine.py."
            ) from error
        raise ModelError(
            f"the model cannot be rebuilt. Keras {keras.__version__} reported: {type(error).__name__}: {reason} If "
            "the model has custom classes, pass the file that registers them, as in --module jobs/mine.py."
        ) from error


def _averaging(model: keras.Model, optimizer: Any) -> Any:
    """Return the optimizer if it keeps averages that are the weights to use, else None."""
    if not optimizer or '"use_ema": true' not in json.dumps(optimizer):
        return None
    try:
        built: Any = keras.saving.deserialize_keras_object(optimizer)
        built.build(model.trainable_variables)
    except Exception as error:
        raise ModelError(
            f"the optimizer, which averages the weights, cannot be rebuilt: {one_line(error, 300)}"
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
    """Return records of zeros with the dtypes and shapes of a `_spec`."""
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
    """Return the dtype and shape of one row of an array, and the number of rows in a record.

    Raises:
        DamagedFileError: the value describes no array, or one that is larger than any record.
    """
    is_known = isinstance(value, list) and len(value) in (2, 3) and value[0] in _DTYPES
    shape: Any = [*value[1], *value[2:]] if is_known and isinstance(value[1], list) else [None]
    if untrusted_json.each(untrusted_json.whole)(shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise DamagedFileError(FILE, "'inputs' describes no record, or one that is too large")
    return value[0], value[1], value[2] if len(value) > 2 else 1
