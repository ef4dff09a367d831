"""raytf.testing without a cluster: plans, jobs of plain commands, and a forwarder in front of a real S3 server."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import botocore.config
import botocore.exceptions
import psutil
import pyarrow.fs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.testing import Fault, FaultPlan, Job, Kind, StorageProxy, environment
from raytf.testing.processes import Session

#: A job that counts steps into its status file, from where the run before it was: this many in all. It has a worker, as
#: Ray calls it, and fails without it.
COUNTS = """
import json, os, subprocess, sys, time
status, saved, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "RayTrainWorker"])
step = int(open(saved).read()) if os.path.exists(saved) else 0
while step < steps:
    if worker.poll() is not None:
        sys.exit("the worker is lost")
    step += 1
    for path, text in ((saved, str(step)), (status, json.dumps(
            {"step": step, "total": steps, "workers": 1, "phase": "training", "time": time.time()}))):
        with open(path + ".part", "w") as out:
            out.write(text)
        os.replace(path + ".part", path)
    time.sleep(0.02)
print("done")
worker.kill()
"""


def test_import_loads_neither_ray_nor_tensorflow():
    code = "import raytf.testing, sys; print({'ray', 'tensorflow', 'keras', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@given(seed=st.integers(), steps=st.integers(50, 5000), events=st.integers(0, 12))
def test_random_plans_are_pure_and_spread(seed: int, steps: int, events: int):
    plan = FaultPlan.random(seed, steps, events)
    assert plan.faults == FaultPlan.random(seed, steps, events).faults
    at = [fault.step for fault in plan.faults]
    assert len(at) == events
    assert all(a < b for a, b in itertools.pairwise(at))
    last = steps * 4 // 5
    assert all(last * i // events < step <= last * (i + 1) // events for i, step in enumerate(at)), "not spread"


def test_random_plans_differ_with_the_seed_and_draw_from_the_kinds():
    assert FaultPlan.random(1, 1000, 5).faults != FaultPlan.random(2, 1000, 5).faults
    kinds = {f.kind for seed in range(50) for f in FaultPlan.random(seed, 100, 5, [Kind.PAUSE, Kind.STORAGE]).faults}
    assert kinds == {Kind.PAUSE, Kind.STORAGE}
    with pytest.raises(ValueError, match="at most 8"):
        FaultPlan.random(0, 10, 9)


def test_plans_and_faults_are_checked():
    with pytest.raises(ValueError, match="must not decrease"):
        FaultPlan([Fault(5, Kind.WORKER), Fault(4, Kind.ADD)])
    with pytest.raises(ValueError, match="not negative"):
        Fault(-1, Kind.WORKER)
    with pytest.raises(ValueError, match="earthquake"):
        Fault(1, "earthquake")
    assert Fault(1, "node").kind is Kind.NODE


def test_job_output_exit_code_and_step(tmp_path: Path):
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"step": 99}))
    code = f"""
import time
print("hello", flush=True)
time.sleep(1)
open({str(status)!r}, "w").write('{{"step": 7}}')
"""
    with Job([sys.executable, "-c", code], tmp_path / "log", status_file=status) as job:
        assert job.step is None, "an earlier command's file was read"
        job.until(lambda: "hello" in job.output)
        assert job.wait(60) == "hello\n"
        assert job.step == 7
    with (
        Job([sys.executable, "-c", "print('sorry'); raise SystemExit(3)"], tmp_path / "log") as job,
        pytest.raises(AssertionError, match="exit code 3:\nsorry"),
    ):
        job.wait(60)
    with Job(["sleep", "60"], tmp_path / "log") as job:
        with pytest.raises(AssertionError, match="not finished"):
            job.ended(0.1)
        with pytest.raises(AssertionError, match="in vain"):
            job.until(lambda: False, 0.1)
        job.kill()
        with pytest.raises(AssertionError, match="ended too soon"):
            job.until(lambda: False)


def test_a_killed_job_says_so_and_takes_all_that_it_started_with_it(tmp_path: Path):
    # The middle one ends, so the sleeper has lost its parent; it is stopped as well.
    script = "sh -c 'sleep 60 & kill -STOP $!; echo $! > pid'; sleep 60"
    job = Job(["sh", "-c", script], tmp_path / "log")
    job.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    job.until(lambda: orphan.ppid() != job.process.pid and len(job.processes("sleep 60")) == 2)
    job.kill()
    assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE
    assert job.ended() == -signal.SIGKILL
    assert job.processes() == []
    job.close()


def test_a_session_whose_number_is_another_one_s_by_now_is_left_alone(tmp_path: Path):
    with Job(["sleep", "60"], tmp_path / "log") as job:
        own = Session(job.process.pid)
        assert [p.pid for p in own.members()] == [job.process.pid]
        assert Session(job.process.pid, own.started - 1).members() == []


def test_environment_is_a_plain_user_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://somewhere")
    monkeypatch.setenv("TF_CONFIG", "{}")
    env = environment(EXTRA="1")
    assert not {"RAY_ADDRESS", "AWS_ENDPOINT_URL", "TF_CONFIG"} & set(env)
    assert (env["EXTRA"], env["PATH"]) == ("1", os.environ["PATH"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_test_has_started_is_ended(tmp_path: Path, number: signal.Signals):
    folder = tmp_path / "folder"
    folder.mkdir()
    code = f"""
