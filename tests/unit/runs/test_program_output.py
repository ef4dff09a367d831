"""What the program's code prints, warns of and logs in a worker is printed, warned of and logged in the program."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import warnings

import pytest

from raytf.driver.monitor import reader
from raytf.inference import user_model
from raytf.runs.display import Display
from raytf.runs.program_output import Explained, Printed


class Careful(UserWarning):
    """Of the program's own."""


class Said(Display):
    """Keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(str(message))


def forwarded(call, filters=None):
    """What a worker sends while it runs code of the program's, as it arrives."""
    sent: list = []
    user_model.set_warning_filters(filters)
    try:
        user_model.run_user_code("the code", call, sent.append)
    finally:
        user_model.set_warning_filters(None)
    return pickle.loads(pickle.dumps(sent))


def test_text_goes_to_what_stands_for_standard_output_as_it_was_written():
    def call():
        print("a", end="")
        print("b\x1b[1mc", end=";")

    out, display = io.StringIO(), Said()
    with contextlib.redirect_stdout(out):
        for message in forwarded(call):
            reader._deliver(message, display)
    assert (out.getvalue(), display.lines) == ("ab\x1b[1mc;", [])


def test_text_that_is_flushed_does_not_wait_for_the_end():
    seen: list[int] = []
    sent: list = []

    def call():
        print("first", flush=True)
        seen.append(len(sent))

    user_model.run_user_code("the code", call, sent.append)
    assert seen == [1]
    assert sent == [Printed("first\n")]


def test_a_warning_passes_the_programs_filters():
    def call():
        for _ in range(2):
            warnings.warn("take care", Careful, stacklevel=1)

    def delivered():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for message in sent:
                reader._deliver(message, Said())
        return [(str(one.message), one.category, one.filename) for one in seen]

    sent = forwarded(call, [("always", None, Warning, None, 0)])
    assert delivered() == 2 * [("take care", Careful, __file__)]
    sent = forwarded(call, [("ignore", None, Careful, None, 0), ("always", None, Warning, None, 0)])
    assert delivered() == []


def test_a_filter_that_makes_it_an_error_raises_it_in_the_code():
    def call():
        with pytest.raises(Careful, match="take care"):
            warnings.warn("take care", Careful, stacklevel=1)

    assert forwarded(call, [("error", None, Careful, None, 0)]) == []


def test_an_explanation_is_shown_once():
    display, topic = Said(), "a topic of this test"
    for text in ("why", "why again"):
        reader._deliver(pickle.loads(pickle.dumps(Explained(text, topic))), display)
    reader._deliver(Explained("something else", f"another {topic}"), display)
    assert display.lines == ["why", "something else"]


def test_records_reach_the_loggers_of_the_program_with_its_levels(caplog):
    def call():
        logging.getLogger("mine.own").info("epoch %d", 3)
        logging.getLogger("mine.own").debug("is left out")
        logging.getLogger("ray.train").info("is not the program's")
        try:
            raise ValueError("of the callback")
        except ValueError:
            logging.exception("failed")

    user_model.set_log_levels({"root": logging.WARNING, "mine": logging.INFO})
    try:
        sent = forwarded(call)
    finally:
        user_model.set_log_levels({})
    assert logging.getLogger("mine").level == logging.NOTSET
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for message in sent:
            reader._deliver(message, Said())
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("mine.own", "INFO", "epoch 3"),
        ("root", "ERROR", "failed"),
    ]
    assert "ValueError: of the callback" in caplog.records[1].exc_text
    caplog.clear()
    with caplog.at_level(logging.ERROR, "mine.own"):
        reader._deliver(sent[0], Said())
    assert not caplog.records
