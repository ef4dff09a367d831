"""What a person sees: one line for a status, lines now and then where there is no terminal, a bar where there is."""

import io
import re
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from raytf.runs import notebook
from raytf.runs.display import PLAIN_SECONDS, Display, lines_on_stderr
from raytf.runs.status import SaveTrouble, Status, clock_text, describe, number_text


def seen(out):
    """What was written, without codes for a terminal."""
    return re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", out.getvalue())


def wait_until(is_done):
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.01)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def out():
    return io.StringIO()


def plain(out, clock):
    return Display(Console(file=out, force_terminal=False, highlight=False, soft_wrap=True), clock)


def status(step=3, **more):
    return Status(**{"step": step, "total": 10, "epoch": 1, "epochs": 2, "workers": 2, **more})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (-3, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_clock_text(seconds, text):
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9731, "0.9731"),
        (0.25, "0.25"),
        (0.0000321, "3.21e-05"),
        (0.0, "0"),
        (-1234.56, "-1235"),
        (12345.6, "12,346"),
        (2e12, "2e+12"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "-"),
    ],
)
def test_number_text(value, text):
    assert number_text(value) == text


FULL = status(
    metrics={"loss": 0.12345, "accuracy": 0.9}, samples_per_second=12345.6, seconds_left=65.0, checkpoint=2, snapshot=3
)


def test_describe_says_what_a_person_wants_to_know():
    text = "epoch 1/2, step 3/10, loss 0.1235, accuracy 0.9, 12,346 samples/s, 2 workers, ETA 1:05"
    assert describe(FULL) == text


def test_of_checkpoints_it_speaks_where_somebody_asks():
    assert ", 2 workers, saved step 2, in memory step 3 (0 MiB a node), ETA 1:05" in describe(FULL, shows_saves=True)
    assert "saved step 0" in describe(status(checkpoint=0), shows_saves=True)
    assert "saved nothing yet" in describe(status(), shows_saves=True)


def test_describe_with_little_to_say():
    assert describe(status(workers=1)) == "epoch 1/2, step 3/10, 1 worker"


def test_a_phase_takes_the_place_of_the_eta():
    assert describe(status(phase="validating", seconds_left=65.0)).endswith("2 workers, validating")


def test_plain_lines_come_every_few_seconds(out, clock):
    with plain(out, clock) as display:
        for step in range(1, 5):
            display.show(status(step))
        clock.now += PLAIN_SECONDS
        display.show(status(5))
    assert [line.partition(", ")[2].partition(",")[0] for line in out.getvalue().splitlines()] == [
        "step 1/10",
        "step 5/10",
    ]


