"""Hosts that fall silent, and a network that is cut in two: who goes on, when, and with which weights.

    python -m tests.stress.cut [--only silence ...]

Three hosts are network namespaces of this machine, each with a raylet of its own; the driver runs on the first. Three
workers train in exact mode, and in turns

- the last host's link goes down: nothing closes, it is only silent;
- all processes of the last host are stopped, and go on after the others have left them behind;
- the first host's link goes down: it has the driver, and the other two reach each other, but not the driver;
- packets from the last host to both others get lost for 5, 60 or 400 s (`one-way-5` ...), or also those to it
  (`both-ways-5` ...).

Each time those that are left must go on within 6 s, the others must end, and the weights must be those of a run that
nobody disturbed. Where packets are delivered again after 5 s, the last host may also stay. Needs root, for the
namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from benchmarks.step.namespaces import Namespace, namespaces, reason_not_possible
from raytf.testing import Job, environment
from raytf.testing.processes import WORKER, titled
from tests.stress.law.schedules import redone

JOB = Path(__file__).with_name("law") / "job.py"
#: Seconds of sleep in each step until a case is over; the longer ones where a run would else end too soon.
PAUSE, LONG_PAUSE = 0.02, 0.2
PAUSES = {"one-way-400": LONG_PAUSE, "both-ways-400": LONG_PAUSE}
#: Seconds for what waits for processes to start.
PATIENCE_SECONDS = 240.0
#: Seconds after which who is silent is left out, and those in which the steps after it are seen here.
SILENT_SECONDS, SEEN_SECONDS = 6.0, 1.0
#: Steps after which a run that stood still is seen to train.
STEPS_SEEN = 3
#: Seconds until who is left behind has ended: it notices, and leaves time for an error to be heard.
LEFT_BEHIND_SECONDS = 60.0


@dataclass(frozen=True)
class Arguments:
    """Cut a network of three hosts."""

    epochs: int = 150
    """Of each run; long enough for what happens in it."""
    data: str = "auto"
    """As in jobs/mnist.py."""
    only: tuple[str, ...] = ()
    """What to do; by default all."""


class Cluster:
    """Ray on hosts.

    Args:
        hosts: the first one is the head.
        folder: for what Ray writes.
    """

    def __init__(self, hosts: Sequence[Namespace], folder: Path):
        self.hosts, self._folder = hosts, folder
        self.address = f"{hosts[0].address}:6379"
        self.env = {"RAY_AUTH_MODE": "disabled"}  # the network has no one else

    def start(self, hosts: int | None = None) -> None:
        """Start Ray on the first hosts; by default on all."""
        for host in self.hosts[:hosts]:
            self.join(host)

    def join(self, host: Namespace) -> None:
        """Start Ray on a host."""
        place = [f"--address={self.address}", f"--node-ip-address={host.address}"]
        if host is self.hosts[0]:
            place = ["--head", "--port=6379", "--include-dashboard=false", place[1], f"--temp-dir={self._folder}/r0"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats"]
        env = environment(**self.env)
        done = subprocess.run(within(host, [*ray, *place]), env=env, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stdout + done.stderr

    def processes(self, host: Namespace) -> list[psutil.Process]:
        """All that run on a host."""
        found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
        return [psutil.Process(int(pid)) for pid in found.stdout.split() if psutil.pid_exists(int(pid))]

    def workers(self, host: Namespace) -> list[psutil.Process]:
        """The workers that live on a host."""
        return titled(self.processes(host), WORKER)

    def stop(self) -> None:
        for host in self.hosts:
            for process in self.processes(host):
                with contextlib.suppress(psutil.Error):
                    process.kill()


def within(host: Namespace, command: Sequence[str]) -> list[str]:
    """A command of this machine that runs another one on a host."""
    return ["ip", "netns", "exec", host.name, *command]


def link(host: Namespace, state: str) -> None:
    """Take a host's link up or down; nobody is told."""
    subprocess.run(within(host, ["ip", "link", "set", "eth0", state]), check=True)


def lose_packets(sender: Namespace, receiver: Namespace) -> None:
    """Have packets from a host to another one get lost on their way: they go to a card that nobody has.

    The kernel here has no packet filter, but what is sent to a wrong card gets lost as well, and nobody is told.
    """
    wrong = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
    subprocess.run(within(sender, ["ip", "neigh", "replace", receiver.address, *wrong]), check=True)


def deliver_packets(sender: Namespace, receiver: Namespace) -> None:
    """Undo `lose_packets`."""
    subprocess.run(within(sender, ["ip", "neigh", "del", receiver.address, "dev", "eth0"]), check=True)


@contextlib.contextmanager
def trained(arguments: Arguments, cluster: Cluster, folder: Path, name: str) -> Iterator[Job]:
    """A run on a cluster, from the first host, which ends with the `with` statement."""
    status, pause = folder / f"{name}.json", folder / "pause"
    pause.touch()
    command = [sys.executable, str(JOB), "--data", arguments.data, "--epochs", str(arguments.epochs), "--exact"]
    command += ["--model", "batchnorm", "--workers", "1:3", "--global-batch-size", "96", "--logical-shards", "12"]
    command += ["--pause", str(PAUSES.get(name, PAUSE)), "--pause-while", str(pause), "--max-failures", "100"]
    command += ["--storage", str(folder), "--run", name, "--status-file", str(status)]
    env = environment(RAY_ADDRESS=cluster.address, **cluster.env)
    with Job(within(cluster.hosts[0], command), folder / f"{name}.log", env, status_file=status) as job:
        yield job


