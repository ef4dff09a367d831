"""An exception of the program's own code comes back as itself, with raytf's explanation."""

from __future__ import annotations

import threading

import pytest
from ray import cloudpickle

from raytf.errors import DataError, JobError, StorageError, WholeBatchError
from raytf.training.user import user_code


class MyInterruption(Exception):
    def __init__(self, epoch, why):
        super().__init__(f"at {epoch}")
        self.epoch, self.why = epoch, why


def sent(error):
    """As it arrives at the driver."""
    return cloudpickle.loads(cloudpickle.dumps(user_code.carrying(error)))


def explained(raised, kind=JobError):
    error = kind("a callback raised something (train.py:3).")
    error.__cause__ = raised
    return sent(error)


@pytest.mark.parametrize(
    "raised",
    [
        TypeError("one", 2),
        MyInterruption(3, "because"),
        SystemExit(3),
        FileNotFoundError(2, "no such", "f"),
        KeyError(1),
    ],
)
def test_class_arguments_and_notes_are_the_same(raised):
    raised.add_note("mine")
    error = explained(raised)
    back = user_code.original(error)
    assert type(back) is type(raised)
    assert back.args == raised.args
    assert {name: value for name, value in vars(back).items() if name != "__notes__"} == {
        name: value for name, value in vars(raised).items() if name != "__notes__"
    }
    assert back.__notes__[0] == "mine"
    assert "raytf: a callback raised something" in back.__notes__[1]
    assert back.__cause__ is error
    assert user_code.explanation(back) is error


def test_its_own_cause_stays():
    raised = ValueError("outer")
    raised.__cause__ = MyInterruption(3, "inner")
    back = user_code.original(explained(raised))
    assert isinstance(back.__cause__, MyInterruption)
    assert back.__cause__.why == "inner"


def test_an_attribute_or_a_cause_that_cannot_be_pickled_is_left_out():
    raised = MyInterruption(3, "because")
    raised.thread = threading.current_thread()
    raised.__cause__ = ValueError(threading.current_thread())
    back = user_code.original(explained(raised))
    assert (back.args, back.why, hasattr(back, "thread")) == (("at 3",), "because", False)


def test_one_with_arguments_that_cannot_be_pickled_stays_an_explanation():
    error = explained(TypeError(threading.current_thread()))
    assert error.original is None
    assert user_code.original(error) is None


def test_a_refusal_of_data_carries_what_the_layer_raised():
    assert isinstance(user_code.original(explained(LookupError("in a layer"), DataError)), LookupError)


@pytest.mark.parametrize("kind", [StorageError, WholeBatchError])
def test_errors_that_the_programs_code_did_not_raise_carry_nothing(kind):
    assert explained(ValueError("x"), kind).original is None


def test_an_ordinary_exception_has_no_explanation():
    assert user_code.explanation(ValueError("x")) is None
    error = ValueError("y")
    error.__cause__ = JobError("of a run without an original")
    assert user_code.explanation(error) is None
