"""When to save a state: by the cadence, after a restart, and after saves that failed."""

from __future__ import annotations

import pytest

from raytf.training.saving.checkpoint_policy import DEFAULT_EVERY_SECONDS, Cadence, Outage, SaveSchedule, retry_pause


def test_cadence_of_nothing_is_by_time():
    assert Cadence.of(None, None) == Cadence(None, DEFAULT_EVERY_SECONDS)
    assert Cadence.of(10, None) == Cadence(10, None)
    assert Cadence.of(None, 5.0) == Cadence(None, 5.0)


@pytest.mark.parametrize(
    ("step", "saved", "due"),
    [
        (9, 0, False),
        (10, 0, True),
        (11, 0, True),
        (10, 10, False),
        (19, 10, False),
        (20, 10, True),
        (20, 19, True),
        (12, 11, False),
    ],
)
def test_due_by_steps(step, saved, due):
    assert Cadence(10, None).is_due(step, 1e9, saved, 0) is due


@pytest.mark.parametrize(("seconds", "due"), [(4.9, False), (5.0, True), (60.0, True)])
def test_due_by_time(seconds, due):
    assert Cadence(None, 5.0).is_due(1, seconds, 0, 0) is due


def test_due_by_whichever_comes_first():
    both = Cadence(10, 5.0)
    assert both.is_due(10, 1, 0, 0)
    assert both.is_due(1, 5, 0, 0)
    assert not both.is_due(9, 4, 0, 0)


def test_never_due_without_a_new_step():
    assert not Cadence(1, 0.0).is_due(7, 1e9, 7, 0)


def test_the_first_checkpoint_is_due_with_the_first_step():
    cadence = Cadence(None, 3600.0)
    assert cadence.is_due(1, 0.0, None, 0.0)
    assert not cadence.is_due(0, 9.0, None, 0.0)
    assert not cadence.is_due(2, 0.1, 1, 0.0)


def test_with_a_cadence_in_steps_the_first_checkpoint_waits_but_not_long():
    cadence = Cadence(1000, None)
    assert not cadence.is_due(999, 1.9, None, 0.0)
    assert cadence.is_due(1000, 0.1, None, 0.0)
    assert cadence.is_due(1, 2.0, None, 0.0)
    assert not cadence.is_due(0, 9.0, None, 0.0)


def test_a_save_ends_within_its_cadence():
    by_time = Cadence(None, 30.0)
    assert not by_time.is_due(9, 24.9, 1, 0.0, takes=5.0)
    assert by_time.is_due(9, 25.0, 1, 0.0, takes=5.0)
    assert not by_time.is_due(9, 14.9, 1, 0.0, takes=500.0)  # one that lasts longer is not begun all the time
    assert Cadence(None, 0.0).is_due(9, 0.0, 8, 0.0, takes=5.0)


@pytest.mark.parametrize(
    ("now", "saved_at", "due"),
    [(101.9, 100, False), (102, 100, True), (103.9, 102, False), (104, 102, True), (119, 110, False), (120, 110, True)],
)
def test_a_young_group_saves_whenever_it_is_twice_as_old(now, saved_at, due):
    assert Cadence(10**6, None).is_due(9, now, 1, saved_at, restarted_at=100) is due
    assert not Cadence(10**6, None).is_due(9, now, 1, saved_at)


@pytest.mark.parametrize(("every", "most"), [(None, 30), (5, 30), (60, 60), (3600, 300)])
def test_pauses_of_an_outage_are_no_longer_than_the_cadence(every, most):
    assert Cadence.of(None, every).most_pause == most
    assert Cadence.of(10, None).most_pause == 30


@pytest.mark.parametrize(
    ("failures", "least", "most"),
    [(1, 2.5, 5), (2, 5, 10), (3, 10, 20), (7, 150, 300), (99, 150, 300), (9999, 150, 300)],
)
def test_pauses_between_tries(failures, least, most):
    assert retry_pause(failures, 0.0) == least
    assert retry_pause(failures, 1.0) == most


def test_an_outage_holds_saves_back_until_it_ends():
    outage = Outage(lambda: 0.0)
    assert outage.allows(0, due=True)
    assert not outage.allows(0, due=False)
    outage.fail(100, "storage is full")
    assert (outage.failures, outage.since, outage.retry_at, outage.why) == (1, 100, 102.5, "storage is full")
    assert not outage.allows(102, due=True)
    assert outage.allows(102.5, due=False)
    outage.fail(103, "storage cannot be reached")
    assert (outage.failures, outage.since, outage.retry_at) == (2, 100, 108)
    outage.end()
    assert outage.allows(103, due=True)
    assert not outage.allows(200, due=False)
    outage.fail(300, "again")
    assert (outage.since, outage.retry_at) == (300, 302.5)


def schedule(step: int, saved_step: int | None) -> SaveSchedule:
    """A schedule of a group that begins at time 100 and saves every 10 steps."""
    return SaveSchedule(Cadence(10, None), step, saved_step, 100.0, lambda: 0.0)


@pytest.mark.parametrize(
    ("step", "saved_step", "stop", "now", "due"),
    [
        (0, None, 1, 110, False),  # the first steps, which include tracing, do not count
        (0, None, 10, 110, True),
        (0, 0, 9, 110, False),
        (0, 0, 10, 110, True),
        (7, 4, 8, 101, False),
        (7, 4, 8, 102, True),  # a group that continues from the state of an earlier one is young
    ],
)
def test_when_the_first_save_of_a_group_is_due(step, saved_step, stop, now, due):
    assert schedule(step, saved_step).is_due(stop, now, 0.0) is due


def test_a_run_without_a_checkpoint_saves_soon_after_its_first_steps():
    first = schedule(0, None)
    first.stepped(110.0)
    first.stepped(111.0)
    assert not first.is_due(2, 111.9, 0.0)
    assert first.is_due(2, 112.0, 0.0)


def test_the_newest_save_counts_from_when_its_state_was_copied():
    group = schedule(0, None)
    group.begin(9, 103.0)
    assert not group.is_due(9, 200.0, 0.0)
    assert group.is_due(10, 104.0, 0.0)


def test_a_copy_that_waits_is_saved_at_once_unless_saves_fail():
    group = schedule(0, 0)
    assert group.is_due(1, 101.0, 0.0, is_waiting=True)
    group.outage.fail(101.0, "storage is full")
    assert not group.is_due(1, 103.4, 0.0, is_waiting=True)
    assert group.is_due(1, 103.5, 0.0)
