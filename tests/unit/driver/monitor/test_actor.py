"""The monitor: what it makes of what workers and controller report, and what is left of it when it is killed."""

from contextlib import ExitStack

import pytest

from raytf.driver.monitor import actor
from raytf.driver.monitor.actor import CrashSafeMemory, Monitor
from raytf.driver.monitor.progress import PROGRESS_SECONDS
from raytf.runs.status import PARKED, Status
from raytf.training.process.heartbeat_types import Activity, HangFinding, HeartbeatState


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def status(step, phase="training", workers=2, **fields):
    return Status(step, 1000, 1, 1, workers, phase=phase, **fields)


def monitor():
    clock = Clock()
    return Monitor([], clock, lambda: clock.now + 1e9), clock


def events(heard):
    """Those since the last look."""
    found = heard.read()[2]
    heard.read(0, len(found) + heard._outbox.noted)
    return found


def test_a_change_of_phase_is_noted_at_once_and_progress_now_and_then():
    heard, clock = monitor()
    heard.update(status(0, "starting"))
    heard.update(status(5))
    heard.update(status(6))
    clock.now += PROGRESS_SECONDS
    heard.update(status(9, metrics={"loss": 0.5}, stall_seconds=0.25))
    heard.update(status(9, workers=3))
    found = events(heard)
    assert [(e["kind"], e["step"]) for e in found] == [("phase", 0), ("phase", 5), ("progress", 9), ("phase", 9)]
    assert (found[2]["loss"], found[2]["stall"], found[2]["time"]) == (0.5, 0.25, 1e9 + 105)
    assert events(heard) == []


def test_an_attempt_is_over_once_another_one_has_begun():
    heard, _ = monitor()
    heard.begin("a")
    assert not heard.is_over("a")
    heard.begin("b")
    assert heard.is_over("a")
    assert not heard.is_over("b")
    assert not heard.is_over("c")  # of which the monitor knows nothing


def test_a_restart_is_measured_from_the_last_sign_of_life():
    heard, clock = monitor()
    heard.event("group", {"workers": 2})
    heard.begin("a")
    heard.event("attempt", {"phases": {"first step": 1.0}})
    heard.update(status(40))
    clock.now += 3
    heard.event("fault", {"cause": "worker_died"})
    clock.now += 1
    heard.event("fault", {"cause": "start"})  # the next group did not come up
    clock.now += 1
    heard.event("group", {"workers": 2})
    clock.now += 5
    heard.begin("b")
    clock.now += 2
    heard.event("attempt", {"phases": {"tensorflow": 2.0, "rendezvous": 0.5, "build": 1.0, "first step": 0.5}})
    _, messages, found = heard.read()
    fault, last = next(e for e in found if e["kind"] == "fault"), found[-1]
    assert (fault["step"], fault["silent"]) == (40, 3.0)
    assert last["phases"] == {
        "notice": 3.0,
        "placement": 2.0,
        "processes": 2.5,
        "tensorflow": 2.0,
        "rendezvous": 0.5,
        "build": 1.0,
        "first step": 0.5,
    }
    assert messages == [
        "restarted in 11.5 s: notice 3.0, placement 2.0, processes 2.5, tensorflow 2.0, rendezvous 0.5, build 1.0, "
        "first step 0.5"
    ]


def test_workers_that_go_on_where_they_are_have_not_restarted():
    heard, clock = monitor()
    heard.event("group", {"workers": 2})
    heard.begin("a")
    heard.event("attempt", {"phases": {"first step": 1.0}, "tier": "new"})
    heard.update(status(40))
    clock.now += 3
    heard.event("fault", {"cause": "worker_died", "survived": True})
    own = {"rendezvous": 0.03, "restore": 0.01, "first step": 0.04}
    heard.event("attempt", {"phases": own, "tier": "held", "world_size": 1, "from_step": 47})
    _, messages, found = heard.read()
    assert (found[-1]["phases"], found[-1]["silent"]) == (own, pytest.approx(0.08))
    assert messages == ["1 worker continues after 0.1 s at step 47, no step lost"]
    # What hung stood still before it was found.
    clock.now += 30
    heard.event("hang", {"rank": 1})
    heard.event("fault", {"cause": "hang", "survived": True})
    heard.event("attempt", {"phases": own, "tier": "held", "world_size": 1, "from_step": 50})
    assert heard.read()[2][-1]["phases"] == {"notice": 33.0} | own


