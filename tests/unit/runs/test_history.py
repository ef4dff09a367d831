"""What is told of a run: its state, its restarts, `raytf show`."""

import datetime
import io
import itertools
import json
import os
import socket
import subprocess
import sys

import pytest
from rich.console import Console

from raytf.commands import show
from raytf.errors import ConfigError
from raytf.runs import events, history, lease_decisions, ledger
from raytf.runs.events import describe
from raytf.runs.lease import LEASE_FILE, Lease, is_held
from raytf.runs.timeline import RecoveryPointAges
from raytf.storage.storage import Storage
from tests.support.runs import BEGIN, Script, a_run, add_result


@pytest.fixture
def run(tmp_path):
    storage = a_run().write(str(tmp_path / "a"))
    add_result(storage)
    return history.load(storage.uri)


def test_figures_of_a_run(run):
    assert (run.name, run.state, run.step, run.total) == ("a", "finished", 1000, 1000)
    assert run.samples_per_second == 1234
    assert run.wall_clock == pytest.approx(100)
    assert sum(run.seconds.values()) == pytest.approx(100)
    # 210 - 195 steps of the first fault, 300 - 95 of the driver's death.
    assert run.redone == 15 + 205
    assert run.goodput == pytest.approx(run.seconds["training"] / (100 - run.seconds["down"]))


def test_each_restart_has_its_cause_and_all_of_its_phases(run):
    assert [r.is_first for r in run.restarts] == [True, False, False, False]
    causes = [r.cause for r in run.restarts]
    assert causes[0] == "start"
    assert causes[1] == "a peer does not answer, rank 1, node bbbbbbbb"
    assert causes[2] == "the driver died"
    assert causes[3] == "from 2 to 1 worker: a node is about to go"
    assert [(r.from_step, r.tier, r.workers, r.redone) for r in run.restarts] == [
        (0, "new", 2, 0),
        (195, "memory", 2, 15),
        (95, "durable", 2, 205),
        (411, "memory", 1, 0),
    ]
    assert run.restarts[1].phases == {"notice": 1, "processes": 4, "first step": 3}
    # What the workers cannot know: nobody was there, then a driver came up.
    assert run.restarts[2].phases == {"down": 10, "driver": 1, "processes": 4, "first step": 1}
    assert run.restarts[2].seconds == 16


@pytest.mark.parametrize("is_late", [False, True])
def test_a_survived_fault_is_the_cause_of_the_smaller_group(is_late):
    """Workers that continue may report it before the controller reports the fault."""
    run = Script().at(0, "driver", state="started").attempt(1, 2, 0, "new").trains(5, 50)
    fault = {"failure": "worker 1 died", "survived": True, "retry": True, "ranks": [1]}
    if not is_late:
        run.at(6, "fault", **fault)
    run.attempt(6.1, 1, 50, "held")
    if is_late:
        run.at(6.2, "fault", **fault)
    run.attempt(9, 2, 60, "held")
    causes = [restart.cause for restart in history.build("/x/a", run.events, None, True).restarts]
    assert causes == ["start", describe(run.events[-2 if is_late else -3]), "workers join"]


def test_a_driver_that_died_is_a_fault_at_its_last_word(run):
    (death,) = [h for h in run.happenings if h.kind == "driver" and h.sort == "fault"]
    assert death.time == BEGIN + 50
    assert "10.0 s after its last event" in death.text


def faults(*events):
    line = Script().at(0, "driver", state="started")
    for i, (kind, fields) in enumerate(events, 1):
        line.at(i, kind, **fields)
    return [h.kind for h in history.build("/x/a", line.events, None, False).happenings if h.sort == "fault"]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([("driver", {"state": "ended", "outcome": "stopped", "text": "interrupted"})], []),
        ([("driver", {"state": "ended", "outcome": "failed", "text": "KeyboardInterrupt"})], []),  # of earlier versions
        ([("driver", {"state": "ended", "outcome": "failed", "text": "no disk"})], ["driver"]),
        # A mistake in the labels ends the run, and its driver.
        (
            [
                ("fault", {"text": "bad labels", "retry": False}),
                ("driver", {"state": "ended", "outcome": "failed", "text": "bad labels"}),
            ],
            ["fault"],
        ),
        # The run went on after the first.
        (
            [
                ("fault", {"text": "gone", "retry": True}),
                ("driver", {"state": "ended", "outcome": "failed", "text": "no disk"}),
            ],
            ["fault", "driver"],
        ),
        (
            [
                ("fault", {"text": "bad labels", "retry": False}),
                ("driver", {"state": "ended", "outcome": "failed", "text": "bad labels"}),
                ("driver", {"state": "started"}),
                ("driver", {"state": "ended", "outcome": "failed", "text": "no disk"}),
            ],
            ["fault", "driver"],
        ),
    ],
)
def test_a_fault_is_counted_once_and_an_interruption_is_none(events, found):
    assert faults(*events) == found


