"""What an import costs and gives: no Ray, no TensorFlow, and a locked list of names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import raytf

REPO = Path(__file__).parents[2]
HEAVY = ("ray", "tensorflow", "keras", "jax", "torch")
LIGHT_MODULES = [
    "raytf.config.command_line",
    "raytf.config.train_config",
    "raytf.config.flags",
    "raytf.data",
    "raytf.commands.data",
    "raytf.data.validation",
    "raytf.data.order",
    "raytf.data.pipeline",
    "raytf.errors",
    "raytf.driver.inputs",
    "raytf.config.identity",
    "raytf.runs.lease",
    "raytf.runs.display",
    "raytf.runs.run_log",
    "raytf.storage.storage",
    "raytf.inference.signature",
    "raytf.inference.versions",
    "raytf.inference.serving.rest_api",
    "raytf.inference.serving.served_versions",
    "raytf.inference.batch.columns",
    "raytf.commands.export",
    "raytf.commands.serve",
    "raytf.commands.predict",
    "raytf.checkpoint.codec",
    "raytf.checkpoint.durable",
    "raytf.checkpoint.manifest",
    "raytf.checkpoint.slot_ledger",
    "raytf.checkpoint.snapshot_slot",
    "raytf.training.saving.checkpoint_policy",
]


def python(code, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )


def loaded(code):
    """Top-level packages that are loaded after some code."""
    done = python(
        f"{code}\nimport json, sys\nprint()\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_raytf_loads_nothing_heavy():
    assert loaded("import raytf") & {*HEAVY, "pyarrow", "numpy", "boto3", "rich", "tyro"} == set()


def test_import_raytf_is_quick():
    last = [python("import raytf", "-X", "importtime").stderr.splitlines()[-1].split("|") for _ in range(5)]
    assert {line[2].strip() for line in last} == {"raytf"}
    assert min(int(line[1]) for line in last) / 1e6 < 0.3


def test_light_modules_load_neither_ray_nor_tensorflow():
    assert loaded("\n".join(f"import {m}" for m in LIGHT_MODULES)) & set(HEAVY) == set()


def test_reading_a_config_loads_no_storage():
    assert loaded("import raytf\nraytf.TrainConfig.of(epochs=3).check()") & {*HEAVY, "pyarrow"} == set()


def test_help_of_the_example_loads_neither_ray_nor_tensorflow():
    code = """
import runpy, sys
sys.argv = ["jobs/mnist.py", "--help"]
try:
    runpy.run_path("jobs/mnist.py", run_name="__main__")
except SystemExit as done:
    assert not done.code, done.code
"""
    assert loaded(code) & set(HEAVY) == set()


def test_exported_names_are_locked():
    assert sorted(raytf.__all__) == [
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


@pytest.mark.parametrize("name", sorted(set(raytf.__all__) - {"Result", "fit", "on_workers"}))
def test_exported_names_exist(name):
    assert getattr(raytf, name) is not None


def test_dir_has_every_public_name_before_it_is_loaded():
    assert python("import raytf; print(set(raytf.__all__) - set(dir(raytf)))").stdout == "set()\n"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fti'"):
        _ = raytf.fti


@pytest.mark.parametrize(
    "first",
    ["import raytf.config.command_line", "from raytf.config.command_line import EXIT_FAILED", "from raytf import cli"],
)
def test_cli_is_the_function_whatever_was_imported_first(first):
    assert python(f"{first}\nimport raytf\nprint(type(raytf.cli).__name__)").stdout == "function\n"


def test_version_is_what_is_installed():
    from importlib.metadata import version

    assert raytf.__version__ == version("raytf-train")