import pathlib, time
from raytf.testing import Job, processes
processes.watch(pathlib.Path({str(folder)!r}))
job = Job(["sleep", "60"], pathlib.Path({str(tmp_path / "log")!r}))
print(job.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        sleeper = psutil.Process(int(test.stdout.readline()))
        test.send_signal(number)
    deadline = time.monotonic() + 60
    while (sleeper.is_running() and sleeper.status() != psutil.STATUS_ZOMBIE) or folder.exists():
        assert time.monotonic() < deadline, "something was left behind"
        time.sleep(0.05)


def counts(tmp_path: Path, steps: int = 150) -> tuple[list[str], Path, Path]:
    status = tmp_path / "status.json"
    return [sys.executable, "-c", COUNTS, str(status), str(tmp_path / "saved"), str(steps)], status, tmp_path / "log"


def test_a_plan_injects_in_order_and_starts_the_command_again(tmp_path: Path):
    plan = FaultPlan(
        [
            Fault(10, Kind.DRIVER),
            Fault(30, Kind.NODE),
            Fault(40, Kind.STORAGE),
            Fault(50, Kind.WORKER),
            Fault(80, Kind.PAUSE, seconds=0.5),
            Fault(90, Kind.DRIVER, at_once=True),
            Fault(1000, Kind.ADD, at_once=True),
        ]
    )
    report = plan.run(*counts(tmp_path, 300), limit_seconds=200)
    assert (report.code, report.starts, report.output) == (0, 4, "the worker is lost\ndone\n"), report
    done = [injection.done for injection in report.injections]
    assert [text.rstrip("0123456789") for text in done[:4]] == [
        "SIGKILL to the driver",
        "skipped: the last node stays",
        "skipped: there is no proxy in front of the storage",
        "SIGKILL to worker process ",
    ]
    assert done[4].endswith("for 0.5 s")
    assert done[5:] == ["SIGKILL to the driver", "not reached: the run had ended"]
    assert [i.is_done for i in report.injections] == [True, False, False, True, True, True, False]
    assert all(i.step is not None and i.fault.step <= i.step < 300 and i.workers == 1 for i in report.injections[:6])
    assert report.injections[6].step is None
    seconds = [i.seconds for i in report.injections]
    assert seconds == sorted(seconds)
    assert report.seconds >= seconds[-1]
    assert f"worker wanted at step 50, at step {report.injections[3].step} with 1 workers: SIGKILL" in str(report)


def test_a_fault_that_was_skipped_does_not_hold_up_the_next_one(tmp_path: Path):
    began = time.monotonic()
    report = FaultPlan([Fault(5, Kind.NODE), Fault(10, Kind.ADD), Fault(15, Kind.DRIVER)]).run(*counts(tmp_path))
    assert report.starts == 2, report
    assert time.monotonic() - began < 100


def test_a_command_that_fails_by_itself_is_not_started_again(tmp_path: Path):
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(2)"]
    report = FaultPlan([Fault(10, Kind.DRIVER)]).run(command, tmp_path / "status.json", tmp_path / "log")
    assert (report.code, report.starts, report.output) == (2, 1, "no such flag\n")


def test_a_run_without_end_is_reported_with_its_faults(tmp_path: Path):
    command, status, log = counts(tmp_path, steps=10**6)
    with pytest.raises(AssertionError, match=r"no end within 5 s(?s:.)*SIGKILL to the driver"):
        FaultPlan([Fault(10, Kind.DRIVER)]).run(command, status, log, limit_seconds=5)
    assert not [p for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE and str(status) in p.cmdline()]


class Store:
    """A bucket behind a forwarder."""

    def __init__(self, uri: str, endpoint: str, proxy: StorageProxy):
        self.bucket, self.proxy = uri.removeprefix("s3://").partition("?")[0], proxy
        own = botocore.config.Config(retries={"total_max_attempts": 1})
        self.direct = boto3.client("s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1", config=own)
        self.client = boto3.client("s3", endpoint_url=f"http://{proxy.endpoint}", region_name="us-east-1", config=own)
        self.arrow = pyarrow.fs.S3FileSystem(endpoint_override=proxy.endpoint, scheme="http", region="us-east-1")

    def put(self, key: str, data: bytes = b"x") -> int:
        """HTTP status of a write that is not tried again."""
        try:
            return self.client.put_object(Bucket=self.bucket, Key=key, Body=data)["ResponseMetadata"]["HTTPStatusCode"]
        except botocore.exceptions.ClientError as error:
            return error.response["ResponseMetadata"]["HTTPStatusCode"]


@pytest.fixture
def store(s3, s3_endpoint: str) -> Iterator[Store]:
    with StorageProxy(s3_endpoint) as proxy:
        yield Store(s3(), s3_endpoint, proxy)


@pytest.mark.parametrize("size", [0, 5, 12_000_000])
def test_proxy_passes_bytes_on_as_they_are(store: Store, size: int):
    data = os.urandom(size)
    with store.arrow.open_output_stream(f"{store.bucket}/arrow") as out:
        out.write(data)
    assert store.put("boto", data) == 200
    for key in ("arrow", "boto"):
        assert store.direct.get_object(Bucket=store.bucket, Key=key)["Body"].read() == data
        assert store.client.get_object(Bucket=store.bucket, Key=key)["Body"].read() == data
        with store.arrow.open_input_file(f"{store.bucket}/{key}") as file:
            assert file.read() == data
            assert file.read_at(2, size // 2) == data[size // 2 : size // 2 + 2]
    assert store.proxy.writes == 2, "an upload in parts is one write"
    names = [info.base_name for info in store.arrow.get_file_info(pyarrow.fs.FileSelector(store.bucket))]
    assert names == ["arrow", "boto"]
    store.arrow.delete_file(f"{store.bucket}/arrow")
    assert store.client.list_objects_v2(Bucket=store.bucket)["KeyCount"] == 1


def test_proxy_passes_on_a_body_of_unknown_length(store: Store):
    sent = iter([b"a" * 70_000, b"b" * 3])
    connection = http.client.HTTPConnection(store.proxy.endpoint, timeout=60)
    headers = {"Transfer-Encoding": "chunked", "Host": store.proxy.endpoint, "Authorization": "AWS test:none"}
    connection.request("PUT", f"/{store.bucket}/chunked", body=sent, headers=headers, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    got = store.direct.get_object(Bucket=store.bucket, Key="chunked")["Body"].read()
    assert got == b"a" * 70_000 + b"b" * 3


def test_proxy_fails_the_nth_write_and_its_retries_then_heals(s3, s3_endpoint: str):
    with StorageProxy(s3_endpoint, hold_seconds=3.0) as proxy:
        store = Store(s3(), s3_endpoint, proxy)
        proxy.fail_writes(1, after=2)
        assert [store.put(key) for key in ("a", "b", "c", "c", "d")] == [200, 200, 500, 500, 200]
        assert proxy.writes == 4
        assert store.client.list_objects_v2(Bucket=store.bucket)["KeyCount"] == 3, "reading is not disturbed"
        time.sleep(3.1)
        assert [store.put("c"), store.put("e")] == [200, 200]
        assert proxy.writes == 5


def test_proxy_fails_a_share_of_all_requests(store: Store):
    store.put("a")
    store.proxy.fail_share(0.5, seed=1)
    codes = [store.put("b") for _ in range(60)]
    assert set(codes) == {200, 500}
    assert (store.proxy.requests, store.proxy.failed) == (60, codes.count(500))
    assert 15 < codes.count(500) < 45
    store.proxy.fail_share(1.0, tries=2)
    with pytest.raises(botocore.exceptions.ClientError):
        store.client.head_object(Bucket=store.bucket, Key="a")
    store.proxy.fail_share(0)
    assert store.client.head_object(Bucket=store.bucket, Key="a")["ContentLength"] == 1


def test_proxy_fails_a_request_so_often_in_a_row(store: Store):
    store.proxy.fail_share(0.2, seed=3, tries=3)
    codes = [store.put("a") for _ in range(200)]
    runs = [len(list(group)) for code, group in itertools.groupby(codes) if code == 500]
    assert runs
    assert all(length % 3 == 0 for length in runs)


def test_proxy_fails_an_upload_in_parts_at_its_completion(store: Store):
    store.proxy.fail_writes(1)
    out = store.arrow.open_output_stream(f"{store.bucket}/big")
    out.write(os.urandom(12_000_000))
    with pytest.raises(OSError, match="injected fault"):
        out.close()
    assert store.direct.list_objects_v2(Bucket=store.bucket)["KeyCount"] == 0


def test_proxy_delays_and_is_down_and_up_again(store: Store):
    assert store.put("a") == 200
    store.proxy.delay(0.5)
    began = time.monotonic()
    assert store.put("a") == 200
    assert time.monotonic() - began >= 0.5
    store.proxy.delay(0)
    store.proxy.down()
    with pytest.raises(botocore.exceptions.HTTPClientError):
        store.put("b")
    assert store.direct.list_objects_v2(Bucket=store.bucket)["KeyCount"] == 1
    store.proxy.up()
    assert store.put("b") == 200


def test_proxy_serves_many_at_once_and_nothing_after_its_end(s3, s3_endpoint: str):
    with StorageProxy(s3_endpoint) as proxy:
        store = Store(s3(), s3_endpoint, proxy)
        threads = [threading.Thread(target=store.put, args=(f"{n}", b"x" * 100_000)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.client.list_objects_v2(Bucket=store.bucket)["KeyCount"] == 16
        assert proxy.writes == 16
    with pytest.raises(botocore.exceptions.HTTPClientError):
        store.put("late")
