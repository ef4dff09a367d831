"""raytf: elastic, fault-tolerant TensorFlow / Keras 3 training on Ray.

`import raytf` imports neither Ray nor TensorFlow; each name is imported at its first use.
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
    "raytf.config.flags": ("WorkerSection",),
    "raytf.driver.map_workers": ("on_workers",),
    "raytf.driver.fit": ("fit",),
    "raytf.driver.result": ("Result", "load_weights"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605

if TYPE_CHECKING:  # `X as X` marks a name as exported
    from raytf.config.command_line import cli as cli  # noqa: I001
    from raytf.config.flags import WorkerSection as WorkerSection
    from raytf.config.train_config import Flags as Flags, TrainConfig as TrainConfig, WorkerFlags as WorkerFlags
    from raytf.data import (
        ArraySource as ArraySource,
        CsvSource as CsvSource,
        ImageFolderSource as ImageFolderSource,
        MappingSource as MappingSource,
        NpzSource as NpzSource,
        ParquetSource as ParquetSource,
        RayDataSource as RayDataSource,
        Spec as Spec,
        TFRecordSource as TFRecordSource,
        hold_out as hold_out,
        load_images as load_images,
    )
    from raytf.distributed.ranks import local_rank as local_rank, local_size as local_size, rank as rank, size as size
    from raytf.driver.fit import fit as fit
    from raytf.driver.map_workers import on_workers as on_workers
    from raytf.driver.result import Result as Result, load_weights as load_weights
    from raytf.errors import (
        CheckpointError as CheckpointError,
        ClusterError as ClusterError,
        ConfigError as ConfigError,
        DamagedFileError as DamagedFileError,
        DataError as DataError,
        ExactnessError as ExactnessError,
        GpuError as GpuError,
        HangError as HangError,
        JobError as JobError,
        ModelError as ModelError,
        NonFiniteLossError as NonFiniteLossError,
        RaytfError as RaytfError,
        ReplicaError as ReplicaError,
        RunInUseError as RunInUseError,
        RunMismatchError as RunMismatchError,
        StorageError as StorageError,
        UnsupportedError as UnsupportedError,
        WholeBatchError as WholeBatchError,
    )
    from raytf.runs.run_log import read_steps as read_steps


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(_load(_MODULES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'raytf' has no attribute {name!r}")


def _load(module: str) -> Any:
    if module == "raytf.driver.fit" and module not in sys.modules:  # takes seconds, mostly for Ray
        from raytf._process import working

        with working("importing Ray"):
            return importlib.import_module(module)
    return importlib.import_module(module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# This file belongs to the package that the registry calls raytf. If it is here, both packages are installed in one
# folder, and uninstalling one deletes files of the other.
if os.path.exists(os.path.join(os.path.dirname(__file__), "raytf_driver.py")):
    from raytf.errors import FOREIGN

    warnings.warn(FOREIGN, RuntimeWarning, stacklevel=2)
