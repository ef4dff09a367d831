"""What a keeper's word is worth, and when another one is started."""

import pytest

from raytf.checkpoint.keeper_client import FRESH_SECONDS, MOST_PAUSE_SECONDS, SILENT_SECONDS, Health, pause


@pytest.mark.parametrize(
    ("deaths", "seconds"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (6, 16), (8, MOST_PAUSE_SECONDS), (10**6, MOST_PAUSE_SECONDS)],
)
def test_keepers_that_die_again_and_again_make_no_storm(deaths, seconds):
    assert pause(deaths) == seconds


def test_what_a_keeper_said_counts_for_some_seconds():
    health = Health(100.0)
    assert health.step(100.0) is None
    health.hear(10, 101.0)
    assert health.step(101.0 + FRESH_SECONDS / 2) == 10
    assert health.step(101.0 + FRESH_SECONDS) is None
    health.hear(None, 102.0)  # asked while the ranks wrote
    assert health.step(102.0) == 10
    health.hear(20, 103.0)
    assert health.step(103.0) == 20


def test_a_keeper_that_answers_nobody_is_found():
    health = Health(100.0)
    assert not health.is_silent(100.0 + SILENT_SECONDS - 1)
    assert health.is_silent(100.0 + SILENT_SECONDS)
    health.forgive(30.0)  # the whole container was frozen
    assert not health.is_silent(130.0 + SILENT_SECONDS - 1)
    health.hear(10, 149.0)
    assert not health.is_silent(130.0 + SILENT_SECONDS)
