"""A model as the bytes of a file: .keras, weights alone, ONNX; and as a SavedModel's folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile

import keras

from raytf import _keras
from raytf.checkpoint import codec, variables
from raytf.errors import not_installed
from raytf.inference.user_model import run_user_code

KERAS_FILE, WEIGHTS_FILE = "model.keras", "weights.safetensors"


def save(model: keras.Model, folder: str) -> None:
    """Write a SavedModel for serving into a folder that is not there yet."""
    _name_inputs(model)
    with quiet():
        run_user_code("model.export", lambda: model.export(folder, format="tf_saved_model", verbose=False))


def keras_bytes(model: keras.Model) -> bytes:
    """Return what `model.save` writes."""
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        file = os.path.join(folder, KERAS_FILE)
        run_user_code("model.save", lambda: model.save(file))
        with open(file, "rb") as stream:
            return stream.read()


def weights_bytes(model: keras.Model) -> bytes:
    """Return the weights by their places, which needs nothing of the model's code."""
    return codec.encode({name: keras.ops.convert_to_numpy(v) for name, v in variables.weights(model).items()})


def onnx_bytes(model: keras.Model) -> bytes:
    """Return the model for ONNX runtimes.

    Raises:
        ConfigError: what writes it is not installed.
    """
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
        raise not_installed("--format onnx", "onnx", error.name) from error


def _name_inputs(model: keras.Model) -> None:
    """Call inputs by their layers, so that clients find the same names in every version.

    Keras numbers tensors without a name as they are made in a process; an input's layer is in the configuration.
    """
    for tensor in getattr(model, "inputs", None) or []:
        made_by = _keras.made_by(tensor)
        if made_by is not None:
            tensor.name = made_by.name


@contextlib.contextmanager
def quiet():
    """Silence what Keras's export prints and TensorFlow logs; neither helps a user of raytf."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
