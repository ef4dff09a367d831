"""Checkpoints written without TensorFlow, for tests that look at them."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytf.checkpoint import codec, manifest
from raytf.checkpoint.naming import name_of
from raytf.storage.storage import Storage


def save(run: Storage, step: int, attempt: str = "a", shares: int = 2, history: Any = (), complete: bool = True) -> str:
    """Write a checkpoint whose bytes are a function of step and attempt; its name."""
    name, written = name_of(step, attempt), []
    for rank in range(shares):
        data = codec.encode({f"tensor {rank}": np.arange(700, dtype=np.int32) * step + rank})
        file = f"share-{rank:05d}.safetensors"
        run.put(f"{manifest.FOLDER}/{name}/{file}", data)
        crc = codec.checksum([data])
        written.append({"file": file, "bytes": len(data), "crc32c": crc, "names": [f"tensor {rank}"]})
    if complete:
        manifest.write(run, name, step, written, {"history": list(history)})
    return name


def share(name: str, rank: int = 0) -> str:
    """Where a share is."""
    return f"{manifest.FOLDER}/{name}/share-{rank:05d}.safetensors"
