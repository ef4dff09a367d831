"""The widget of a run in a notebook."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from raytf.errors import ConfigError
from raytf.runs.display import Display
from raytf.runs.notebook import NotebookDisplay, display, in_notebook, page
from raytf.runs.status import Status


def status(step: int, loss: float, epochs: int = 0) -> Status:
    history = [
        {"epoch": e, "step": 10 * e, "loss": 1.0, "accuracy": e / 9, "val_accuracy": e / 12} for e in range(epochs)
    ]
    return Status(step=step, total=100, epoch=1, epochs=5, workers=3, metrics={"loss": loss}, history=history)


def test_it_shows_bar_curves_workers_and_what_happened_and_runs_no_code():
    shown: list[str] = []
    now = 0.0
    made = NotebookDisplay(lambda: now, shown.append)
    with made:
        for step in (10, 20, 30):
            now += 1
            made.show(status(step, 1 / step, epochs=4))
        made.say("a worker <b>died</b>\x1b[2J")
        for line in range(9):
            made.say(f"line {line}")
    last = shown[-1]
    tree = ET.fromstring(last)
    assert len(tree.findall(".//svg")) == 2
    assert len(tree.findall(".//polyline")) == 3
    text = "".join(tree.itertext())
    for words in ("step 30/100", "3 workers", "loss", "accuracy", "val_accuracy", "line 8", "a worker <b>died</b>"):
        assert words in text
    assert "width:30.0%" in last
    assert "\x1b" not in last
    assert "<b>" not in last


def test_a_line_that_was_shown_early_is_shown_once():
    shown: list[str] = []
    made = NotebookDisplay(lambda: 1.0, shown.append)
    with made:
        made.say_early("the model has 3 layers")
        made.say("the model has 3 layers")
        made.say("finished")
    assert shown[-1].count("the model has 3 layers") == 1


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (None, "finished: 30 steps"),
        (
            ConfigError("epochs is <0>.\n\nExpected 1 or more."),
            "failed: ConfigError: epochs is <0>. Expected 1 or more.",
        ),
        (KeyboardInterrupt(), "stopped: interrupted; run the cell again to continue from the last checkpoint"),
    ],
)
def test_it_ends_with_the_outcome(error, last):
    shown: list[str] = []
    made = NotebookDisplay(lambda: 1.0, shown.append)
    with contextlib.suppress(ConfigError, KeyboardInterrupt), made:
        made.show(status(30, 0.5))
        made.stage("exporting")
        made.say("finished: 30 steps")
        if error is not None:
            raise error
    blocks = ["".join(block.itertext()) for block in ET.fromstring(shown[-1])]
    assert blocks[-1] == last
    assert "exporting" not in shown[-1]
    assert shown[-1].count("finished: 30 steps") == 1


ERRORS = """
from raytf.errors import ConfigError, JobError
from raytf.runs.notebook import NotebookDisplay
made = NotebookDisplay(draw=lambda text: None)
run = get_ipython().run_cell
one = ConfigError("epochs is 0.\\nExpected 1 or more.")
one.__cause__ = KeyError("epochs")
trace = 'Traceback:\\n  File "a.py", line 3, in step\\n    f()\\n  File "/site-packages/k", line 9, in f\\n    g()\\nE'
two = JobError("training raised E: x", trace)
run("raise one")
run("raise two")
run("with made: raise KeyboardInterrupt")
"""


def test_an_error_is_one_line_and_its_cause_in_ipython(tmp_path):
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", ERRORS]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:6] == [
        "ConfigError: epochs is 0. Expected 1 or more.",
        "caused by KeyError: 'epochs'",
        "JobError: training raised E: x",
        '  File "a.py", line 3, in step',
        "    f()",
        "KeyboardInterrupt",
    ], done.stderr


def test_it_is_drawn_again_after_half_a_second_and_at_the_end():
    shown: list[str] = []
    now = 0.0
    with NotebookDisplay(lambda: now, shown.append) as made:
        for step in range(1, 11):
            now = step / 10
            made.show(status(step, 1.0))
        assert len(shown) == 2
    assert "step 10/100" in shown[-1]
    assert len(shown) == 3


def test_what_is_not_finite_or_not_there_yet_is_no_reason_to_fail():
    assert "svg" not in page(None, [], [])
    assert page(status(1, float("nan")), [(1, float("nan")), (2, float("inf"))], ["x"]).count("<svg") == 0
    assert page(status(1, 1.0), [(1, float("nan")), (2, 1.0), (3, 2.0)], []).count("<svg") == 1


def test_outside_of_a_notebook_it_is_the_usual_display():
    assert not in_notebook()
    assert type(display()) is Display
