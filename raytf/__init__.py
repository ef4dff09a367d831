"""raytf: elastic, fault-tolerant TensorFlow / Keras 3 training on Ray.

`import raytf` imports neither Ray nor TensorFlow; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "raytf.config.command_line": ("cli",),
    "raytf.config.train_config": ("Flags", "TrainConfig", "WorkerFlags"),
    "raytf.data": (
        "ArraySource",
        "CsvSource",
        "ImageFolderSource",
        "MappingSource",
        "NpzSource",
        "ParquetSource",
        "RayDataSource",
        "Spec",
        "TFRecordSource",
        "hold_out",
        "load_images",
    ),
    "raytf.errors": (
        "CheckpointError",
        "ClusterError",
        "ConfigError",
        "DamagedFileError",
        "DataError",
        "ExactnessError",
        "GpuError",
        "HangError",
        "JobError",
        "ModelError",
        "NonFiniteLossError",
        "RaytfError",
        "ReplicaError",
        "RunInUseError",
        "RunMismatchError",
        "StorageError",
        "UnsupportedError",
        "WholeBatchError",
    ),
    "raytf.distributed.ranks": ("local_rank", "local_size", "rank", "size"),
    "raytf.runs.run_log": ("read_steps",),
    "raytf.config.sections": ("WorkerSection",),
    "raytf.driver.map_workers": ("on_workers",),
    "raytf.driver.fit": ("fit",),
    "raytf.driver.result": ("Result", "load_weights"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ArraySource",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "CsvSource",
    "DamagedFileError",
    "DataError",
    "ExactnessError",
    "Flags",
    "GpuError",
    "HangError",
    "ImageFolderSource",
    "JobError",
    "MappingSource",
    "ModelError",
    "NonFiniteLossError",
    "NpzSource",
    "ParquetSource",
    "RayDataSource",
    "RaytfError",
    "ReplicaError",
    "Result",
    "RunInUseError",
    "RunMismatchError",
    "Spec",
    "StorageError",
    "TFRecordSource",
    "TrainConfig",
    "UnsupportedError",
    "WholeBatchError",
    "WorkerFlags",
    "WorkerSection",
    "cli",
    "fit",
    "hold_out",
    "load_images",
    "load_weights",
    "local_rank",
    "local_size",
    "on_workers",
    "rank",
    "read_steps",
    "size",
]

if TYPE_CHECKING:
    from raytf.config.command_line import cli
    from raytf.config.sections import WorkerSection
    from raytf.config.train_config import Flags, TrainConfig, WorkerFlags
    from raytf.data import (
        ArraySource,
        CsvSource,
        ImageFolderSource,
        MappingSource,
        NpzSource,
        ParquetSource,
        RayDataSource,
        Spec,
        TFRecordSource,
        hold_out,
        load_images,
    )
    from raytf.distributed.ranks import local_rank, local_size, rank, size
    from raytf.driver.fit import fit
    from raytf.driver.map_workers import on_workers
    from raytf.driver.result import Result, load_weights
    from raytf.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DamagedFileError,
        DataError,
        ExactnessError,
        GpuError,
        HangError,
        JobError,
        ModelError,
        NonFiniteLossError,
        RaytfError,
        ReplicaError,
        RunInUseError,
        RunMismatchError,
        StorageError,
        UnsupportedError,
        WholeBatchError,
    )
    from raytf.runs.run_log import read_steps


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(_load(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'raytf' has no attribute {name!r}")


def _load(module: str) -> Any:
    if module == "raytf.driver.fit" and module not in sys.modules:  # seconds, mostly for Ray
        from raytf._process import working

        with working("importing Ray"):
            return importlib.import_module(module)
    return importlib.import_module(module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A file of the package that the registry calls raytf. Where it lies here, both were installed in one folder, and
# uninstalling one takes files of the other away.
if os.path.exists(os.path.join(os.path.dirname(__file__), "raytf_driver.py")):
    from raytf.errors import FOREIGN

    warnings.warn(FOREIGN, RuntimeWarning, stacklevel=2)