def until_all_train(job: Job, cluster: Cluster) -> None:
    job.until(
        lambda: (job.status or {}).get("workers") == len(cluster.hosts) and (job.step or 0) > 30, PATIENCE_SECONDS
    )


def case(arguments: Arguments, name: str, disturb: Callable[[Job, Cluster], float | None], sha256: str = "") -> str:
    """Train once, on hosts of its own.

    Args:
        arguments: of the command.
        name: of the run.
        disturb: does something to the run, and tells how long the others stood still.
        sha256: that the weights must have.

    Returns:
        That of the weights.

    Raises:
        AssertionError: something is not as it must be.
    """
    folder = Path(tempfile.mkdtemp(prefix="raytf-cut-"))
    with namespaces(3) as (hosts, _):
        cluster = Cluster(hosts, folder)
        try:
            cluster.start()
            with trained(arguments, cluster, folder, name) as job:
                stood = disturb(job, cluster)
                (folder / "pause").unlink()
                job.wait(PATIENCE_SECONDS * 4)
            result = json.loads((folder / name / "result.json").read_text())
        finally:
            cluster.stop()
    again, seen = redone(folder / name), [tuple(e["seen"]) for e in result["history"]]
    told = "" if stood is None else f"the others went on after {stood:.1f} s, "
    print(f"{name}: {told}{again} redone, {result['weights_sha256'][:8]}", flush=True)
    assert set(seen) == {(0.0, 0.0)}, seen
    assert not sha256 or (result["weights_sha256"], again) == (sha256, 0), folder
    shutil.rmtree(folder)
    return str(result["weights_sha256"])


def gap(job: Job, seconds: float) -> float:
    """Wait until a run that stands still makes steps again; for how long it stood still."""
    began, step = time.monotonic(), job.step or 0
    job.until(lambda: (job.step or 0) >= step + STEPS_SEEN, seconds)
    return time.monotonic() - began


def silence(job: Job, cluster: Cluster) -> float:
    """The last host's link goes down."""
    until_all_train(job, cluster)
    left = cluster.workers(cluster.hosts[-1])
    link(cluster.hosts[-1], "down")
    stood = _left_out(job)
    _until_ended(left)
    return stood


def stopped(job: Job, cluster: Cluster) -> float:
    """All of the last host is stopped, and goes on later."""
    until_all_train(job, cluster)
    left = cluster.workers(cluster.hosts[-1])
    frozen = cluster.processes(cluster.hosts[-1])
    for process in frozen:
        os.kill(process.pid, signal.SIGSTOP)
    stood = _left_out(job)
    for process in frozen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
    _until_ended(left)
    return stood


def halves(job: Job, cluster: Cluster) -> float:
    """The host with the driver is cut from the other two, which still reach each other."""
    until_all_train(job, cluster)
    others = [worker for host in cluster.hosts[1:] for worker in cluster.workers(host)]
    assert len(others) == 2
    link(cluster.hosts[0], "down")
    stood = _left_out(job)
    _until_ended(others)
    return stood


def lossy(seconds: float, is_both: bool) -> Callable[[Job, Cluster], float]:
    """Return what has packets from the last host get lost for so many seconds, and perhaps those to it."""

    def disturb(job: Job, cluster: Cluster) -> float:
        until_all_train(job, cluster)
        *others, last = cluster.hosts
        left, began, stood = cluster.workers(last), time.monotonic(), 0.0
        pairs = [(last, other) for other in others] + [(other, last) for other in others if is_both]
        for pair in pairs:
            lose_packets(*pair)
        if seconds > SILENT_SECONDS:
            stood = _left_out(job, LONG_PAUSE if seconds > 60 else PAUSE)
            _until_ended(left)
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        else:
            time.sleep(seconds)
            stood = seconds + gap(job, SILENT_SECONDS + 20)
        for pair in pairs:
            deliver_packets(*pair)
        step = job.step or 0
        job.until(lambda: (job.step or 0) > step + 20, PATIENCE_SECONDS)  # whoever is back disturbs nobody
        return stood

    return disturb


def _left_out(job: Job, pause: float = PAUSE) -> float:
    """Wait until the others go on; for how long they stood still."""
    time.sleep(1.0)  # what was on its way when the link went down has come
    stood = 1.0 + gap(job, SILENT_SECONDS + 20)
    job.until(lambda: "no step lost" in job.output, PATIENCE_SECONDS)
    assert stood <= SILENT_SECONDS + SEEN_SECONDS + STEPS_SEEN * pause, f"{stood:.1f} s"
    return stood


def _until_ended(workers: Sequence[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(workers, timeout=LEFT_BEHIND_SECONDS)
    assert not alive, f"{len(alive)} of {len(gone) + len(alive)} that were left behind still run"


CASES: dict[str, Callable[[Job, Cluster], float | None]] = {
    "silence": silence,
    "stopped": stopped,
    "halves": halves,
    **{f"one-way-{seconds}": lossy(seconds, False) for seconds in (5, 60, 400)},
    **{f"both-ways-{seconds}": lossy(seconds, True) for seconds in (5, 60, 400)},
}


def main(arguments: Arguments) -> int:
    reason = reason_not_possible()
    if reason:
        print(reason)
        return 2
    sha256 = case(arguments, "undisturbed", lambda job, cluster: None)
    for name in arguments.only or CASES:
        case(arguments, name, CASES[name], sha256)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
