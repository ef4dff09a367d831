"""SIGTERM to a driver, with a real monitor and ranks that save, do not, or are not there. test_submit.py has a run."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from raytf.driver.graceful_stop import saving_first
from raytf.testing import Job, environment
from raytf.training.process.monitor_client import MonitorClient
from tests.ray.conftest import PATIENCE

DRIVER = """
    import sys, threading, time, ray
    from raytf.training.process.heartbeat_types import Activity, HeartbeatState
    from raytf.driver.monitor.actor import Monitor
    from raytf.training.process.monitor_client import MonitorClient
    from raytf.driver.graceful_stop import saving_first

    ray.init(logging_level="error", log_to_driver=False)
    monitor = ray.remote(num_cpus=0)(Monitor).remote()
    say = lambda text: print(text, flush=True)
    ranks = sys.argv[1]
    if ranks != "none":
        group = ray.get(monitor.begin_group.remote())
        fields = dict(group=group, rank=0, world_size=1, node="n", address="a", pid=1, step=5, activity=Activity.LOOP)
        ray.get(monitor.beat.remote(HeartbeatState(**fields, seconds=0.0, step_seconds=0.1, call_steps=1)))

    def save():
        while not (ticket := ray.get(monitor.wanted.remote())):
            time.sleep(0.05)
        say("asked to save")
        if ranks == "save":
            monitor.answer.remote(ticket, True)

    threading.Thread(target=save, daemon=True).start()
    try:
        with saving_first(MonitorClient(monitor), say, lambda why: say(f"left: {why}")):
            say("ready")
            time.sleep(600)
    except KeyboardInterrupt:
        say("KeyboardInterrupt")
        sys.exit(130)  # Python's own code is 1 where what runs at its exit (of Ray here) calls exec() on a string
"""


@pytest.fixture
def there(cluster: dict[str, str]) -> dict[str, str]:
    """The environment of a driver on the running Ray."""
    return environment(RAY_ADDRESS=cluster["RAY_ADDRESS"], RAY_AUTH_MODE="disabled")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_driver_saves_before_other_signals_end_it_too(tmp_path: Path, there: dict[str, str], number: signal.Signals):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    with Job([sys.executable, str(script), "save"], tmp_path / "log", there) as job:
        job.until(lambda: "ready" in job.output, PATIENCE)
        job.process.send_signal(number)
        code, output = job.ended(60), job.output
    assert "asked to save\n" in output
    if number == signal.SIGINT:
        assert "interrupted: saved\n" in output
        # For the program to catch; raytf.cli has a line for it.
        assert output.splitlines()[-1] == "KeyboardInterrupt"
        assert code == 128 + signal.SIGINT
    else:
        # The last line is the one that says how to go on.
        assert output.endswith(
            "left: the terminal was closed (SIGHUP), saved\n"
            "the terminal was closed (SIGHUP): saved; the same command continues from the last checkpoint\n"
        )
        assert code == 128 + signal.SIGHUP


@pytest.mark.parametrize(
    ("ranks", "result"), [("save", "saved"), ("none", "no workers were training"), ("stuck", None)]
)
def test_a_driver_that_is_told_to_stop(tmp_path: Path, there: dict[str, str], ranks: str, result: str | None):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    with Job([sys.executable, str(script), ranks], tmp_path / "log", there) as job:
        job.until(lambda: "ready" in job.output, PATIENCE)
        job.process.terminate()
        if result is None:
            job.until(lambda: "asked to save" in job.output, PATIENCE)
            job.process.terminate()
        assert job.ended(60) == 128 + signal.SIGTERM, job.output
        output = job.output
    assert output.splitlines()[1] == "told to stop (SIGTERM): saving first"
    if result is None:
        assert "left" not in output
    else:
        assert output.endswith(
            f"left: told to stop (SIGTERM), {result}\n"
            f"told to stop (SIGTERM): {result}; the same command continues from the last checkpoint\n"
        )


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with saving_first(MonitorClient(None), print, print):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert seen == [before]


def test_all_is_as_it_was_after_the_statement():
    before = signal.getsignal(signal.SIGTERM)
    with saving_first(MonitorClient(None), print, print):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