def test_what_is_on_storage_is_known_once_a_group_has_looked():
    heard, _ = monitor()
    assert heard.begin("a") == ([], None)
    heard.update(status(7, checkpoint=None))
    assert heard.begin("b") == (["a"], 0)
    heard.update(status(70, checkpoint=60))
    assert heard.begin("c") == (["a", "b"], 60)


def test_a_checkpoint_may_be_on_storage_before_the_driver_hears_of_it():
    heard, _ = monitor()
    heard.update(status(7, checkpoint=4))
    assert not heard.is_saving()
    heard.commits(8)
    assert heard.is_saving()
    heard.update(status(9, checkpoint=4))
    assert heard.is_saving()
    heard.update(status(10, checkpoint=8))
    assert not heard.is_saving()
    heard.commits(6)  # arrives late
    assert not heard.is_saving()


def test_a_fault_is_at_the_step_that_a_survivor_had_reached():
    heard, _ = monitor()
    group = heard.begin_group()
    heard.update(status(40))
    heard.beat(HeartbeatState(group, 0, 2, "a", "10.0.0.1", 11, step=43))  # the last word of one that lost its peer
    heard.beat(HeartbeatState(group, 1, 2, "b", "10.0.0.2", 12, step=38))
    heard.event("fault", {"cause": "worker_died"})
    assert (events(heard)[-1]["step"], heard.reached()) == (43, 43)
    heard.event("group", {"workers": 2})
    heard.event("fault", {"cause": "start"})
    assert "step" not in events(heard)[-1]


def test_who_is_blamed_is_known_as_long_as_the_group_lives():
    heard, _ = monitor()
    heard.begin_group()
    finding = HangFinding((HeartbeatState(1, 1, 2, "n", "10.0.0.1", 11),), 6.0, "frozen", "its node does not answer")
    heard.blame(finding)
    assert heard.blamed() == finding
    heard.begin_group()
    assert heard.blamed() is None


def test_ranks_that_wait_train_on_when_they_are_released_or_asked_anew():
    heard, _ = monitor()
    first = heard.park()
    heard.answer(first, True)
    assert (heard.parked(first), heard.is_released(first)) == (True, False)
    second = heard.park()  # the driver is told to stop while a resize is under way
    assert (heard.parked(first), heard.is_released(first), heard.is_released(second)) == (None, True, False)
    heard.release(first)  # says whoever asked first, who does not know of the second
    assert not heard.is_released(second)
    heard.release(second)
    assert heard.is_released(second)
    assert heard.wanted() == 0
    assert not heard.is_released(heard.park())


def test_ranks_that_wait_save_before_the_run_stops_and_are_resized_otherwise():
    heard, _ = monitor()
    for is_stop, phase in ((False, "resizing"), (True, "saving")):
        heard.park(is_stop)
        heard.update(status(5, PARKED))
        assert heard.read()[0].phase == phase


def test_a_new_group_is_not_asked_to_park_and_ranks_of_the_last_one_wait():
    heard, _ = monitor()
    ticket = heard.park()
    heard.answer(ticket, True)
    heard.begin_group()
    assert (heard.wanted(), heard.parked(ticket), heard.is_released(ticket)) == (0, None, False)


class Calls:
    """Names of calls, as Ray gives them."""

    name = 0

    def __call__(self):
        return str(self.name)


def lasting():
    """A function that makes a Monitor in the place of the last one, its clock, and the names of its calls."""
    stack, clock, calls = ExitStack(), Clock(), Calls()
    known = stack.enter_context(actor.held())

    def make():
        return Monitor(["a"], clock, lambda: clock.now + 1e9, CrashSafeMemory(known._paths), calls)

    def tell(heard, method, *args):
        calls.name += 1
        return getattr(heard, method)(*args)

    return stack, make, tell, clock, calls


