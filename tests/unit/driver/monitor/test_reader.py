"""The clock of a driver's events goes on when somebody sets the machine's clock."""

import pickle
import time

import pytest

from raytf.driver.monitor.actor import Monitor
from raytf.driver.monitor.reader import RunLedger, add_times
from raytf.runs import history, ledger
from raytf.runs.events import Driver
from raytf.runs.status import Status
from raytf.storage.storage import Storage


@pytest.fixture
def jump(monkeypatch):
    """Set the machine's clock forward or back by seconds."""
    real = time.time

    def by(seconds):
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return by


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_events_heartbeats_and_times_are_right_if_the_clock_is_set_meanwhile(tmp_path, jump, seconds):
    run = Storage(str(tmp_path))
    book = RunLedger(run, 1)
    monitor = Monitor(epoch=pickle.loads(pickle.dumps(book.clock)))
    book.note(Driver("started"))
    jump(seconds)
    monitor.update(Status(10, 1000, 1, 1, 2))
    book.add(monitor.read()[2])
    assert book.flush()
    book.show(Status(20, 1000, 1, 1, 2))
    book.sign_latest()
    events = ledger.read(run)
    assert [event.get("step") for event in events] == [None, 10, 20]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    assert times[-1] - times[0] < 60
    book.figures.update()
    assert all(age < 60 for (name, _), age in book.figures.gauges().items() if name == "raytf_checkpoint_age_seconds")
    document = {"steps": 0, "samples": 0}
    book.note(Driver("ended", outcome="finished"))
    add_times(document, run, book)
    assert document["wall_seconds"] == pytest.approx(sum(document["seconds"].values()))
    assert 0 <= document["wall_seconds"] < 60
    assert history.build("/a", ledger.read(run), None, False).wall_clock == pytest.approx(document["wall_seconds"])
