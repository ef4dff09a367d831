"""The commit: it alone knows the phase, and a tier is told what follows from votes, in order."""

from __future__ import annotations

import pytest

from raytf.checkpoint.commit import Commit, Event
from raytf.checkpoint.tier import Phase, Votes


class Tier:
    """Writes down what it is told."""

    def __init__(self, is_complete_at_once: bool = False):
        self.told: list[object] = []
        self.asked: list[Phase] = []
        self._is_complete_at_once = is_complete_at_once

    def begin(self, save: int) -> None:
        self.told.append(save)

    def vote(self, phase: Phase) -> Votes:
        self.asked.append(phase)
        return Votes(written=1)

    def commit(self) -> bool:
        self.told.append("commit")
        return self._is_complete_at_once

    def done(self) -> None:
        self.told.append("done")

    def abort(self) -> None:
        self.told.append("abort")


def test_a_save_goes_through_its_phases_and_another_one_follows():
    tier = Tier()
    commit: Commit[int] = Commit(tier, 2)
    assert (commit.is_idle, commit.save, commit.under_way) == (True, None, None)
    for step in (7, 8):
        assert commit.advance(Votes(want=1), lambda step=step: step) is Event.BEGIN
        commit.votes()
        assert commit.advance(Votes(written=1)) is Event.NOTHING
        assert commit.under_way == step
        assert commit.advance(Votes(written=2)) is Event.COMMIT
        commit.votes()
        assert not commit.is_idle
        assert commit.advance(Votes(committed=1)) is Event.DONE
        assert (commit.is_idle, commit.save, commit.under_way) == (True, step, None)
    assert tier.told == [7, "commit", "done", 8, "commit", "done"]
    assert tier.asked == [Phase.WRITING, Phase.COMMITTING] * 2


@pytest.mark.parametrize("is_committing", [False, True])
def test_who_is_told_of_a_failure_hears_of_it_before_the_tier(is_committing: bool):
    tier = Tier()
    commit: Commit[int] = Commit(tier, 1, lambda: tier.told.append(("failed", commit.save, commit.is_idle)))
    commit.begin(7)
    if is_committing:
        commit.advance(Votes(written=1))
    assert commit.advance(Votes(failed=1, written=1, committed=1)) is Event.FAILED
    assert tier.told[-2:] == [("failed", 7, True), "abort"]
    assert commit.advance(Votes(failed=1)) is Event.NOTHING


def test_a_tier_that_is_complete_with_its_last_share_needs_no_second_vote():
    tier = Tier(is_complete_at_once=True)
    commit: Commit[int] = Commit(tier, 3)
    commit.begin(7)
    assert commit.advance(Votes(written=2)) is Event.NOTHING
    assert commit.advance(Votes(written=3)) is Event.DONE
    assert commit.is_idle
    assert tier.told == [7, "commit", "done"]


def test_a_save_may_begin_over_itself_and_be_distrusted_once_it_is_done():
    tier = Tier(is_complete_at_once=True)
    commit: Commit[int] = Commit(tier, 1)
    commit.begin(7)
    commit.begin(7)
    assert commit.advance(Votes(written=1)) is Event.DONE
    commit.give_up()
    assert tier.told == [7, 7, "commit", "done", "abort"]


def test_votes_are_added():
    assert sum([Votes(1, 2, 3, 4), Votes(written=1)], Votes()) == Votes(1, 3, 3, 4)
