"""A run belongs to one live process; a dead one's is taken over."""

import json
import subprocess
import sys

import pytest

from raytf.errors import RunInUseError
from raytf.lease import LEASE_FILE, RENEW_SECONDS, STALE_SECONDS, Lease, process_start
from raytf.storage import Storage

HOLD = """
import sys
from raytf.lease import Lease
from raytf.storage import Storage

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


def test_the_last_writer_of_an_object_store_owns_the_run(s3):
    run = Storage(s3("run"))
    time = Time(each=lambda: foreign(run))  # another one writes in the same instant
    with pytest.raises(RunInUseError):
        quiet(run, time).__enter__()
    assert json.loads(run.get(LEASE_FILE))["host"] == "far"


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
