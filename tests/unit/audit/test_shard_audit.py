"""Who computed wrongly, decided from digests: tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.audit.shard_audit import (
    AuditChoice,
    AuditVerdict,
    Standing,
    back_to,
    choose,
    is_due,
    judge,
    of_records,
    of_weights,
    reachable,
    why_none,
)
from raytf.data.plan import assign
from raytf.distributed.step_agreement import ReplicaVerdict

GOOD, BAD, ODD = b"good", b"bad", b"odd"
CHOICE = AuditChoice(5, 1, 2)


@given(st.integers(0, 2**32 - 1), st.integers(1, 10**9), st.integers(2, 9), st.integers(0, 3))
def test_a_shard_has_another_rank_as_its_auditor(seed: int, step: int, ranks: int, more: int):
    spans = assign(ranks + more, ranks)
    shard, owner, auditor = choose(seed, step, spans)
    assert shard in spans[owner]
    assert auditor != owner
    assert 0 <= auditor < ranks
    assert choose(seed, step, spans) == (shard, owner, auditor)


def test_all_shards_and_all_pairs_come_up():
    spans = assign(8, 3)
    drawn = {choose(0, step, spans) for step in range(1, 2000)}
    assert {each.shard for each in drawn} == set(range(8))
    assert len({(each.owner, each.auditor) for each in drawn}) == 6


def test_every_so_many_steps_there_is_one():
    assert [step for step in range(1, 13) if is_due(step, 4)] == [4, 8, 12]
    assert not any(is_due(step, 0) for step in range(1, 13))


@pytest.mark.parametrize(
    ("told", "again", "culprits", "why"),
    [
        # One that was wrong once: all compute the same when they do it again.
        ((BAD, GOOD), [[GOOD] * 3] * 3, (1,), "when they repeat it"),
        ((GOOD, BAD), [[GOOD] * 3] * 3, (2,), "when they repeat it"),
        ((GOOD, BAD), [[GOOD] * 3] * 2, (2,), "when they repeat it"),
        # One that always is: the third one votes.
        ((BAD, GOOD), [[GOOD] * 3, [BAD] * 3, [GOOD] * 3], (1,), "different bits than the other 2 ranks"),
        # One that is now and then.
        ((BAD, GOOD), [[GOOD] * 3, [GOOD, ODD, GOOD], [GOOD] * 3], (1,), "the same bits twice"),
        ((BAD, GOOD), [[GOOD, BAD, GOOD], [GOOD] * 3], (0,), "the same bits twice"),
        # Kernels that are not deterministic are nobody's fault.
        ((BAD, GOOD), [[GOOD, ODD], [BAD, ODD], [GOOD] * 2], (), "most ranks do not"),
        # Two that differ for ever, and one who told what nobody computes.
        ((BAD, GOOD), [[GOOD] * 3, [BAD] * 3], (), "and they differ"),
        ((BAD, ODD), [[GOOD] * 3] * 3, (), "neither rank reported"),
        ((BAD, GOOD), [[GOOD] * 3, [GOOD] * 3, [BAD] * 3, [BAD] * 3], (), "and they differ"),
    ],
)
def test_the_culprit_is_named(told, again, culprits, why):
    choice = AuditChoice(5, 0, 1) if len(again) == 2 and told[0] is BAD else CHOICE
    if len(again) == 2 and told[0] is GOOD:
        choice = AuditChoice(5, 0, 1)
        culprits = (1,)
    verdict = judge(choice, told, again)
    assert verdict.culprits == culprits
    assert why in verdict.why


@given(st.integers(2, 6), st.data())
def test_one_bad_rank_of_three_or_more_is_always_found(ranks: int, data: st.DataObject):
    bad = data.draw(st.integers(0, ranks - 1))
    other = data.draw(st.integers(0, ranks - 1).filter(lambda rank: rank != bad))
    choice = data.draw(st.sampled_from([AuditChoice(0, bad, other), AuditChoice(0, other, bad)]))
    told = (BAD, GOOD) if choice.owner == bad else (GOOD, BAD)
    of_bad = data.draw(st.lists(st.sampled_from([GOOD, BAD, ODD]), min_size=4, max_size=4))
    again = [of_bad if rank == bad else [GOOD] * 4 for rank in range(ranks)]
    verdict = judge(choice, told, again)
    if ranks > 2 or len(set(of_bad)) > 1 or of_bad[0] == GOOD:
        assert verdict.culprits == (bad,)
    else:
        assert verdict.culprits == ()


NOBODY, THIRD = AuditVerdict((), "nobody can say"), AuditVerdict((2,), "it computes wrongly")
WEIGHTS = of_weights(ReplicaVerdict((2,), 0))


@pytest.mark.parametrize(
    ("verdict", "copied", "is_exact", "step"),
    [
        (THIRD, [None] * 3, True, 30),  # it came then
        (THIRD, [None] * 3, False, 64),  # an audit has agreed with it then
        (THIRD, [90, 90, 90], False, 64),
        (NOBODY, [90, 90, 90], True, 64),  # the earlier one of the two that differ
        (NOBODY, [90, 90, 90], False, 64),
        (WEIGHTS, [90, 80, 90], True, 80),
        (of_weights(ReplicaVerdict((0, 1), None)), [90, 80, 90], False, 80),
        (WEIGHTS, [90, None, 90], True, 30),
        (WEIGHTS, [90, None, 90], False, 64),
    ],
)
def test_to_which_step_a_run_goes_back(verdict, copied, is_exact, step):
    standings = [Standing(0, 96), Standing(0, 80), Standing(30, 64)]
    assert back_to(CHOICE, verdict, standings, copied, is_exact) == step


def test_a_process_joins_once():
    standing = Standing()
    standing.joins(40)
    standing.vouched = 64
    standing.joins(70)
    assert (standing.joined, standing.vouched) == (40, 64)


@pytest.mark.parametrize(
    ("kept", "is_exact", "step"), [([], False, 0), ([50, 70], False, 50), ([70, 90], False, 70), ([70, 90], True, 0)]
)
def test_a_run_with_a_checkpoint_starts_over_only_if_it_is_exact(kept, is_exact, step):
    assert reachable(64, kept, is_exact) == step


def test_whose_weights_are_wrong():
    assert WEIGHTS.culprits == (2,)
    assert of_weights(ReplicaVerdict((0, 1), None)).culprits == ()


def test_audits_without_exact_mode_need_processors_of_one_kind():
    assert why_none(["EPYC, 2 threads"] * 3, False) == ""
    assert why_none(["Xeon, 2 threads", "EPYC, 2 threads"], False).endswith("EPYC, 2 threads; Xeon, 2 threads")
    assert "GPUs" in why_none(["H100, 2 threads"] * 2, True)


@pytest.mark.parametrize(
    ("again", "nodes", "culprits"),
    [
        ([GOOD, BAD, BAD], "abb", ()),  # two ranks of one node do not outvote another node
        ([GOOD, BAD, GOOD], "abc", (1,)),
        ([GOOD, GOOD, BAD, GOOD], "aabb", (2,)),
        ([GOOD, BAD, GOOD], "aaa", (1,)),
    ],
)
def test_nodes_vote(again, nodes, culprits):
    told = again[CHOICE.owner], again[CHOICE.auditor]
    assert judge(CHOICE, told, [[digest] * 4 for digest in again], list(nodes)).culprits == culprits


@pytest.mark.parametrize(
    ("trained", "again", "culprits"),
    [
        ((GOOD, GOOD), [GOOD] * 3, None),
        ((BAD, GOOD), [GOOD] * 3, (1,)),  # once
        ((GOOD, BAD), [GOOD, GOOD, BAD], (2,)),  # each time that it reads
        ((BAD, GOOD), [GOOD, ODD, GOOD], (1,)),
        ((BAD, ODD), [GOOD] * 3, ()),
        ((BAD, GOOD), [b"1", b"2", b"3"], ()),  # drawn anew each time
    ],
)
def test_whose_records_were_wrong(trained, again, culprits):
    verdict = of_records(CHOICE, trained, again)
    assert (None if verdict is None else verdict.culprits) == culprits
    assert verdict is None or not verdict.is_proven


def test_a_process_is_trusted_as_far_as_its_node_has_trained_before():
    standing = Standing()
    assert standing.joins(100, (10, 64))
    assert (standing.joined, standing.vouched) == (10, 64)
    late = Standing()
    assert late.joins(50, (10, 64))  # the run has gone back meanwhile
    assert (late.joined, late.vouched) == (10, 50)
    assert not late.joins(60)
