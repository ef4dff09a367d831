"""The exception tree: one base, pickles whole, retried only where a fresh worker group can help."""

import inspect
import pickle

import pytest

import raytf
from raytf import errors

ALL = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, errors.RaytfError)]
SAMPLES = [
    errors.ConfigError("m"),
    errors.RunMismatchError("m"),
    errors.DataError("m"),
    errors.ModelError("m"),
    errors.WholeBatchError("m"),
    errors.StorageError("m", "denied"),
    errors.DamagedFileError("f", "it is empty"),
    errors.CheckpointError("m"),
    errors.RunInUseError("m"),
    errors.ClusterError("m"),
    errors.ExactnessError("m"),
    errors.NonFiniteLossError("m", 7),
    errors.GpuError("m", "node", True),
    errors.UnsupportedError("m"),
    errors.WorkerLostError("m"),
    errors.ProcessDiedError("m"),
    errors.HangError("m"),
    errors.ReplicaError("m", [1]),
    errors.JobError("m", "Traceback ..."),
]


def test_every_class_has_a_sample():
    assert {type(e) for e in SAMPLES} | {errors.RaytfError} == set(ALL)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_pickles_with_attributes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_storage_error_survives_pickle_as_an_os_error():
    again = pickle.loads(pickle.dumps(errors.StorageError("no", "unreachable")))
    assert isinstance(again, OSError)
    assert (again.kind, again.errno, str(again)) == ("unreachable", None, "no")


def test_only_outages_are_retried():
    retried = {"GpuError", "HangError", "ProcessDiedError", "ReplicaError", "WorkerLostError"}
    assert {e.__name__ for e in ALL if e.retryable} == retried
    kinds = ("missing", "denied", "unreachable", "full", "other")
    assert [k for k in kinds if errors.StorageError("x", k).retryable] == ["unreachable", "other"]


def test_mismatch_is_a_config_error():
    assert issubclass(errors.RunMismatchError, errors.ConfigError)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.DataError, errors.ModelError])
def test_bad_values_are_value_errors(error):
    assert issubclass(error, ValueError)


def test_module_text_shows_the_whole_tree():
    assert [e.__name__ for e in ALL if e.__name__ not in errors.__doc__] == []


def test_exported_are_all_that_a_user_can_see():
    exported = {name for name in raytf.__all__ if name.endswith("Error")}
    assert exported == {e.__name__ for e in ALL} - {"WorkerLostError", "ProcessDiedError"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (raytf.StorageError("cannot write x", "full"), "storage is full"),
        (
            raytf.StorageError("cannot write s3://b/k: When completing: AWS Error INTERNAL_FAILURE: injected"),
            "AWS Error INTERNAL_FAILURE: injected",
        ),
        (ValueError("w\nholds NaN"), "w holds NaN"),
        (ValueError("x" * 100), "x" * 77 + "..."),
        (ValueError(), "ValueError"),
    ],
)
def test_brief(error, text):
    assert errors.brief(error) == text


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("a\n\n  b\tc", None, "a b c"),
        ("Exception in call().\n\n\x1b[1mCould not\x1b[0m infer", None, "Exception in call(). Could not infer"),
        ("seven words that are too many here", 20, "seven words that..."),
        ("x" * 30, 10, "xxxxxxx..."),
        ("fits", 4, "fits"),
    ],
)
def test_another_library_s_text_as_a_line(text: str, limit: int | None, expected: str):
    assert errors.one_line(text, limit) == expected
    assert limit is None or len(expected) <= limit
