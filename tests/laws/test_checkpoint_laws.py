"""Saving: all ranks go the same way, nothing is committed without all shares, the newest stays."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.checkpoint.cleanup import to_delete
from raytf.checkpoint.commit import Event, Phase, Votes, advance
from raytf.checkpoint.naming import attempt_of, name_of, restore_order, split_name
from raytf.config.objective import MetricObjective
from raytf.training.saving.checkpoint_policy import Cadence

ATTEMPTS = st.sampled_from(["20260101T000000-a", "20260101T000001-b", "20260102T000000-c"])
NAMES = st.builds(name_of, st.integers(0, 30), ATTEMPTS)


class Rank:
    """A worker's side of the protocol: what it did since the save began."""

    def __init__(self, number):
        self.number, self.phase, self.done, self.failed = number, Phase.IDLE, False, False

    def votes(self):
        if self.failed:
            return Votes(failed=1)
        if not self.done:
            return Votes()
        return Votes(written=1) if self.phase is Phase.WRITING else Votes(committed=float(self.number == 0))

    def follow(self, event):
        if event in (Event.BEGIN, Event.COMMIT):
            self.done = event is Event.COMMIT and self.number != 0  # only rank 0 has a manifest to write
        if event in (Event.BEGIN, Event.DONE, Event.FAILED):
            self.failed = False


def total(votes):
    return Votes(*(sum(getattr(v, name) for v in votes) for name in ("want", "written", "committed", "failed")))


@given(st.integers(1, 5), st.data())
def test_all_ranks_take_the_same_way_and_commit_only_what_is_whole(world_size, data):
    ranks, written, begun, committing = [Rank(r) for r in range(world_size)], set(), False, False
    for _ in range(data.draw(st.integers(1, 40))):
        if begun:
            rank = data.draw(st.sampled_from(ranks))
            act = data.draw(st.sampled_from(["finish", "finish", "finish", "fail", "wait"]))
            if act == "fail":
                rank.failed = True
            elif act == "finish" and not rank.done:
                rank.done = True
                if not committing:
                    written.add(rank.number)
        want = float(data.draw(st.booleans())) if not begun else 0.0
        said = total([rank.votes() for rank in ranks] + [Votes(want=want)])
        outcomes = [advance(rank.phase, said, world_size) for rank in ranks]
        assert len(set(outcomes)) == 1
        phase, event = outcomes[0]
        if event is Event.COMMIT:
            assert written == set(range(world_size))
            assert not any(rank.failed for rank in ranks)
        if event is Event.DONE:
            assert committing
            assert ranks[0].done
        for rank in ranks:
            rank.phase = phase
            rank.follow(event)
        begun = phase is not Phase.IDLE
        committing = phase is Phase.COMMITTING
        if event is Event.BEGIN:
            written = set()
            for rank in ranks:
                rank.done = False


@given(st.sampled_from(Phase), st.builds(Votes, *[st.integers(0, 5)] * 4), st.integers(1, 5))
def test_phases_and_events_fit_together(phase, votes, world_size):
    after, event = advance(phase, votes, world_size)
    expected = {
        Event.BEGIN: (Phase.IDLE, Phase.WRITING),
        Event.COMMIT: (Phase.WRITING, Phase.COMMITTING),
        Event.DONE: (Phase.COMMITTING, Phase.IDLE),
        Event.NOTHING: (phase, phase),
        Event.FAILED: (phase, Phase.IDLE),
    }
    assert (phase, after) == expected[event]
    assert not (event is Event.COMMIT and votes.written < world_size)
    assert not (event is Event.FAILED and phase is Phase.IDLE)


@st.composite
def folders(draw):
    """All folders, and the complete ones."""
    names = draw(st.lists(NAMES, unique=True, max_size=10))
    complete = [name for name in names if draw(st.booleans())]
    return names, complete


@given(folders(), st.integers(-1, 12), ATTEMPTS)
def test_retention(found, keep, attempt):
    names, complete = found
    gone = set(to_delete(names, complete, keep, attempt))
    assert gone <= set(names)
    best = restore_order(complete)
    assert not gone & set(best[: max(1, keep)])  # the newest complete one is never deleted
    assert set(best) - gone == set(best[: max(1, keep)])
    for name in gone - set(complete):  # unfinished: another attempt's, and of no use
        assert split_name(name)[1] != attempt
        assert best
        assert split_name(name) < split_name(best[0])


@given(folders(), st.integers(1, 5), ATTEMPTS)
def test_retention_twice_is_retention_once(found, keep, attempt):
    names, complete = found
    gone = to_delete(names, complete, keep, attempt)
    left = [n for n in names if n not in gone]
    assert to_delete(left, [n for n in complete if n not in gone], keep, attempt) == []


