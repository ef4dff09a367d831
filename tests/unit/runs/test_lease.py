"""A run belongs to one live process; a dead one's is taken over."""

import json
import signal
import subprocess
import sys
import time

import pytest

from raytf._process import process_start
from raytf.checkpoint import manifest
from raytf.errors import RunInUseError
from raytf.runs.lease import LEASE_FILE, Lease, check_owner
from raytf.runs.lease_decisions import RENEW_SECONDS, STALE_SECONDS
from raytf.storage.storage import Storage

#: Stores that lack conditional writes; the first and the third as OpenStack Swift 2.38 and 2.30 do.
LACKS = {
    "no swap": {"create": "racy", "swap": "refused"},
    "neither": {"create": "refused", "swap": "refused"},
    "neither, no chunks": {"create": "refused", "swap": "refused", "chunks": False, "batches": False},
    "overlooks": {"create": "overlooked", "swap": "overlooked"},
}

HOLD = """
import sys
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage

with Lease(Storage(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


class Time:
    """A clock that only `sleep` moves; `each` is called at every sleep."""

    def __init__(self, each=lambda: None):
        self.now, self.each = 0.0, each

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.each()


@pytest.fixture
def run(tmp_path):
    return Storage(str(tmp_path / "run"))


@pytest.fixture(params=["folder", "s3"])
def any_run(request, tmp_path):
    return Storage(str(tmp_path / "run") if request.param == "folder" else request.getfixturevalue("s3")("run"))


@pytest.fixture
def holder(run):
    """A process that holds the lease until it is killed or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, run.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name == "neither" else name for name in LACKS])
def lacking(request, proxy, behind):
    """A run on a store that lacks conditional writes."""
    proxy.lack(**LACKS[request.param])
    return behind


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def edit(run, **fields):
    run.put(LEASE_FILE, json.dumps({**json.loads(run.get(LEASE_FILE)), **fields}).encode())


def foreign(run):
    """Leave the lease of a process on another machine."""
    owner = Lease(run).owner
    run.put(LEASE_FILE, json.dumps({**owner, "host": "far", "boot": "another", "pid": 77, "beat": 1}).encode())


def quiet(run, time=None, said=None):
    time = time or Time()
    return Lease(run, (said if said is not None else []).append, time.clock, time.sleep)


def test_a_lease_is_there_while_it_is_held(any_run):
    with quiet(any_run) as lease:
        assert json.loads(any_run.get(LEASE_FILE))["id"] == lease.owner["id"]
        assert not lease.lost.is_set()
    assert not any_run.exists(LEASE_FILE)


def test_a_run_can_be_taken_again(any_run):
    for _ in range(2):
        with quiet(any_run):
            pass


def test_a_second_lease_is_refused_at_once(any_run):
    time = Time()
    with quiet(any_run) as first:
        with pytest.raises(RunInUseError, match=r"is in use by process .*choose another --run name") as refused:
            quiet(any_run, time).__enter__()
        assert json.loads(any_run.get(LEASE_FILE))["id"] == first.owner["id"]
    assert str(first.owner["pid"]) in str(refused.value)
    assert any_run.locate("") in str(refused.value)
    assert "\n" not in str(refused.value)
    assert time.now == 0


def test_an_error_inside_gives_the_lease_back(run):
    with pytest.raises(KeyError), quiet(run):
        raise KeyError
    assert not run.exists(LEASE_FILE)


def test_a_lease_of_another_process_is_refused(run, holder):
    with pytest.raises(RunInUseError, match=f"process {holder.pid} "):
        quiet(run).__enter__()


def test_a_killed_owner_is_taken_over_at_once(run, holder):
    holder.kill()
    holder.wait()
    time, said = Time(), []
    with quiet(run, time, said) as lease:
        assert json.loads(run.get(LEASE_FILE))["id"] == lease.owner["id"]
    assert time.now <= 1
    assert said == []


def test_a_zombie_is_dead(run, holder):
    holder.kill()
    while process_start(holder.pid) is not None:  # not waited for: it stays a zombie
        pass
    with quiet(run):
        pass


def test_a_process_number_used_again_is_not_the_owner(run, holder):
    edit(run, started="1")
    with quiet(run):
        pass


def test_another_machine_that_renews_is_refused(run):
    foreign(run)
    time, said = Time(each=lambda: edit(run, beat=time.now)), []
    with pytest.raises(RunInUseError, match="process 77 on far"):
        quiet(run, time, said).__enter__()
    assert time.now < STALE_SECONDS
    assert json.loads(run.get(LEASE_FILE))["host"] == "far"
    assert len(said) == 1
    assert "process 77 on far" in said[0]


def test_another_machine_that_is_silent_is_taken_over(run):
    foreign(run)
    time, said = Time(), []
    with quiet(run, time, said) as lease:
        assert json.loads(run.get(LEASE_FILE))["id"] == lease.owner["id"]
    assert STALE_SECONDS <= time.now <= STALE_SECONDS + 2
    assert len(said) == 1


