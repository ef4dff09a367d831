"""Signatures of served models: names, dtypes and shapes of their tensors. Does not need TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: The signature that Keras and TensorFlow Serving call by default.
DEFAULT = "serving_default"
PREDICT = "tensorflow/serving/predict"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a signature.

    Attributes:
        dtype: a numpy dtype's name; `string` for bytes.
        shape: the shape with the batch dimension, None for a dimension of any size; None if the rank is unknown.
    """

    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def is_batched(self) -> bool:
        """Whether the first dimension may have any size."""
        return bool(self.shape) and self.shape is not None and self.shape[0] is None

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            want is None or have == want for have, want in zip(shape, self.shape, strict=True)
        )

    def text(self) -> str:
        """Return dtype and shape as shown to users: float32 [?,28,28,1]."""
        return f"{self.dtype} {shape_text(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """A function of a SavedModel. Its method is `tensorflow/serving/predict` or another one of TensorFlow Serving."""

    name: str
    method: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    @property
    def is_batched(self) -> bool:
        """Whether records of several requests can be batched."""
        return all(spec.is_batched for spec in (*self.inputs.values(), *self.outputs.values()))


def shape_text(shape: tuple[int | None, ...] | None) -> str:
    """Return a shape as shown to users: [?,28,28,1]."""
    if shape is None:
        return "[...]"
    return "[" + ",".join("?" if size is None else str(size) for size in shape) + "]"


def records(arrays: Mapping[str, np.ndarray]) -> int | None:
    """Return the number of records that all arrays have, or None if the numbers differ."""
    sizes = {array.shape[0] if array.ndim else None for array in arrays.values()}
    return sizes.pop() if len(sizes) == 1 else None
