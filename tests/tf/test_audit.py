"""Steps of which another rank computes a shard, too: nothing of the run changes, and a wrong bit stops the step."""

from __future__ import annotations

import pytest

from raytf.audit import shard_audit
from raytf.checkpoint.variables import weights_sha256
from tests.tf.audited import ALL, NONE, SHARDS, SOURCE, STEPS, Group, model
from tests.tf.ranks import train


@pytest.fixture(scope="module")
def alone():
    """Weights of one rank without audits."""
    return weights_sha256(train(model, SOURCE, 24, SHARDS, STEPS)[0][0])


@pytest.mark.parametrize("size", [2, 3])
def test_audits_change_nothing(size: int, alone):
    group = Group(size)
    for start in range(STEPS):
        if group.plan.is_full(group.plan.locate(start)[1]):
            outcomes = group.step(start)
            assert all(outcome.finite.all() for outcome in outcomes), outcomes
    assert {weights_sha256(rank.model) for rank in group.ranks} == {alone}


def test_a_shard_that_is_larger_than_others_is_audited():
    group = Group(2, batch=20)  # of which two shards have four records, and four have three
    for start in range(4):
        assert all(outcome.finite.all() for outcome in group.step(start))


#: All of them take minutes; `python -m tests.stress.audits` has a thousand.
OTHERS = [(2, "always", True), (2, "once", False), (3, "once", True), (3, "always", True), (2, "always", False)]


@pytest.mark.parametrize(
    ("size", "times", "is_owner"),
    [
        (2, "once", True),
        (3, "always", False),
        pytest.param(3, "once", False, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_a_wrong_bit_stops_the_step_and_its_rank_is_named(size: int, times: str, is_owner: bool, alone):
    group = Group(size)
    for start in range(3):
        group.step(start)
    choice = shard_audit.choose(0, 4, group.spans)
    culprit = choice.owner if is_owner else choice.auditor
    fault, before = group.faults[culprit], [weights_sha256(rank.model) for rank in group.ranks]
    # The auditor computes the shard before its own ones; the owner's first one may be another.
    own = group.spans[culprit]
    at = own.index(choice.shard) if is_owner else 0
    fault.begin(at if times == "once" else ALL)
    told = group.step(3)
    assert all(isinstance(each, tuple) for each in told)
    assert len(set(told)) == 1
    assert [weights_sha256(rank.model) for rank in group.ranks] == before
    if times == "once":
        fault.begin(NONE)
    verdict = group.verdict(3, told[0])
    expected = () if size == 2 and times == "always" else (culprit,)
    assert verdict.culprits == expected, verdict
    # Without the fault the step is made, and the run ends as one that nobody has disturbed.
    fault.begin(NONE)
    for start in range(3, STEPS):
        assert all(outcome.finite.all() for outcome in group.step(start))
    assert {weights_sha256(rank.model) for rank in group.ranks} == {alone}
