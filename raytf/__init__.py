"""raytf: elastic, fault-tolerant TensorFlow / Keras 3 training on Ray.

`import raytf` imports neither Ray nor TensorFlow; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "raytf.command": ("cli",),
    "raytf.config": ("Flags", "TrainConfig"),
    "raytf.data": ("ArraySource", "ParquetSource", "hold_out", "load_images"),
    "raytf.errors": (
        "CheckpointError",
        "ClusterError",
        "ConfigError",
        "DataError",
        "ExactnessError",
        "HangError",
        "JobError",
        "ModelError",
        "NonFiniteLossError",
        "RaytfError",
        "RunInUseError",
        "RunMismatchError",
        "StorageError",
    ),
    "raytf.runlog": ("read_steps",),
    "raytf.trainer": ("Result", "fit"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ArraySource",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataError",
    "ExactnessError",
    "Flags",
    "HangError",
    "JobError",
    "ModelError",
    "NonFiniteLossError",
    "ParquetSource",
    "RaytfError",
    "Result",
    "RunInUseError",
    "RunMismatchError",
    "StorageError",
    "TrainConfig",
    "cli",
    "fit",
    "hold_out",
    "load_images",
    "read_steps",
]

if TYPE_CHECKING:
    from raytf.command import cli
    from raytf.config import Flags, TrainConfig
    from raytf.data import ArraySource, ParquetSource, hold_out, load_images
    from raytf.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        ExactnessError,
        HangError,
        JobError,
        ModelError,
        NonFiniteLossError,
        RaytfError,
        RunInUseError,
        RunMismatchError,
        StorageError,
    )
    from raytf.runlog import read_steps
    from raytf.trainer import Result, fit


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'raytf' has no attribute {name!r}")
