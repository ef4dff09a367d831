"""A SavedModel in memory: its signatures, TensorFlow Serving's description, and its functions on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format, text_format

from raytf import _tensorflow
from raytf.distributed.devices import set_memory
from raytf.distributed.gpu import visibility
from raytf.errors import ModelError, one_line
from raytf.inference.signature import DEFAULT, Signature, TensorSpec
from raytf.inference.versions import GRAPHS

#: A signature that TensorFlow adds for itself.
_INTERNAL = "__saved_model_init_op"


class SavedModel:
    """A loaded SavedModel.

    Args:
        folder: the folder with the model's files.
        threads: TensorFlow's threads within an operation; 0 for its default. The first model of a process decides.

    Attributes:
        signatures: the signatures by name.
        definition: the signatures as TensorFlow Serving describes them, for JSON.

    Raises:
        ModelError: the model cannot be loaded, or has no signature.
    """

    def __init__(self, folder: str, threads: int = 0):
        if threads:
            set_threads(threads)
        set_memory(visibility.share())
        try:
            self._model = tf.saved_model.load(folder)
            # TensorFlow reads the first one that exists.
            graph = next(Path(folder, name) for name in GRAPHS if Path(folder, name).exists())
            definitions = _definitions(graph.name, graph.read_bytes())
        except Exception as error:  # other people's files may make TensorFlow raise anything
            raise ModelError(f"{folder} cannot be loaded: {type(error).__name__}: {one_line(error, 300)}") from error
        self._functions = dict(self._model.signatures)
        self.signatures = {
            name: _signature(name, definition) for name, definition in definitions.items() if name in self._functions
        }
        self.definition = {
            name: json_format.MessageToDict(
                definition, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            for name, definition in definitions.items()
        }
        if not self.signatures:
            raise ModelError(f"{folder} has no signature to call. Export the model with model.export(), as raytf does.")

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Call a signature.

        Raises:
            ModelError: the model rejects the tensors.
        """
        spec = self.signatures[signature].inputs
        try:
            tensors = {name: tf.constant(value, tf.as_dtype(spec[name].dtype)) for name, value in inputs.items()}
            outputs = self._functions[signature](**tensors)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise ModelError(f"the model rejects these tensors: {one_line(error, 300)}") from error
        return {name: value.numpy() for name, value in outputs.items()}

    def warm_up(self) -> None:
        """Call the default signature with one record of zeros, so that the first request is not slow."""
        signature = self.signatures.get(DEFAULT)
        if signature is None or not all(spec.is_batched for spec in signature.inputs.values()):
            return
        zeros = {}
        for name, spec in signature.inputs.items():
            if spec.dtype == "string" or spec.shape is None:
                return
            zeros[name] = np.zeros([1 if size is None else size for size in spec.shape], spec.dtype)
        self.run(DEFAULT, zeros)


def set_threads(threads: int) -> None:
    """Set the number of TensorFlow's threads in this process, unless TensorFlow has started already."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    except RuntimeError:
        pass  # TensorFlow has started


def signatures_of(name: str, graph: bytes) -> dict[str, Signature]:
    """Return signatures by name, from a `saved_model.pb` or `saved_model.pbtxt` alone.

    Raises:
        ModelError: the file is damaged.
    """
    try:
        return {key: _signature(key, definition) for key, definition in _definitions(name, graph).items()}
    except Exception as error:  # protobuf raises several, and TensorFlow rejects some types
        raise ModelError(f"{name} is damaged: {type(error).__name__}: {one_line(error, 300)}") from error


def _definitions(name: str, graph: bytes) -> dict[str, Any]:
    saved = _tensorflow.empty_saved_model()
    if name.endswith(".pbtxt"):
        text_format.Parse(graph, saved)
    else:
        saved.ParseFromString(graph)
    chosen = next((g for g in saved.meta_graphs if "serve" in g.meta_info_def.tags), saved.meta_graphs[0])
    return {name: chosen.signature_def[name] for name in sorted(chosen.signature_def) if name != _INTERNAL}


def _signature(name: str, definition: Any) -> Signature:
    return Signature(
        name,
        definition.method_name,
        {key: _spec(definition.inputs[key]) for key in sorted(definition.inputs)},
        {key: _spec(definition.outputs[key]) for key in sorted(definition.outputs)},
    )


def _spec(info: Any) -> TensorSpec:
    dtype = tf.as_dtype(info.dtype)
    if info.tensor_shape.unknown_rank:
        return TensorSpec(dtype.name, None)
    return TensorSpec(dtype.name, tuple(None if dim.size < 0 else int(dim.size) for dim in info.tensor_shape.dim))
