"""What a person sees: one line for a status, lines now and then where there is no terminal, a bar where there is."""

import io

import pytest
from rich.console import Console

from raytf.runs.display import PLAIN_SECONDS, Display
from raytf.runs.status import SaveTrouble, Status, clock_text, describe


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


def test_describe_says_everything():
    text = describe(
        status(metrics={"loss": 0.12345, "accuracy": 0.9}, samples_per_second=12345.6, seconds_left=65.0, checkpoint=2)
    )
    assert text == (
        "epoch 1/2, step 3/10, loss 0.1235, accuracy 0.9, 12,346 samples/s, 2 workers, saved step 2, ETA 1:05"
    )


def test_describe_with_little_to_say():
    assert describe(status(workers=1)) == "epoch 1/2, step 3/10, 1 worker, saved nothing yet"


def test_a_phase_takes_the_place_of_the_eta():
    text = describe(status(phase="validating", seconds_left=65.0))
    assert text.endswith("saved nothing yet, validating")


def test_checkpoint_of_step_0_is_a_checkpoint():
    assert "saved step 0" in describe(status(checkpoint=0))


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
