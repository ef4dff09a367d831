"""Which rank writes which tensors, and tensors as bytes; numpy alone, so that tools need no TensorFlow."""

from __future__ import annotations

import heapq

import numpy as np
import safetensors.numpy

from raytf.errors import CheckpointError


def shares(sizes: dict[str, int], world_size: int) -> list[list[str]]:
    """Names for each rank to write: the largest tensor goes to the rank with the fewest bytes so far (Graham's LPT)."""
    split: list[list[str]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]  # a heap; of equal loads the first rank comes first
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        load, rank = loads[0]
        split[rank].append(name)
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return split


def encode(tensors: dict[str, np.ndarray]) -> bytes:
    """Tensors as a safetensors file."""
    return safetensors.numpy.save({name: np.asarray(value, order="C") for name, value in tensors.items()})


def decode(data: bytes) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file.

    Raises:
        CheckpointError: the bytes are no safetensors file.
    """
    try:
        return safetensors.numpy.load(data)
    except Exception as error:  # safetensors' own error class is not public
        raise CheckpointError(f"no safetensors file, or a damaged one: {error}") from error