def test_the_speed_of_a_run_that_was_stopped_is_that_of_its_time_in_training():
    line = Script().at(0, "driver", state="started").at(1, "group", workers=2)
    line.at(20, "phase", phase="training", step=1, workers=2, samples_per_step=99.5)
    line.at(30, "progress", phase="training", step=101, workers=2, samples_per_step=99.5, samples_per_second=7.0)
    line.at(40, "driver", state="ended", outcome="stopped", text="interrupted")
    found = history.build("/x/a", line.events, None, False)
    assert found.samples_per_second == pytest.approx(100 / 20 * 99.5)


NODE = "abcdef" * 9 + "ab"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"kind": "notice", "node": "c" * 9, "deadline_seconds": 9},
            "node cccccccc has notice: it will be preempted, in 9 s",
        ),
        ({"kind": "hang", "rank": 1, "text": "frozen", "where": "step"}, "rank 1 hangs: frozen, where step"),
        ({"kind": "straggler", "rank": 2, "ratio": 3.04}, "rank 2 takes 3.0 times as long as its peers"),
        ({"kind": "save_failed", "of_step": 5, "why": "disk is full"}, "step 5 was not saved: disk is full"),
        ({"kind": "fault", "cause": "controller_died"}, "controller died"),
        ({"kind": "fault", "text": "gone", "retry": False}, "gone; the run ends"),
        ({"kind": "fault", "text": "gone", "preemption": True}, "gone (preemption)"),
        ({"kind": "waiting", "possible": 1, "wanted": 2}, "waits for nodes: 1 of at least 2 workers can run"),
        ({"kind": "driver", "state": "ended", "text": "no disk"}, "driver ended: no disk"),
        ({"kind": "unheard of", "time": 1, "size": 3}, "unheard of: size 3"),
        ({"kind": "unheard of", "of": NODE}, "unheard of: of abcdefab"),
        ({"kind": "drain", "node": NODE, "deadline_seconds": 9.0}, "node abcdefab is about to leave, in 9 s"),
        ({"kind": "group", "workers": 2, "nodes": [NODE]}, "a group of 2 workers starts, node abcdefab"),
        ({"kind": "straggler", "ratio": NODE}, "straggler: ratio abcdefab"),
        (
            {"kind": "hang", "rank": None, "node": NODE, "pid": 7, "where": "start", "text": "was stopped"},
            "a worker on node abcdefab (pid 7) hangs: was stopped, where start",
        ),
        ({"kind": "hang", "text": "was stopped"}, "a worker hangs: was stopped"),
    ],
)  # fmt: skip
def test_events_in_words(event, text):
    assert events.describe(event) == text


STARTED = {"time": BEGIN, "kind": "driver", "state": "started"}


@pytest.mark.parametrize(
    ("last", "is_alive", "state"),
    [
        (STARTED, True, "running"),
        (STARTED, False, "killed"),
        ({"outcome": "failed", "text": "no disk"}, False, "failed"),
        ({"outcome": "failed", "text": "KeyboardInterrupt"}, False, "stopped"),
        ({"outcome": "finished"}, False, "finished"),
    ],
)
def test_state(last, is_alive, state):
    events = [STARTED, {"time": BEGIN + 9, "kind": "driver", "state": "ended", **last}]
    assert history.build("/x/a", events, None, is_alive).state == state


