"""Who owns a run, as it is decided without storage, clocks and threads."""

import json

import pytest

from raytf.errors import RunInUseError, StorageError
from raytf.runs import lease_decisions
from raytf.runs.lease_decisions import (
    LOOK_SECONDS,
    STALE_SECONDS,
    Claim,
    Delete,
    LatestTerm,
    ProcessStart,
    Read,
    Renew,
    Say,
    Wait,
)

OTHER = {"id": "other", "host": "far", "boot": "another", "pid": 7, "started": "1", "term": 4}
LOST = StorageError("the answer was lost", "unreachable")


def mine():
    return {"id": "mine", "host": "here", "boot": "this", "pid": 3, "started": "2", "term": 0}


def found(holder, beat=0):
    return json.dumps({**holder, "beat": beat}).encode(), f"v{beat}"


def carried_out(decisions, answer):
    """Carry out commands with the answers of a function, and return them."""
    done = []
    try:
        command = next(decisions)
        while True:
            done.append(command)
            given = answer(command)
            command = decisions.throw(given) if isinstance(given, Exception) else decisions.send(given)
    except StopIteration:
        return done


def taken(leases, owner, start="1"):
    """Commands of a process that takes a run, which reads some leases one after another."""
    leases = iter(leases)
    answers = {Read: lambda: next(leases), LatestTerm: lambda: 2, ProcessStart: lambda: start}
    return carried_out(lease_decisions.taking(owner, "r", "f"), lambda command: answers.get(type(command), str)())


def test_a_run_without_an_owner_is_taken_with_a_term_of_its_own():
    owner = mine()
    done = taken([None, found(mine())], owner)
    assert [type(command) for command in done] == [Read, LatestTerm, Claim, Read]
    assert (done[2].version, owner["term"]) == (None, 3)


def test_who_has_not_won_owns_nothing():
    with pytest.raises(RunInUseError, match="process 7 on far"):
        taken([None, found(OTHER)], mine())


def test_a_dead_process_of_this_machine_is_taken_over_and_a_live_one_is_not():
    here = {**OTHER, "boot": "this"}
    assert Wait(LOOK_SECONDS) not in taken([found(here), found(mine())], mine(), start=None)
    with pytest.raises(RunInUseError):
        taken([found(here)], mine(), start="1")


def test_a_silent_owner_is_replaced_after_20_looks_through_any_outage():
    owner, looks = mine(), round(STALE_SECONDS / LOOK_SECONDS)
    done = taken([*[found(OTHER)] * (1 + looks), found(mine())], owner)
    assert done.count(Wait(LOOK_SECONDS)) == looks
    assert [command.version for command in done if isinstance(command, Claim)] == ["v0"]
    assert owner["term"] == 5


@pytest.mark.parametrize("now", [found(OTHER, 1), (b"{", "v1")])
def test_a_lease_that_changes_is_held(now):
    with pytest.raises(RunInUseError):
        taken([found(OTHER), found(OTHER), now], mine())


def test_renewals_end_when_the_lease_is_another_ones():
    leases = iter([found(mine()), found(mine(), 1), found(OTHER)])
    answers = {Read: lambda: next(leases), Renew: lambda: True}
    done = carried_out(lease_decisions.renewing(mine(), "r"), lambda command: answers.get(type(command), str)())
    assert [command.version for command in done if isinstance(command, Renew)] == ["v0", "v1"]
    assert not any(isinstance(command, Say) for command in done)


@pytest.mark.parametrize(("failures", "lines"), [(1, 2), (5, 2), (0, 0)])
def test_an_outage_is_told_once_and_its_end_once(failures, lines):
    reads = iter([*[LOST] * failures, found(mine()), None])
    answers = {Read: lambda: next(reads), Renew: lambda: True}
    done = carried_out(lease_decisions.renewing(mine(), "r"), lambda command: answers.get(type(command), str)())
    assert sum(isinstance(command, Say) for command in done) == lines


@pytest.mark.parametrize(
    ("lease", "is_renewed", "is_deleted"),
    [(None, True, False), (found(OTHER), True, False), (found(mine()), True, True), (found(mine()), False, False)],
)
def test_only_an_owners_own_lease_is_given_back(lease, is_renewed, is_deleted):
    answers = {Read: lease, Renew: is_renewed}
    done = carried_out(lease_decisions.giving_back("mine"), lambda command: answers.get(type(command)))
    assert (Delete() in done) == is_deleted