def test_another_monitor_knows_all_that_a_killed_one_was_told():
    stack, make, tell, clock, _ = lasting()
    with stack:
        heard = make()
        group = tell(heard, "begin_group")
        assert tell(heard, "begin", "b") == (["a"], None)
        tell(heard, "update", status(40, checkpoint=30))
        tell(heard, "say", "one")
        tell(heard, "event", "group", {"workers": 2})
        ticket = tell(heard, "park")
        tell(heard, "answer", ticket, True)
        tell(heard, "set_noticed", {1: "n"})
        clock.now += 2
        heard.beat(HeartbeatState(group, 0, 2, "a", "10.0.0.1", 11, step=43))
        status_before, messages, found = heard.read()
        heard.read(0, 1)  # the answer of which the driver has not got: what it has counts, not what was sent
        clock.now += 100

        again = make()
        assert (again.group(), again.reached(), again.noticed()) == (group, 40, {1: "n"})
        assert (again.wanted(), again.parked(ticket), again.is_released(ticket)) == (ticket, True, False)
        assert again.read(0, 1) == (status_before, messages, found[1:])
        assert [(s.beat.step, s.age) for s in again.sightings()] == [(43, 0.0)]  # nobody could be heard meanwhile
        assert tell(again, "begin", "c") == (["a", "b"], 30)
        assert tell(again, "begin_group") == group + 1
        assert again.noticed() == {}


def test_a_call_that_comes_again_counts_once_whichever_monitor_it_meets():
    stack, make, tell, _, calls = lasting()
    with stack:
        heard = make()
        tell(heard, "event", "straggler", {"rank": 1})
        heard.event("straggler", {"rank": 1})
        ticket = tell(heard, "park")
        again = make()
        assert again.park() == ticket
        calls.name -= 1
        again.event("straggler", {"rank": 1})
        assert [e["kind"] for e in again.read()[2]] == ["straggler"]
        calls.name += 1
        assert tell(again, "park") == ticket + 1


def test_a_call_repeated_after_hundreds_of_others_counts_once():
    stack, make, tell, _, calls = lasting()
    with stack:
        tell(make(), "say", "unanswered")
        again = make()
        for i in range(300):
            tell(again, "say", str(i))
        calls.name = 1
        again.say("unanswered")
        assert again.read()[1] == ["unanswered", *map(str, range(300))]


def test_the_last_word_of_a_rank_is_not_taken_back_by_one_that_is_late():
    heard, _ = monitor()
    group = heard.begin_group()
    heard.beat(HeartbeatState(group, 0, 1, "a", "10.0.0.1", 11, step=9, activity=Activity.DONE))
    heard.beat(HeartbeatState(group, 0, 1, "a", "10.0.0.1", 11, step=8, activity=Activity.LOOP))
    assert [s.beat.activity for s in heard.sightings()] == [Activity.DONE]


def test_an_unreadable_memo_prevents_a_restart_but_not_the_first_start():
    gone = CrashSafeMemory(["/proc/self/fd/99999", "/proc/self/fd/99998"])
    heard = Monitor([], memo=gone)
    assert heard.begin("a") == ([], None)
    with pytest.raises(OSError, match="No such file"):
        Monitor([], memo=gone, is_another=lambda: True)


def test_what_later_groups_have_to_know_is_kept():
    heard, _ = monitor()
    assert heard.past() == ([], {})
    heard.stand("n", 7, 0, 64)
    heard.stand("n", 8, 20, 32)
    heard.stand("m", 9, 0, 0)
    assert heard.past()[1] == {"n": (0, 32), "m": (0, 0)}
    heard.begin_group()
    assert heard.past()[1] == {"n": (0, 32), "m": (0, 0)}
    heard.stand("n", 11, 0, 32)  # as it begins
    heard.stand("n", 11, 0, 128)
    assert heard.past()[1]["n"] == (0, 128)
    heard.go_back(40, ["a", "b"])
    heard.go_back(40, ["a", "b"])
    assert heard.past()[0] == [(40, ["a", "b"])]


def test_after_going_back_less_is_reached_and_storage_is_asked_again():
    heard, _ = monitor()
    heard.update(status(100, checkpoint=90))
    assert heard.begin("a")[1] == 90
    heard.go_back(40, ["a"])
    assert heard.reached() == 40
    assert heard.begin("b")[1] is None


def test_when_a_node_goes_is_counted_from_the_report_of_its_workers():
    heard, clock = monitor()
    assert heard.seconds_left("n1") is None
    heard.event("notice", {"node": "n1", "cloud": "aws", "deadline_seconds": 120.0})
    heard.event("notice", {"node": "n2", "cloud": "aws", "deadline_seconds": None})
    clock.now += 30
    heard.begin_group()
    assert (heard.seconds_left("n1"), heard.seconds_left("n2")) == (90, None)
    clock.now += 300
    assert heard.seconds_left("n1") == 0