@given(folders(), st.integers(-1, 12), ATTEMPTS, st.data())
def test_retention_with_damage(found, keep, attempt, data):
    names, complete = found
    damaged, needed = (data.draw(st.sets(st.sampled_from(complete))) if complete else set() for _ in range(2))
    gone = set(to_delete(names, complete, keep, attempt, damaged, needed))
    good = restore_order(set(complete) - damaged)
    if good:
        assert damaged <= gone
        assert good[0] not in gone
    else:
        assert not gone
    assert gone & set(complete) - damaged == set(good[max(1, keep) :]) - needed


@given(folders(), st.integers(1, 5), ATTEMPTS, st.sets(ATTEMPTS), st.data())
def test_unfinished_saves_of_attempts_that_are_over_go_whatever_their_step(found, keep, attempt, over, data):
    names, complete = found
    unfinished = set(names) - set(complete)
    writing = data.draw(st.sets(st.sampled_from(sorted(unfinished)))) if unfinished else set()
    gone = set(to_delete(names, complete, keep, attempt, over=over, writing=writing))
    assert not gone & writing
    assert gone & set(complete) == set(to_delete(complete, complete, keep, attempt))
    if complete:
        assert {n for n in unfinished - writing if attempt_of(n) in over} <= gone
    for name in gone & unfinished:
        assert attempt_of(name) in over or name < restore_order(complete)[0]


@given(folders(), st.integers(1, 5), ATTEMPTS, st.booleans(), st.data())
def test_the_best_stays_and_so_does_the_newest(found, keep, attempt, largest, data):
    names, complete = found
    value = st.none() | st.floats(0, 1).map(lambda v: round(v, 1))
    values = {name: data.draw(value) for name in complete}
    best = MetricObjective("accuracy", largest).best(values)
    known = [v for v in values.values() if v is not None]
    assert (best is None) == (not known)
    if best is not None:
        assert values[best] == (max if largest else min)(known)
        assert best == min(n for n in complete if values[n] == values[best])
    gone = set(to_delete(names, complete, keep, attempt, needed=[] if best is None else [best]))
    assert best not in gone
    assert not gone & set(restore_order(complete)[:keep])
    assert len(set(complete) - gone) <= keep + 1


@given(st.lists(NAMES, unique=True), st.randoms())
def test_the_latest_step_is_restored_first_and_of_two_the_latest_save(names, random):
    order = restore_order(names)
    assert sorted(order) == sorted(names)
    for better, worse in itertools.pairwise(order):
        assert (split_name(better)[0], better) > (split_name(worse)[0], worse)
    random.shuffle(names)
    assert restore_order(names) == order


@settings(max_examples=300)
@given(st.integers(1, 4), st.data())
def test_a_run_goes_on_from_the_newest_save_that_is_whole(keep, data):
    """Saves, failed saves, damage and deaths in any order, on a storage of names."""
    folder: dict[str, bool] = {}  # name -> whether it has a manifest
    damaged, known = set(), set()
    made: list[str] = []  # complete saves of this run's past, the oldest first
    step = attempt = serial = 0
    for act in data.draw(st.lists(st.sampled_from(["train", "save", "save", "fail", "damage", "die"]), max_size=30)):
        name = name_of(step, f"{attempt:06}", serial)
        complete = [n for n, whole in folder.items() if whole]
        if act == "train":
            step += data.draw(st.integers(1, 5))
        elif act in ("save", "fail"):
            folder[name], serial = act == "save", serial + 1
            if act == "save":
                made.append(name)
                gone = to_delete(list(folder), [*complete, name], keep, f"{attempt:06}", known, {name})
                folder = {n: whole for n, whole in folder.items() if n not in gone}
                assert sum(folder.values()) <= keep + 1
        elif act == "damage" and complete:
            damaged.add(data.draw(st.sampled_from(complete)))
        elif act == "die":
            tried = restore_order(complete)
            chosen = next((n for n in tried if n not in damaged), None)
            recent = [n for n in made[-keep:] if n not in damaged]
            if recent:
                assert chosen == recent[-1]
            known = set(tried[: tried.index(chosen)] if chosen else tried)
            made = made[: made.index(chosen) + 1] if chosen else []
            step, attempt, serial = split_name(chosen)[0] if chosen else 0, attempt + 1, 0


@given(st.integers(0, 10**12 - 1), ATTEMPTS, st.integers(0, 10**12 - 1), ATTEMPTS)
def test_names_sort_as_steps_do(a, x, b, y):
    assert split_name(name_of(a, x)) == (a, f"{x}-0000")
    assert name_of(a, x, 1) < name_of(a, x, 2)
    if a != b:
        assert (name_of(a, x) < name_of(b, y)) == (a < b)


@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 7))
def test_a_cadence_of_steps_saves_at_most_that_far_apart(every, total_steps, stride):
    """Steps come in calls of `stride`: a save is due in the call that reaches or passes a multiple of the cadence."""
    cadence, saved = Cadence(every, None), 0
    for step in range(stride, total_steps + 1, stride):
        if cadence.is_due(step, 0.0, saved, 0.0):
            saved = step
        assert step // every == saved // every