def test_a_run_that_finished_and_goes_on_is_not_charged_for_the_time_between(tmp_path):
    line = Script().at(0, "driver", state="started").at(10, "driver", state="ended", outcome="finished")
    line.at(5000, "driver", state="started").at(5003, "driver", state="ended", outcome="finished")
    found = history.build("/x/a", line.events, None, False)
    assert found.wall_clock == pytest.approx(13)
    assert sum(found.seconds.values()) == pytest.approx(13)


def test_no_run_is_one_clear_error_that_names_the_runs_below(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no run in .*STORAGE/NAME, such as ~/raytf-runs/mnist\.$"):
        history.load(str(tmp_path / "nothing"))
    a_run().write(str(tmp_path / "first"))
    with pytest.raises(ConfigError, match=f"Did you mean {tmp_path}/first\\?$"):
        history.load(str(tmp_path))


class Time:
    """A clock that only `sleep` moves; `each` is called at every second."""

    def __init__(self, each=lambda: None):
        self.now, self.each = 0.0, each

    def clock(self):
        return self.now

    def sleep(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1
            self.each()


def test_who_owns_a_run(tmp_path):
    run, time = Storage(str(tmp_path)), Time()
    assert not is_held(run, time.clock, time.sleep)
    with Lease(run):
        assert is_held(run, time.clock, time.sleep)
        held = json.loads(run.get(LEASE_FILE))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    run.put(LEASE_FILE, json.dumps({**held, "pid": dead.pid}).encode())
    assert not is_held(run, time.clock, time.sleep)
    assert time.now == 0


def test_the_owner_on_another_machine_lives_as_long_as_it_renews_its_lease(tmp_path):
    run, beat = Storage(str(tmp_path)), itertools.count()

    def renew() -> None:
        run.put(LEASE_FILE, json.dumps({"id": "x", "boot": "another", "pid": 7, "beat": next(beat)}).encode())

    time = Time(lambda: renew() if time.now < 10 and time.now % lease_decisions.RENEW_SECONDS == 0 else None)
    renew()
    assert is_held(run, time.clock, time.sleep)
    assert time.now == lease_decisions.RENEW_SECONDS
    # Who has seen a renewal a short time ago need not wait for the next one, nor is another one needed at once.
    time.sleep(4)
    assert is_held(run, time.clock, time.sleep)
    time.sleep(lease_decisions.STALE_SECONDS - 1)
    assert is_held(run, time.clock, time.sleep)
    assert time.now == 27
    time.sleep(1)
    assert not is_held(run, time.clock, time.sleep)
    assert time.now == 28
    run.delete(LEASE_FILE)
    assert not is_held(run, time.clock, time.sleep)


@pytest.mark.parametrize("skew", [0, -3, 3600, -3600])
def test_the_time_of_a_dead_drivers_last_event_makes_it_not_alive(tmp_path, skew):
    now, watch = datetime.datetime.now().timestamp(), Time()
    run = Storage(str(tmp_path))
    book = ledger.Ledger(run, "000001-a")
    book.add([{"time": now + skew, "kind": "driver", "state": "started"}])
    assert book.flush()
    run.put(LEASE_FILE, json.dumps({"id": "x", "boot": "another", "pid": 7, "beat": 1}).encode())
    assert history.load(run.uri, watch.clock, watch.sleep).state == "killed"
    assert watch.now == 2 * lease_decisions.RENEW_SECONDS


@pytest.mark.parametrize("behind", [3, 3600])
def test_a_later_driver_whose_clock_is_behind_makes_no_time_negative(behind):
    line = Script().at(0, "driver", state="started").attempt(3, 2, 0, "new").at(20, "progress", step=5)
    line.at(20 - behind, "driver", state="started").at(23 - behind, "group", workers=2)
    line.attempt(25 - behind, 2, 5, "durable").at(40 - behind, "driver", state="ended", outcome="finished")
    found = history.build("/x/a", line.events, None, False)
    assert found.wall_clock == pytest.approx(40) == pytest.approx(sum(found.seconds.values()))
    assert found.restarts[-1].phases["down"] == 0
    assert next(h.text for h in found.happenings if "died" in h.text).endswith("started 0.0 s after its last event")


def test_age_of_a_copy_is_the_time_since_the_run_was_at_its_step():
    line = RecoveryPointAges()
    assert line.seconds(5) == {}

    def progress(time, step, **fields):
        line.see({"time": time, "kind": "progress", "phase": "training", "step": step, **fields})

    def attempt(time, step, tier):
        line.see({"time": time, "kind": "attempt", "from_step": step, "tier": tier})

    attempt(10, 0, "new")
    progress(20, 100, checkpoint=None, snapshot=None)
    assert line.seconds(20) == {"durable": 10, "memory": 10}
    progress(30, 200, checkpoint=50, snapshot=150)
    assert line.seconds(32) == {"durable": 17, "memory": 7}
    # Step 150 is made once more; what the failure has cost is not what the next one would.
    attempt(40, 150, "memory")
    progress(50, 250, checkpoint=50, snapshot=None)
    assert line.seconds(50) == {"durable": 35, "memory": 10}
    attempt(60, 50, "durable")
    assert line.seconds(61) == {"durable": 1}


# -- the command -------------------------------------------------------------------------------------------------------


def raytf(*args, **env):
    code = (
        "import sys; from raytf.commands.main import main; main(); assert not {'ray', 'tensorflow'} & set(sys.modules)"
    )
    env = {**os.environ, "COLUMNS": "80", **env}
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, env=env)


def test_show_as_json(tmp_path):
    add_result(a_run().write(str(tmp_path / "a")))
    done = raytf("show", str(tmp_path / "a"), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["state"] == "finished"
    assert document["booked_seconds"] == pytest.approx(document["wall_clock_seconds"]) == pytest.approx(100)
    assert sum(document["seconds"].values()) == pytest.approx(100)
    assert [r["time"] for r in document["restarts"]] == pytest.approx([40, 66, 84])
    assert document["restarts"][1]["phases"]["down"] == 10
    kinds = [e["kind"] for e in document["events"]]
    assert (kinds.count("attempt"), kinds.count("fault"), kinds.count("resize"), kinds.count("save")) == (4, 1, 1, 1)
    assert document["events"][-1]["time"] == pytest.approx(100)


def test_show_as_text_where_there_is_no_terminal(tmp_path):
    add_result(a_run("[red]a peer[/red]").write(str(tmp_path / "a")))
    done = raytf("show", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "\x1b" not in text
    assert "finished: 1000 steps, 220 redone, 1,234 samples/s, 3 restarts" in text
    assert "100.0%   of 100.0 s of wall clock" in text
    assert "[red]a peer[/red], rank 1" in text  # words of others are no markup
    assert "+1:06" in text
    assert "down 10.0, driver 1.0, processes 4.0, first step 1.0" in text


def test_many_saves_are_one_line():
    line = Script().at(0, "driver", state="started").attempt(1, 2, 0, "new")
    for i in range(50):
        line.at(10 + i, "save", of_step=i + 1, step=i + 1)
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    show.show(history.build("/x/a", line.events, None, False), console)
    assert "50 checkpoints, the last one of step 50 at +0:59" in console.export_text()


def test_show_of_nothing_is_one_line(tmp_path):
    done = raytf("show", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no run in ")
    assert len(done.stderr.splitlines()) == 1


def test_a_run_that_lives_is_shown_as_running(tmp_path):
    run = Script().at(0, "driver", state="started", pid=os.getpid(), host=socket.gethostname()).write(str(tmp_path))
    with Lease(run):
        assert history.load(run.uri).state == "running"
    assert history.load(run.uri).state == "killed"


def test_a_run_is_followed_until_it_ends(tmp_path):
    line = Script().at(0, "driver", state="started", pid=os.getpid(), host=socket.gethostname())
    run = line.attempt(3, 2, 0, "new").write(str(tmp_path))
    out, naps = io.StringIO(), []

    with Lease(run) as lease:

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 1:
                line.at(9, "save", of_step=5, step=5).write(str(tmp_path))
            else:
                lease.release()

        show.follow(run.uri, Console(file=out, width=100), sleep)
    told = [text.partition(" ")[2] for text in out.getvalue().splitlines()]
    assert [text.partition(":")[0] for text in told] == ["driver", "attempt", "save"]
    assert naps == [2.0, 2.0]
    done = raytf("show", str(tmp_path), "--follow", "--json")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["error: --follow shows tables, and --json prints one document. Pass one of them."],
    )