def test_another_machine_that_leaves_is_taken_over_early(run):
    foreign(run)

    def leave() -> None:
        if json.loads(run.get_or_none(LEASE_FILE) or b"{}").get("host") == "far":
            run.delete(LEASE_FILE)

    time = Time(each=leave)
    with quiet(run, time):
        assert time.now < STALE_SECONDS


def test_the_last_writer_owns_the_run_where_a_store_has_no_conditions(gcs):
    run = Storage(gcs)
    time = Time(each=lambda: foreign(run))  # another one writes in the same instant
    with pytest.raises(RunInUseError):
        quiet(run, time).__enter__()
    assert json.loads(run.get(LEASE_FILE))["host"] == "far"


RACE = """
import sys
from raytf.checkpoint import manifest
from raytf.errors import RunInUseError
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage

place, mark, options = sys.argv[1].partition("?")
for line in sys.stdin:
    lease = Lease(Storage(f"{place}/{line.strip()}{mark}{options}"))
    try:
        lease.__enter__()
    except RunInUseError:
        lease = None
        print("refused", flush=True)
    else:
        print("won", flush=True)
    if sys.stdin.readline() != "release\\n":
        break
    if lease is not None:
        lease.__exit__()
    print("released", flush=True)
"""


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_of_two_that_race_exactly_one_wins(request, tmp_path, where):
    """For a run that nobody owns, and for one whose owner has died, again and again."""
    uri = str(tmp_path / "runs") if where == "folder" else request.getfixturevalue("s3")("runs")
    runs, pipe = Storage(uri), subprocess.PIPE
    racers = [subprocess.Popen([sys.executable, "-c", RACE, uri], stdin=pipe, stdout=pipe, text=True) for _ in range(2)]

    def tell(word):
        for racer in racers:
            racer.stdin.write(f"{word}\n")
            racer.stdin.flush()
        return [racer.stdout.readline().strip() for racer in racers]

    wins = []
    try:
        for number in range(20 if where == "folder" else 8):
            if number % 2:
                dead = {**Lease(runs).owner, "started": "1", "beat": 9}
                runs.put(f"{number}/{LEASE_FILE}", json.dumps(dead).encode())
            said = tell(number)
            assert sorted(said) == ["refused", "won"], f"round {number}: {said}"
            wins.append(said.index("won"))
            assert json.loads(runs.get(f"{number}/{LEASE_FILE}"))["pid"] == racers[wins[-1]].pid
            assert tell("release") == ["released", "released"]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_a_store_without_conditions_keeps_a_lease_and_gives_it_on(lacking):
    """The owner renews it, a second command is refused at once, and after kill -9 the same command has the run."""
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", HOLD, lacking.uri], stdin=pipe, stdout=pipe, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        wait_for(lambda: json.loads(lacking.get(LEASE_FILE))["beat"] >= 1)
        with pytest.raises(RunInUseError, match=f"process {owner.pid} "):
            quiet(lacking).__enter__()
        owner.kill()
        owner.wait()
        said = []
        with quiet(lacking, said=said) as lease:
            assert json.loads(lacking.get(LEASE_FILE))["id"] == lease.owner["id"]
            assert not lease.lost.is_set()
        assert said == []
        assert lacking.files() == []
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.parametrize(
    "lefts",
    [
        [{}, {"started": "1"}],  # nobody's, and a dead process's
        pytest.param([{"boot": "another", "host": "far"}], marks=pytest.mark.slow),  # of a machine that is gone
    ],
)
def test_of_two_that_race_one_wins_on_a_store_without_conditions(lacking, lefts):
    runs, pipe = Storage(lacking.uri), subprocess.PIPE
    command = [sys.executable, "-c", RACE, lacking.uri]
    racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]

    def tell(word):
        for racer in racers:
            racer.stdin.write(f"{word}\n")
            racer.stdin.flush()
        lines = [racer.stdout.readline() for racer in racers]
        return [
            racer.stdout.readline().strip() if "was last owned" in line else line.strip()
            for racer, line in zip(racers, lines, strict=True)
        ]

    try:
        for number, left in enumerate(lefts):
            if left:
                runs.put(f"{number}/{LEASE_FILE}", json.dumps({**Lease(runs).owner, **left}).encode())
            said = tell(number)
            assert sorted(said) == ["refused", "won"], f"round {number}: {said}"
            holder = json.loads(runs.get(f"{number}/{LEASE_FILE}"))
            assert holder["pid"] == racers[said.index("won")].pid
            assert tell("release") == ["released", "released"]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_a_renewal_that_fails_is_told_and_tried_again(s3, s3_endpoint, proxy):
    run, said = Storage(s3("run").replace(s3_endpoint, proxy.endpoint)), []
    with quiet(run, said=said) as lease:
        proxy.down()
        wait_for(lambda: said)
        assert "cannot be renewed" in said[0]
        assert "Trying again every 4 s" in said[0]
        assert "\n" not in said[0]
        proxy.up()
        wait_for(lambda: len(said) > 1)
        assert "is renewed again" in said[1]
        wait_for(lambda: json.loads(run.get(LEASE_FILE))["beat"] > 0)
        assert not lease.lost.is_set()
    assert len(said) == 2


