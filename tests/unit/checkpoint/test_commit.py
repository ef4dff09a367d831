"""The commit: it alone knows the phase, and a tier is told what follows from votes, in order."""

from __future__ import annotations

import pytest

from raytf.checkpoint.commit import Commit, Event, Phase, Votes


class Tier:
    """Writes down what it is told."""

    def __init__(self):
        self.told: list[object] = []
        self.asked: list[Phase] = []

    def begin(self, save: int) -> None:
        self.told.append(save)

    def vote(self, phase: Phase) -> Votes:
        self.asked.append(phase)
        return Votes(written=1)

    def commit(self) -> None:
        self.told.append("commit")

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


def test_a_save_may_be_given_up_while_it_is_written():
    tier = Tier()
    commit: Commit[int] = Commit(tier, 1)
    commit.begin(7)
    commit.give_up()
    assert commit.is_idle
    assert tier.told == [7, "abort"]


def test_votes_are_added():
    assert sum([Votes(1, 2, 3, 4), Votes(written=1)], Votes()) == Votes(1, 3, 3, 4)
