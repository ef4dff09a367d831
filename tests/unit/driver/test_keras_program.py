"""What ends a Keras program that nobody catches: one text of the program's own lines, and raytf's explanation."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from raytf.driver import keras_program
from raytf.errors import DataError, JobError
from raytf.inference.user_model import run_user_code
from raytf.training.user import user_code

SCRIPT = """
from tests.unit.driver.test_keras_program import fit

def train():
    fit(broken)

def broken():
    raise {kind}("of the program")

train()
"""


def fit(code):
    """As a `fit` whose callback raised in a worker."""
    try:
        run_user_code("a callback's on_epoch_end", code)
    except JobError as error:
        carried = user_code.carrying(error)
        raise user_code.original(carried) from carried


def ended(tmp_path: Path, kind: str) -> BaseException:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(kind=kind))
    with pytest.raises((JobError, SystemExit), match="of the program") as raised, keras_program._explained():
        runpy.run_path(str(script), run_name="__main__")
    return raised.value


def test_an_uncaught_exception_is_explained_with_the_programs_lines(tmp_path: Path):
    error = ended(tmp_path, "LookupError")
    assert isinstance(error, JobError)
    assert f"raised LookupError: of the program ({tmp_path}/train.py:8)" in str(error)
    lines = error.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "LookupError: of the program"
    places = [line for line in lines if line.startswith("  File")]
    assert [line.rpartition(" in ")[2] for line in places if "train.py" in line] == ["<module>", "train", "broken"]
    own = f"{Path(keras_program.__file__).parents[1]}/"
    assert not any(own in line or "runpy" in line for line in places)


def test_what_ends_the_program_by_itself_does_so(tmp_path: Path):
    assert isinstance(ended(tmp_path, "SystemExit"), SystemExit)


def test_an_error_of_the_program_itself_is_left_alone(tmp_path: Path):
    with pytest.raises(KeyError, match="mine"), keras_program._explained():
        raise KeyError("mine")


def test_a_refusal_of_data_keeps_its_one_line():
    error = DataError("the model does not accept the data.")
    error.__cause__ = ValueError("Input 0 is incompatible")
    with pytest.raises(DataError, match="does not accept the data") as raised, keras_program._explained():
        raise user_code.original(user_code.carrying(error))
    assert not hasattr(raised.value, "traceback")
