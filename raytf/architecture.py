"""What a run keeps of its model beside weights, so that any of its checkpoints becomes a model again.

architecture.json    the model's configuration as Keras serializes it, and what one record looks like
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import random
import sys
from typing import Any

import keras
import numpy as np

from raytf import precision
from raytf.data import tree
from raytf.errors import ConfigError, JobError, ModelError, one_line
from raytf.model import run_user_code, takes_training, with_precision
from raytf.precision import Precision
from raytf.storage import Storage

FILE = "architecture.json"
_VERSION = 1
#: A model of more is not made a second time only to see whether it can be.
_MOST_PARAMETERS = 20_000_000
_LEAF = "__array__"


def describe(model: keras.Model, x: Any) -> bytes:
    """The file; where Keras cannot serialize the model it says so, and why.

    Args:
        x: inputs of one or more records, nested.
    """
    document: dict[str, Any] = {"version": _VERSION, "keras": keras.__version__, "inputs": _spec(x)}
    # A model of one's own class has the policies of its layers from here alone.
    document["precision"] = dataclasses.asdict(precision.of_process())
    try:
        document["config"] = keras.saving.serialize_keras_object(model)
        return json.dumps(document, indent=1).encode()
    except Exception as error:  # a layer's own get_config may raise whatever it likes
        document.pop("config", None)
        document["problem"] = f"{type(error).__name__}: {one_line(error, 300)}"
        return json.dumps(document, indent=1).encode()


def obstacles(model: keras.Model) -> list[str]:
    """What will keep Keras from making the model again, one line; it is tried with the weights left out."""
    layer = next((layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Lambda)), None)
    if layer is not None:
        return [
            f"layer {layer.name!r} is a Lambda, whose Python code keras.saving.load_model does not run. Make it a "
            "layer of a class with get_config(); Result.load_model() takes the job's model function."
        ]
    drawn = random.getstate()  # layers that are made draw seeds, of which other ranks know nothing
    own = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}  # also those of a script
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
        if model.count_params() <= _MOST_PARAMETERS:
            config.pop("compile_config", None)
            keras.saving.deserialize_keras_object(config, custom_objects=own)
    except Exception as error:  # a layer's own get_config or from_config may raise whatever it likes
        said = one_line(str(error).rpartition("Exception encountered:")[2] or error, 200)
        return [
            f"the model cannot be made again from its configuration, Keras says: {type(error).__name__}: {said}... "
            "Give its classes a get_config() with the arguments of their __init__, and register them "
            "(keras.saving.register_keras_serializable); Result.load_model() takes the job's model function."
        ]
    finally:
        random.setstate(drawn)
    return []


def precision_of(run: Storage) -> Precision:
    """With which dtypes the run's model computes; Keras's defaults where the run does not say."""
    return precision.parse(_document(run).get("precision"))


def call(model: keras.Model, run: Storage) -> None:
    """Call a model with one record of zeros like the run's, so that all of its weights are there."""
    inputs = _document(run).get("inputs")
    if inputs is not None:
        x = _zeros(inputs)
        run_user_code("the model", lambda: model(x, training=False) if takes_training(model) else model(x))


def _document(run: Storage) -> dict[str, Any]:
    try:
        document = json.loads(run.get_or_none(FILE) or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def rebuild(run: Storage, modules: tuple[str, ...] = (), trust: bool = False) -> tuple[keras.Model, Any]:
    """The run's model with weights of no meaning, and its optimizer where that keeps averages of the weights.

    Args:
        run: its folder.
        modules: names or files of modules that register classes which the model needs.
        trust: run the Python code of Lambda layers.

    Raises:
        ModelError: the run has kept no model that can be made again; it says what to do.
        ConfigError: a module cannot be imported.
    """
    data = run.get_or_none(FILE)
    if data is None:
        raise ModelError(
            f"{run.locate(FILE)} is missing: this run was begun by an older raytf. Its next start writes it."
        )
    document = json.loads(data)
    if document.get("version", 0) > _VERSION:
        raise ModelError(f"{run.locate(FILE)} was written by a newer raytf. Update raytf.")
    if "config" not in document:
        raise ModelError(
            f"the run's model cannot be made again from its configuration, Keras says: {document.get('problem')}. Give "
            "its layers a get_config() and register them (keras.saving.register_keras_serializable), or let the run "
            "finish: its end exports the model as it is."
        )
    for module in modules:
        _import(module)
    config = dict(document["config"])
    compiled = config.pop("compile_config", None) or {}
    with with_precision(precision.parse(document.get("precision"))):
        model = _deserialize(config, trust)
        x = _zeros(document["inputs"])
        run_user_code("the model", lambda: model(x, training=False) if takes_training(model) else model(x))
        return model, _averaging(model, compiled.get("optimizer"))


def _deserialize(config: Any, trust: bool) -> Any:
    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=not trust)
    except Exception as error:
        # Keras puts what was wrong behind the configuration of all that is around it.
        said = one_line(str(error).rpartition("Exception encountered:")[2] or error, 300)
        if "safe_mode" in said or "unsafe" in said.lower():
            raise ModelError(
                "the model has a Lambda layer, whose Python code the run has kept. Give --trust to run it, if you "
                "trust whoever wrote the run."
            ) from error
        if "Could not locate" in said or "registered" in said:
            raise ModelError(
                f"the model needs a class of the job's own: {said} Give the file that registers it "
                "(keras.saving.register_keras_serializable), as in --module jobs/mine.py."
            ) from error
        raise ModelError(
            f"the model cannot be made again, Keras {keras.__version__} says: {type(error).__name__}: {said} Where the "
            "model has classes of the job's own, give the file that registers them, as in --module jobs/mine.py."
        ) from error


def _averaging(model: keras.Model, optimizer: Any) -> Any:
    """The optimizer, where the weights to use are averages that it keeps."""
    if not optimizer or '"use_ema": true' not in json.dumps(optimizer):
        return None
    try:
        built = keras.saving.deserialize_keras_object(optimizer)
        built.build(model.trainable_variables)
    except Exception as error:
        raise ModelError(
            f"the optimizer, which averages weights, cannot be made again: {one_line(error, 300)}"
        ) from error
    return built


def _import(name: str) -> None:
    """Import a module by name or file, as its job does, but not as a program."""
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
    return tree.map_leaves(lambda leaf: {_LEAF: [keras.backend.standardize_dtype(leaf.dtype), list(leaf.shape[1:])]}, x)


def _zeros(spec: Any) -> Any:
    """One record of zeros, as `_spec` described it."""
    if isinstance(spec, dict) and set(spec) == {_LEAF}:
        dtype, shape = spec[_LEAF]
        return keras.ops.convert_to_tensor(np.zeros((1, *shape), dtype))
    if isinstance(spec, dict):
        return {name: _zeros(part) for name, part in spec.items()}
    return [_zeros(part) for part in spec]
