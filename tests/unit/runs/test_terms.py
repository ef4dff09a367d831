"""No clock orders attempts: the driver's term does, and within a term the number of the generation or group."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from raytf.checkpoint import naming
from raytf.checkpoint.slot_ledger import HeldShare, generations, is_latest
from raytf.distributed.step_digest import DigestLayout
from raytf.runs import digest_log, ledger, run_log
from raytf.runs.lease import LEASE_FILE, Lease
from raytf.storage.storage import Storage
from raytf.training import startup

#: As earlier versions named them; the second one by a clock that is far ahead.
OLD, AHEAD = "20260101T000000.000-ffffff", "29990101T000000.000-ffffff"
LAYOUT = DigestLayout(1, ("kernel", "loss and metrics"))
NOW = 1.8e9


@pytest.fixture
def run(tmp_path):
    return Storage(str(tmp_path / "run"))


def lease(run):
    return Lease(run, lambda text: None, sleep=lambda seconds: None, latest_term=lambda: ledger.latest_term(run))


def write(log, first, last):
    count = last - first + 1
    log.add(first, 0, np.full(count, 0.5), np.full(count, 0.1), np.ones((count, LAYOUT.bytes), np.uint8))
    log.write(log.take())


def steps(run):
    """The steps that can be read, and those of which the digests can be."""
    digests = digest_log.read(run, run_log.STEPS)
    found = run_log.read_steps(run.uri)["step"].tolist()
    return found, [step for step in range(1, 1000) if digests.of(step) is not None]


@pytest.mark.parametrize("skew", [0, -3, -3600, 3600])
def test_no_step_is_lost_when_rank_0_moves_to_a_host_with_another_clock(run, skew):
    for number, (first, last, clock) in enumerate([(1, 100, NOW), (101, 200, NOW + 2 + skew), (201, 300, NOW + 4)]):
        write(run_log.StepLog(run, run_log.new_attempt(clock, (1, number)), LAYOUT), first, last)
    assert steps(run) == (list(range(1, 301)),) * 2


@pytest.mark.parametrize("jump", [0, -3600, 3600])
def test_no_step_is_lost_when_the_clock_jumps_during_an_attempt(run, jump, monkeypatch):
    now = [NOW]
    monkeypatch.setattr("time.time", lambda: now[0])
    log = run_log.StepLog(run, run_log.new_attempt(number=(1, 1)), LAYOUT)
    write(log, 1, 100)
    now[0] += jump
    write(log, 101, 200)
    write(log.renewed(), 201, 250)
    write(run_log.StepLog(run, run_log.new_attempt(number=(1, 2)), LAYOUT), 251, 300)
    assert steps(run) == (list(range(1, 301)),) * 2


@pytest.mark.parametrize("old", [OLD, AHEAD])
def test_rows_that_an_earlier_version_wrote_stay_and_count_as_older(run, old):
    write(run_log.StepLog(run, old, LAYOUT), 1, 200)
    write(run_log.StepLog(run, run_log.new_attempt(NOW, (1, 1)), LAYOUT), 101, 150)
    assert steps(run) == (list(range(1, 151)),) * 2


def test_a_new_driver_counts_whatever_the_clocks_say(run):
    for first, clock in ((1, NOW), (101, NOW - 3600), (201, NOW - 7200)):
        with lease(run) as held:
            for number in (1, 2):
                name = run_log.new_attempt(clock, (held.owner["term"], number))
                write(run_log.StepLog(run, name, LAYOUT), first + 50 * (number - 1), first + 50 * number - 1)
    assert steps(run) == (list(range(1, 301)),) * 2


def test_late_writes_of_a_suspended_driver_do_not_count_as_newer(run):
    with lease(run) as suspended:
        write(run_log.StepLog(run, run_log.new_attempt(NOW, (suspended.owner["term"], 1)), LAYOUT), 1, 100)
        run.put(LEASE_FILE, json.dumps({**suspended.owner, "started": "dead"}).encode())
        with lease(run) as held:
            write(run_log.StepLog(run, run_log.new_attempt(NOW - 3, (held.owner["term"], 1)), LAYOUT), 101, 300)
            write(run_log.StepLog(run, run_log.new_attempt(NOW + 9, (suspended.owner["term"], 7)), LAYOUT), 101, 110)
    assert steps(run) == (list(range(1, 301)),) * 2


@pytest.mark.parametrize(
    ("file", "term"),
    [
        ("steps/000000000101-a000007.000002-20260101T000000.000-aaaaaa.csv", 7),
        ("steps/000000000101-a000007.000002-20260101T000000.000-aaaaaa~.digests", 7),
        ("attempts/a000012.000002-20260101T000000.000-aaaaaa.json", 12),
        ("checkpoints/000000000400-a000003.000002-20260101T000000.000-aaaaaa-0001/MANIFEST.json", 3),
        ("ledger/000041-20260101T000000.000-aaaaaa-0000.jsonl", 41),
        (f"steps/000000000101-{AHEAD}.csv", 0),
        (f"attempts/{OLD}.json", 0),
        ("ledger/live.json", 0),
    ],
)
def test_a_term_is_higher_than_all_in_the_names_of_the_run(run, file, term):
    run.put(file, b"")
    assert ledger.latest_term(run) == term
    with lease(run) as held:
        assert held.owner["term"] == json.loads(run.get(LEASE_FILE))["term"] == term + 1


@pytest.mark.parametrize(("left", "term"), [({"term": 6}, 7), ({}, 1), ({"term": 2**60}, 1), ({"term": "6"}, 1)])
def test_a_term_is_higher_than_that_of_the_lease_that_a_dead_owner_left(run, left, term):
    owner = {key: value for key, value in Lease(run).owner.items() if key != "term"}
    run.put(LEASE_FILE, json.dumps({**owner, "started": "1", **left}).encode())
    with lease(run) as held:
        assert held.owner["term"] == term


def test_of_two_copies_after_one_step_that_of_the_later_attempt_counts():
    early, late = (run_log.new_attempt(clock, (1, n)) for n, clock in ((1, NOW), (2, NOW - 3)))
    found = {name: [HeldShare(40, name, 0, 1)] for name in (OLD, late, early)}
    assert [each.attempt for each in generations(found, None)] == [late, early, OLD]
    assert is_latest({"node": [HeldShare(40, late, 0, 1)]}, [OLD, early, late])
    assert not is_latest({"node": [HeldShare(40, early, 0, 1)]}, [OLD, early, late])
    names = [naming.name_of(40, name, 1) for name in (early, OLD, late)]
    assert [naming.attempt_of(name) for name in naming.restore_order(names)] == [late, early, OLD]
    assert naming.is_of_dead_attempt(f"steps/000000000001-{early}.csv", late)
    assert naming.is_of_dead_attempt(f"steps/000000000001-{AHEAD}.csv", late)
    assert not naming.is_of_dead_attempt(f"steps/000000000001-{late}.csv", early)


def test_the_ledgers_of_drivers_are_ordered_by_their_terms(run):
    run.put("ledger/000001-20990101T000000.000-aaaaaa-0000.jsonl", b'{"time": 1000, "kind": "driver"}\n')
    for time in (500, 2000):
        with lease(run) as held:
            book = ledger.Ledger(run, ledger.name_of(held.owner["term"]))
            book.add([{"time": time, "kind": "driver"}])
            assert book.flush()
    assert [event["time"] for event in ledger.read(run)] == [1000, 500, 2000]


def test_an_attempt_has_its_generation_even_if_rank_0_was_suspended():
    told = []
    monitor = SimpleNamespace(begin=lambda name: told.append(name) or ([], None, False, [], {}))
    job, group = SimpleNamespace(monitor=monitor, term=3), SimpleNamespace(rank=0, share=lambda data: data)
    late, early = (startup._announce(job, group, number)[0] for number in (12, 2))
    assert early < late
    assert told == [late, early]
    assert naming.term_of(late) == 3