def test_renewals_outlive_the_reader_of_the_output(run):
    """As in `raytf run ... | head`, when storage is out and back."""

    class Refusing(Storage):
        is_out = True

        def swap(self, *arguments):
            if self.is_out:
                raise OSError("no route")
            return super().swap(*arguments)

    def say(text):
        said.append(text)
        raise BrokenPipeError

    said, store = [], Refusing(run.uri)
    with Lease(store, say) as lease:
        wait_for(lambda: said)
        store.is_out = False
        wait_for(lambda: json.loads(run.get(LEASE_FILE))["beat"] > 0)
        assert not lease.lost.is_set()


OWNER = """
import functools, os, signal, sys, threading, time
import numpy as np
from raytf.checkpoint.commit import Commit, Event
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.durable import DurableSave
from raytf.checkpoint.naming import GroupAttempt
from raytf.runs.lease import Lease, check_owner
from raytf.storage.storage import Storage

ready, stopped = threading.Event(), threading.Event()

class Stopping(Storage):
    def swap(self, *arguments):
        if not stopped.is_set():
            stopped.set()
            ready.wait()
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)  # it has seen that the lease is its own
            time.sleep(0.5)  # the signal may take another thread first
        return super().swap(*arguments)

def wait(vote):
    while not (getattr(commit.votes(), vote) or tier.failure):
        time.sleep(0.01)

run = Stopping(sys.argv[1])
lease = Lease(run)
lease.owner["boot"] = "another machine"
with lease:
    fence = functools.partial(check_owner, run, lease.owner["id"])
    tier = DurableTier(run, GroupAttempt("20260101T000000.000-aaaaaa"), Keep(3), lambda text: None, fence)
    commit = Commit(tier, 1)
    commit.begin(DurableSave(1, {"w": np.zeros(3)}))
    wait("written")
    print("written", flush=True)
    ready.set()
    sys.stdin.readline()
    assert commit.advance(commit.votes()) is Event.COMMIT
    wait("committed")
    print(tier.failure, flush=True)
    print("lost" if lease.lost.wait(60) else "never noticed", flush=True)
"""


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_an_owner_that_wakes_after_it_was_replaced_writes_nothing(request, tmp_path, where):
    """It is stopped in the middle of a save and of a renewal, after it has seen that the lease is its own."""
    uri = str(tmp_path / "run") if where == "folder" else request.getfixturevalue("s3")("run")
    run, pipe = Storage(uri), subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER, uri], stdin=pipe, stdout=pipe, text=True)
    try:
        assert owner.stdout.readline() == "written\n"
        assert owner.stdout.readline() == "stops\n"
        while not is_stopped(owner.pid):
            pass
        with quiet(run, Time()) as lease:
            owner.send_signal(signal.SIGCONT)
            owner.stdin.write("go on\n")
            owner.stdin.flush()
            assert f"belongs to process {lease.owner['pid']} on" in owner.stdout.readline()
            assert owner.stdout.readline() == "lost\n"
            assert json.loads(run.get(LEASE_FILE))["id"] == lease.owner["id"]
        assert manifest.list_complete(run) == []
    finally:
        owner.kill()
        owner.communicate()


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def test_check_owner(any_run):
    with quiet(any_run) as lease:
        check_owner(any_run, lease.owner["id"])
        with pytest.raises(RunInUseError, match=f"belongs to process {lease.owner['pid']} on .*writes no more"):
            check_owner(any_run, "another")
    with pytest.raises(RunInUseError, match="belongs to no process now"):
        check_owner(any_run, lease.owner["id"])


def test_a_lease_that_was_deleted_is_lost(run):
    with quiet(run) as lease:
        run.delete(LEASE_FILE)
        assert lease.lost.wait(RENEW_SECONDS * 5)
    assert not run.exists(LEASE_FILE)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"{}", b"\xff"])
def test_a_damaged_lease_is_nobodys(run, text):
    run.put(LEASE_FILE, text)
    with quiet(run):
        pass


def test_a_lost_lease_is_noticed_and_left_alone(run):
    with quiet(run) as lease:
        foreign(run)
        assert lease.lost.wait(RENEW_SECONDS * 5)
    assert json.loads(run.get(LEASE_FILE))["host"] == "far"


def test_process_start_of_no_process():
    assert process_start(2**22 + 1) is None
