"""The ledger: events are kept whatever storage does, and every second belongs to one category."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.errors import StorageError
from raytf.runs import ledger, timeline
from raytf.storage.storage import Storage


class Broken(Storage):
    """Storage that refuses to write while it is told to."""

    is_away = False

    def put(self, name, data):
        if self.is_away:
            raise StorageError("away", "unreachable")
        super().put(name, data)


def event(time, kind="progress", **fields):
    return {"time": float(time), "kind": kind, **fields}


def started(time):
    return event(time, "driver", state="started")


def ended(time, outcome="finished"):
    return event(time, "driver", state="ended", outcome=outcome)


def phase(time, name, step=0, workers=2, **fields):
    return event(time, "phase", phase=name, step=step, workers=workers, **fields)


def seconds(*events):
    return timeline.account(timeline.timeline(events))


def test_events_come_back_in_the_order_of_drivers(tmp_path):
    run = Storage(str(tmp_path))
    late, early = ledger.Ledger(run, "b"), ledger.Ledger(run, "a")
    late.add([event(3), event(4)])
    early.add([event(1)])
    assert late.flush()
    assert early.flush()
    late.add([event(5)])
    assert late.flush()
    assert late.flush()
    assert [e["time"] for e in ledger.read(run)] == [1, 3, 4, 5]
    assert run.list(ledger.FOLDER) == ["a-0000.jsonl", "b-0000.jsonl"]


def test_a_loss_that_is_not_finite_is_null(tmp_path):
    run = Storage(str(tmp_path))
    kept = ledger.Ledger(run, "a")
    kept.add([event(1, loss=float("nan")), event(2, loss=0.5)])
    kept.sign(event(3, loss=float("inf")))
    assert kept.flush()
    for name in run.list(ledger.FOLDER):
        text = run.get(f"{ledger.FOLDER}/{name}")
        assert b"NaN" not in text
        assert b"Infinity" not in text
    assert [e["loss"] for e in ledger.read(run)] == [None, 0.5, None]


def test_the_sign_of_life_is_the_last_event_until_a_newer_one_is_written(tmp_path):
    run = Storage(str(tmp_path))
    book = ledger.Ledger(run, "a")
    book.sign(event(1, step=1))
    assert ledger.read(run) == []  # of whom, is not known yet
    book.add([started(2)])
    assert book.flush()
    assert [e["time"] for e in ledger.read(run)] == [2]
    book.sign(event(3, step=7))
    assert ledger.read(run)[-1] == event(3, step=7)
    assert ledger.newest(run, run.list(ledger.FOLDER), lambda events: True) == [started(2), event(3, step=7)]
    assert ledger.read(run, before="b") == [started(2)]
    book.add([event(4, step=9)])
    assert book.flush()
    assert [e["time"] for e in ledger.read(run)] == [2, 4]
    book.sign(event(5, step=11))
    later = ledger.Ledger(run, "b")
    later.add([started(1)])  # whose clock is behind
    assert later.flush()
    assert [e["time"] for e in ledger.read(run)] == [2, 4, 1]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b'{"time": "soon", "kind": "progress", "driver": "a"}', b"\xff" * 99]
)
def test_a_sign_of_life_that_is_damaged_is_none(tmp_path, text):
    run = Storage(str(tmp_path))
    book = ledger.Ledger(run, "a")
    book.add([started(2)])
    assert book.flush()
    run.put(f"{ledger.FOLDER}/{ledger.LIVE}", text)
    assert ledger.read_with_problems(run) == ([started(2)], [])


def test_nothing_follows_the_end_of_a_driver(tmp_path):
    run = Storage(str(tmp_path))
    book = ledger.Ledger(run, "a")
    book.add([started(2), ended(4)])
    assert book.flush()
    book.sign(event(5, step=7))
    assert [e["time"] for e in ledger.read(run)] == [2, 4]


def test_long_ledgers_take_several_files(s3):
    run = Storage(s3("run"))
    book = ledger.Ledger(run, "a")
    times = list(range(2 * ledger.FILE_EVENTS + 7))
    for i in range(0, len(times), 400):
        book.add(event(t) for t in times[i : i + 400])
        assert book.flush()
    assert [e["time"] for e in ledger.read(run)] == times
    assert len(run.list(ledger.FOLDER)) == 3


def test_storage_that_is_away_loses_nothing(tmp_path):
    run = Broken(str(tmp_path))
    book = ledger.Ledger(run, "a")
    run.is_away = True
    for t in range(1200):
        book.add([event(t)])
        if t % 100 == 0:
            assert not book.flush()
    run.is_away = False
    assert book.flush()
    assert [e["time"] for e in ledger.read(run)] == list(range(1200))


def test_of_more_than_can_wait_the_oldest_are_lost_and_nothing_twice(tmp_path):
    run = Broken(str(tmp_path))
    book = ledger.Ledger(run, "a", most_waiting=700)
    book.add([event(t) for t in range(10)])
    assert book.flush()
    run.is_away = True
    for t in range(10, 3000):
        book.add([event(t)])
        if t % 50 == 0:
            assert not book.flush()
    run.is_away = False
    assert book.flush()
    found = [int(e["time"]) for e in ledger.read(run)]
    assert found[:10] == list(range(10)), "what was written stays"
    assert found[-700:] == list(range(2300, 3000)), "the newest that wait are kept"
    assert found == sorted(set(found))
    book.add([event(3000)])
    assert book.flush()
    assert int(ledger.read(run)[-1]["time"]) == 3000


class Racing(Storage):
    """Storage to which more comes while it writes."""

    def put(self, name, data):
        super().put(name, data)
        if self.more:
            self.book.add(self.more.pop(0))


def test_what_comes_while_a_file_is_written_is_kept(tmp_path):
    run = Racing(str(tmp_path))
    book = run.book = ledger.Ledger(run, "a", most_waiting=600)
    run.more = [[event(t) for t in range(i, i + 300)] for i in range(500, 2300, 300)]
    book.add([event(t) for t in range(500)])
    assert book.flush()
    assert [int(e["time"]) for e in ledger.read(run)] == list(range(2300))


def test_a_line_that_is_cut_off_is_left_out(tmp_path):
    run = Storage(str(tmp_path))
    run.put(f"{ledger.FOLDER}/a-0000.jsonl", (json.dumps(event(1)) + '\n{"time": 2, "ki').encode())
    assert [e["time"] for e in ledger.read(run)] == [1]


def test_a_run_without_faults():
    assert seconds(
        started(0),
        event(1, "group", workers=2),
        phase(8, "starting"),
        phase(10, "training", 1),
        event(20, step=100, stall=0.5),
        phase(30, "validating", 200, stall=0.5),
        phase(33, "training", 200, stall=0.5),
        phase(43, "testing", 300, stall=1.5),
        ended(45),
    ) == {"training": 28.5, "checkpoint": 1.5, "validation": 3, "startup": 10, "finish": 2}


def test_a_graph_that_is_traced_later_belongs_to_the_start():
    found = seconds(
        started(0),
        event(1, "group", workers=2),
        phase(10, "training", 1, trace=4.0),  # the first call
        event(20, step=31, trace=7.0, stall=1.0),
        event(30, step=51, trace=7.0, stall=1.0),
        event(31, "fault", cause="worker_died", step=51, trace=7.0, silent=1.0),
        event(32, "group", workers=2),
        phase(40, "training", 51, trace=3.0),
        event(50, step=71, trace=5.0),
        ended(50),
    )
    assert found == pytest.approx({"startup": 10 + 3, "checkpoint": 1, "training": 6 + 10 + 8, "restart": 10 + 2})


def test_steps_that_are_done_again_are_no_progress():
    found = seconds(
        started(0),
        event(0, "group", workers=2),
        phase(10, "training", 0),
        # The last sign of life was 4 s before: steps up to 100 were done in 6 s.
        event(20, "fault", cause="worker_died", step=100, silent=4.0),
        event(21, "group", workers=2),
        phase(25, "training", 60),
        event(35, step=160),
        ended(35),
    )
    assert found == pytest.approx({"startup": 10, "training": 6 + 6, "redone": 4, "restart": 9})


def test_planned_changes_waiting_and_hangs():
    found = seconds(
        started(0),
        phase(10, "training", 0),
        phase(20, "resizing", 50),
        event(22, "group", workers=3),
        phase(26, "training", 50, 3),
        event(66, "hang", silent=31.0, step=90),
        event(67, "fault", cause="hang", silent=0.0),
        event(68, "waiting"),
        event(78, "group", workers=3),
        phase(80, "training", 90, 3),
        ended(81),
    )
    assert found == {
        "startup": 10,
        "training": 10 + 9 + 1,
        "resize": 6,
        "hang": 31 + 1,
        "waiting": 10,
        "restart": 1 + 2,
    }


def test_between_two_drivers_the_run_is_down_unless_it_had_finished():
    begin = (started(0), phase(5, "training", 0), event(10, step=10))
    assert seconds(*begin, started(100), phase(104, "training", 8), ended(105)) == pytest.approx(
        {"startup": 9, "training": 6, "down": 90}
    )
    assert seconds(*begin, ended(11, "failed"), started(20), ended(21))["down"] == 9
    assert "down" not in seconds(*begin, ended(11), started(20), ended(21))


def test_the_time_of_a_driver_whose_clock_is_behind_counts():
    first = (started(1000), phase(1010, "training"), event(1100, step=100))
    second = (started(900), phase(910, "training", 100), event(1000, step=200), ended(1000))
    assert seconds(*first, *second) == {"training": 180, "startup": 20}


def test_world_sizes_and_steps_of_spans():
    spans = timeline.timeline(
        [started(0), phase(5, "training", 10, 2), event(9, step=30), phase(10, "resizing", 40), ended(12)]
    )
    assert [(s.category, s.workers, s.first_step, s.last_step) for s in spans] == [
        ("startup", 0, 0, 0),
        ("training", 2, 10, 30),
        ("training", 2, 30, 40),
        ("resize", 0, 40, 40),
    ]


def test_goodput():
    assert timeline.goodput({}) == 0
    assert timeline.goodput({"training": 3.0, "restart": 1.0}) == 0.75
    assert timeline.goodput({"training": 3.0, "restart": 1.0, "down": 172_800.0}) == 0.75  # a weekend


def test_steps_per_second_are_those_of_training():
    assert timeline.steps_per_second([]) == 0
    events = [
        started(0),
        phase(20, "starting", 0),
        phase(29, "training", 1),  # after the first call
        phase(39, "validating", 101),
        phase(49, "training", 101),
        event(61, step=201, stall=2.0),
        event(70, "fault", cause="worker_died", step=201, silent=9.0),
        phase(80, "training", 151),
        event(85, step=201),  # made again
        event(95, step=301),
        ended(95),
    ]
    spans = timeline.timeline(events)
    assert timeline.account(spans)["training"] == pytest.approx(10 + 10 + 10)
    assert timeline.steps_per_second(spans) == pytest.approx(10)


EVENTS = st.one_of(
    st.builds(lambda o: {"kind": "driver", "state": "ended", "outcome": o}, st.sampled_from(["finished", "failed"])),
    st.just({"kind": "driver", "state": "started"}),
    st.builds(
        lambda p, s, w: {"kind": "phase", "phase": p, "step": s, "workers": w},
        st.sampled_from(["starting", "training", "validating", "resizing", "testing", "exporting"]),
        st.integers(0, 500),
        st.integers(1, 4),
    ),
    st.builds(
        lambda k, s, x: {"kind": k, "step": s, "silent": x, "stall": x, "trace": x},
        st.sampled_from(["progress", "fault", "hang", "group", "waiting", "attempt", "save", "new in a later version"]),
        st.integers(0, 500),
        st.floats(0, 50),
    ),
)


@given(st.lists(st.tuples(EVENTS, st.floats(-5, 60)), max_size=60))
def test_the_categories_sum_to_the_wall_clock(drawn):
    events, now = [started(1000.0)], 1000.0
    for fields, step in drawn:  # also clocks that go back
        now += step
        events.append({**fields, "time": now})
    spans = timeline.timeline(events)
    assert all(span.begin < span.end for span in spans)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))
    # Only after a run has finished, time may pass that is not the run's.
    gaps = 0.0
    # A driver's own clock counts from where the one before was.
    latest, finished, behind = 1000.0, False, 0.0
    for e in events[1:]:
        if e["kind"] == "driver" and e["state"] == "started":
            behind = latest - e["time"] if e["time"] < latest else 0.0
        time = max(latest, e["time"] + behind)
        if e["kind"] == "driver" and e["state"] == "started" and finished:
            gaps += time - latest
        if e["kind"] == "driver":
            finished = e["state"] == "ended" and e["outcome"] == "finished"
        latest = time
    assert sum(timeline.account(spans).values()) == pytest.approx(latest - 1000.0 - gaps, abs=1e-6)
    assert set(timeline.account(spans)) <= set(timeline.CATEGORIES)


def test_a_repair_in_place_takes_its_pause_from_training_and_ends_a_hang():
    held = {"tier": "held", "world_size": 1, "from_step": 20}
    begin = [started(0), event(5, "group"), phase(10, "training")]
    fault = event(30.0, "fault", cause="worker_died", survived=True, step=20)
    found = seconds(*begin, fault, event(30.5, "attempt", silent=0.5, step=20, **held), event(40, step=30), ended(40))
    assert found["training"] == pytest.approx(29.5)
    assert found["restart"] == pytest.approx(0.5)
    for lost, category in ((0, "resize"), (1, "restart")):
        change = event(30.5, "attempt", silent=0.5, step=20, lost=lost, **held)
        assert seconds(*begin, change, event(40, step=30), ended(40))[category] == pytest.approx(0.5)
    hang = event(30, "hang", step=10, silent=10.0)
    late = event(32, "attempt", silent=12.0, step=10, **held)
    found = seconds(*begin, hang, event(31, "fault", cause="hang", survived=True), late, event(40, step=30), ended(40))
    assert (found["training"], found["hang"]) == (pytest.approx(18), pytest.approx(12))
