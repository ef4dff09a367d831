"""A model as files: a SavedModel for TensorFlow Serving, .keras, its weights alone, ONNX."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from typing import Any

import keras

from raytf import _keras, _tensorflow
from raytf.checkpoint import codec, variables
from raytf.errors import ConfigError, one_line
from raytf.inference import architecture, versions
from raytf.inference.user_model import run_user_code
from raytf.storage.storage import Storage

KERAS_FILE = "model.keras"
WEIGHTS_FILE = "weights.safetensors"


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
    archive = keras.export.ExportArchive()
    function = archive.track_and_add_endpoint("serve", model, _keras.input_signature(model))
    _tensorflow.make_signatures({"serving_default": function})


def _name_inputs(model: keras.Model) -> None:
    """Call inputs by their layers, so that clients find the same names in every version.

    Keras numbers tensors without a name as they are made in a process; an input's layer is in the configuration.
    """
    for tensor in getattr(model, "inputs", None) or []:
        made_by = _keras.made_by(tensor)
        if made_by is not None:
            tensor.name = made_by.name


def publish(model: keras.Model, target: Storage, notes: dict[str, Any]) -> versions.Version:
    """Export for TensorFlow Serving, as the next version of a folder."""
    _name_inputs(model)
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        saved = os.path.join(folder, "saved_model")
        with quiet():
            run_user_code("model.export", lambda: model.export(saved, format="tf_saved_model", verbose=False))
        return versions.publish(saved, target, notes)


def keras_bytes(model: keras.Model) -> bytes:
    """A .keras file."""
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = os.path.join(folder, KERAS_FILE)
        run_user_code("model.save", lambda: model.save(file))
        with open(file, "rb") as stream:
            return stream.read()


def weights_bytes(model: keras.Model) -> bytes:
    """Its weights by their places, which needs nothing of the model's code."""
    return codec.encode({name: keras.ops.convert_to_numpy(v) for name, v in variables.weights(model).items()})


def onnx_bytes(model: keras.Model) -> bytes:
    """An ONNX file."""
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