def test_a_status_is_not_repeated(out, clock):
    with plain(out, clock) as display:
        for _ in range(3):
            display.show(status())
            clock.now += PLAIN_SECONDS
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(out, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Display(Console(file=out, force_terminal=True, width=120), clock) as display:
        display.stage("starting Ray")
        display.show(status(1))
        clock.now += PLAIN_SECONDS
        display.show(status(5))
    assert out.getvalue().splitlines() == [
        "starting Ray",
        "epoch 1/2, step 1/10, 2 workers",
        "epoch 1/2, step 5/10, 2 workers",
    ]


def test_messages_are_not_markup_and_not_wrapped(out, clock):
    message = "[red]kept[/red] [/] " + "x" * 300
    with plain(out, clock) as display:
        display.say(message)
    assert out.getvalue() == f"{message}\n"


def test_a_terminal_gets_a_bar(out, clock):
    with Display(Console(file=out, force_terminal=True, width=120), clock) as display:
        display.show(status(1))
        display.show(status(7, metrics={"loss": 0.5}))
        display.say("a line that stays")
    assert "step 7/10" in out.getvalue()
    assert "70%" in out.getvalue()
    assert "a line that stays" in out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bar_and_the_metrics_are_two_lines_that_fit(out, clock, width):
    big = status(123456, total=1234567, epoch=100, epochs=1000, seconds_left=12345.0, metrics=FULL.metrics)
    with Display(Console(file=out, force_terminal=True, width=width, no_color=True), clock) as display:
        display.show(big)
        drawn = [line for line in seen(out).splitlines() if line and "preparing the run" not in line]
    assert len(drawn) == 2
    assert all(len(line) <= width for line in drawn)
    bar = drawn[0].partition(" ")[0]
    assert bar == "━" * round(len(bar) / 10) + "·" * (len(bar) - round(len(bar) / 10))  # also without colors
    if width >= 80:
        assert drawn[0].endswith("  10%  epoch 100/1000  step 123456/1234567  ETA 3:25:45")
    assert drawn[1].startswith("loss 0.1235  accuracy 0.9  2 workers")


def test_trouble_with_saves_is_a_third_line(out, clock):
    with Display(Console(file=out, force_terminal=True, width=80, no_color=True), clock) as display:
        display.show(status(trouble=SaveTrouble(130, 40, "disk full")))
    assert "saved nothing yet, saving has failed for 2:10 (disk full), next try in 0:40" in out.getvalue()


def test_a_terminal_is_not_silent_before_the_first_stage(out, clock):
    with Display(Console(file=out, force_terminal=True, width=80, no_color=True), clock):
        assert "0:00 preparing the run" in seen(out)
        clock.now = 3.0
        wait_until(lambda: "0:03 preparing the run" in seen(out))


def test_a_stage_turns_and_counts_seconds_until_the_run_trains(out, clock):
    with Display(Console(file=out, force_terminal=True, width=80, no_color=True), clock) as display:
        display.stage("starting 2 workers")
        clock.now = 7.0
        wait_until(lambda: "0:07 starting 2 workers" in seen(out))
        display.show(status(0, phase="starting"))
        assert "0:00 computing the first step" in seen(out)
        display.show(status(1))
        assert "step 1/10" in seen(out)
    assert not [thread for thread in threading.enumerate() if thread.name == "raytf-ticker"]


def test_seconds_are_counted_where_a_run_stands_still(out, clock):
    with Display(Console(file=out, force_terminal=True, width=80, no_color=True), clock) as display:
        display.show(status(1))
        clock.now = 5.0
        display.show(status(1))
        wait_until(lambda: "step 1/10  ⠋ 0:05" in re.sub("[⠀-⣿]", "⠋", seen(out)))
        display.show(status(2))
        clock.now = 6.0
        before = len(seen(out))
        display.show(status(2, phase="validating"))
        assert "0:0" not in seen(out)[before:]
        clock.now = 9.0
        wait_until(lambda: "validating  ⠋ 0:03" in re.sub("[⠀-⣿]", "⠋", seen(out)))


def test_the_cursor_is_there_while_it_draws_as_the_process_may_be_killed(out, clock):
    with Display(Console(file=out, force_terminal=True, width=80), clock) as display:
        display.stage("starting 2 workers")
        display.show(status(1))
        assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")


def test_a_stage_is_a_line_without_a_terminal_and_nothing_if_unwanted(out, clock):
    with plain(out, clock) as display:
        for text in ("starting Ray", "starting Ray", "building the model"):
            display.stage(text)
    assert out.getvalue() == "starting Ray\nbuilding the model\n"
    with Display(Console(file=out), clock, shows_progress=False) as display:
        display.stage("never seen")
    assert "never" not in out.getvalue()


def test_a_bar_shows_metric_names_as_they_are(out, clock):
    with Display(Console(file=out, force_terminal=True, width=120, no_color=True), clock) as display:
        display.show(status(1, metrics={"f1[macro]": 0.5}))
    assert "f1[macro] 0.5" in out.getvalue()


def test_saves_that_fail_are_seen():
    trouble = SaveTrouble(130, 40, "storage cannot be reached")
    text = describe(status(checkpoint=2, trouble=trouble))
    assert "saved step 2, saving has failed for 2:10 (storage cannot be reached), next try in 0:40" in text


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("shows_progress", [False, True])
def test_progress_is_shown_unless_somebody_asked_for_silence(out, clock, is_terminal, shows_progress):
    console = Console(file=out, force_terminal=is_terminal, highlight=False, soft_wrap=True)
    with Display(console, clock, shows_progress) as display:
        display.say("a message")
        display.show(status())
        assert "a message" in out.getvalue()
        assert ("step 3/10" in out.getvalue()) is shows_progress


def test_a_line_says_what_goes_on_where_none_was_printed_for_seconds(out, clock):
    console = Console(file=out, force_terminal=False, highlight=False, soft_wrap=True)
    display = Display(console, clock, most_quiet=8.0)
    display.break_silence()
    clock.now += 9
    display.break_silence()
    display.stage("starting Ray")
    clock.now += 7
    display.break_silence()
    clock.now += 2
    display.break_silence()
    display.break_silence()
    display.show(status(3))
    clock.now += 20
    display.break_silence()
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["preparing the run, for 0:09", "starting Ray", "starting Ray, for 0:09"]
    assert "step 3/10" in lines[3]
    assert lines[4] == f"{lines[3]}, for 0:20"
    assert len(lines) == 5


def test_a_silent_run_only_says_that_it_lives(out, clock):
    console = Console(file=out, force_terminal=False, highlight=False, soft_wrap=True)
    display = Display(console, clock, shows_progress=False, most_quiet=8.0)
    display.stage("starting Ray")
    display.show(status(3))
    assert out.getvalue() == ""
    clock.now += 9
    display.break_silence()
    assert "step 3/10" in out.getvalue()


def test_the_thread_breaks_the_silence_where_there_is_no_terminal(out):
    console = Console(file=out, force_terminal=False, highlight=False, soft_wrap=True)
    with Display(console, shows_progress=False, most_quiet=0.1) as display:
        display.stage("starting Ray")
        deadline = time.monotonic() + 20
        while "starting Ray, for 0:0" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "starting Ray, for 0:0" in out.getvalue()


def test_raytfs_own_lines_leave_standard_output_to_a_program(capsys):
    with lines_on_stderr():
        for verbose in (0, 1, 2):
            notebook.display(verbose).say(f"with verbose={verbose}")
    notebook.display(0).say("a silent fit")
    notebook.display(1).say("a job")
    said = capsys.readouterr()
    assert said.out == "a job\n"
    assert said.err.splitlines() == ["with verbose=0", "with verbose=1", "with verbose=2", "a silent fit"]


def test_they_are_seen_while_libraries_are_silenced():
    code = (
        "from raytf import _process\n"
        "from raytf.runs import notebook\n"
        "from raytf.runs.display import lines_on_stderr\n"
        "with lines_on_stderr(), _process.no_stderr():\n"
        "    notebook.display().say('a line')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "a line\n")
