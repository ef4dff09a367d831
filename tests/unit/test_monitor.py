"""The driver's ear: what it makes of what workers and controller say."""

from raytf.hangs import Beat, Finding
from raytf.monitor import PROGRESS_SECONDS, Monitor
from raytf.progress import Status


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
    return heard.read()[2]


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


def test_what_is_on_storage_is_known_once_a_group_has_looked():
    heard, _ = monitor()
    assert heard.begin("a") == ([], None)
    heard.update(status(7, checkpoint=None))
    assert heard.begin("b") == (["a"], 0)
    heard.update(status(70, checkpoint=60))
    assert heard.begin("c") == (["a", "b"], 60)


def test_a_fault_is_at_the_step_that_a_survivor_had_reached():
    heard, _ = monitor()
    group = heard.begin_group()
    heard.update(status(40))
    heard.beat(Beat(group, 0, 2, "a", "10.0.0.1", 11, step=43))  # the last word of one that lost its peer
    heard.beat(Beat(group, 1, 2, "b", "10.0.0.2", 12, step=38))
    heard.event("fault", {"cause": "worker_died"})
    assert (events(heard)[-1]["step"], heard.reached()) == (43, 43)
    heard.event("group", {"workers": 2})
    heard.event("fault", {"cause": "start"})
    assert "step" not in events(heard)[-1]


def test_who_is_blamed_is_known_as_long_as_the_group_lives():
    heard, _ = monitor()
    heard.begin_group()
    finding = Finding((Beat(1, 1, 2, "n", "10.0.0.1", 11),), 6.0, "frozen", "its node does not answer")
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
    heard.release()
    assert heard.is_released(second)
    assert heard.wanted() == 0
    assert not heard.is_released(heard.park())


def test_a_new_group_is_not_asked_what_the_last_one_was_whose_ranks_wait_until_they_are_ended():
    heard, _ = monitor()
    ticket = heard.park()
    heard.answer(ticket, True)
    heard.begin_group()
    assert (heard.wanted(), heard.parked(ticket), heard.is_released(ticket)) == (0, None, False)
