"""`cluster-configs/aws-gpu-spot.yaml` by the real `ray up`, on a stand-in for AWS whose instances are hosts."""

from __future__ import annotations

import json
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing.job import Job
from tests.cluster.cloud import REGION, Cloud
from tests.cluster.cloudlet import Cloudlet, Timeline
from tests.cluster.hosts import ROOT, Host, Hosts
from tests.stress.law import schedules as law

CONFIG = ROOT / "cluster-configs" / "aws-gpu-spot.yaml"
PATIENCE = 300.0
BUCKET = "raytf-runs"
EPOCHS = 40
DASHBOARD = "http://127.0.0.1:8265"
FIRST, SECOND = "m7i.large", "m6i.large"
#: Of the 2 minutes that AWS gives.
NOTICE_SECONDS = 120.0
ALIVE = ("pending", "running", "stopping", "stopped", "shutting-down")

#: In place of uv, which would fetch Python and packages from the network: hosts share this environment's. raytf itself
#: is the one that the config copies to `~/raytf`, since that comes first.
_PYTHON = f"test -x ~/venv/bin/python || {sys.executable} -m venv --without-pip ~/venv"
_PACKAGES = (
    f"printf '%s\\n' ~/raytf {sysconfig.get_path('purelib')}"
    f" > ~/venv/lib/python{sysconfig.get_python_version()}/site-packages/shared.pth;"
    f' for program in ray raytf; do sed "1s|.*|#!$HOME/venv/bin/python|" {sys.prefix}/bin/$program'
    " > ~/venv/bin/$program && chmod +x ~/venv/bin/$program; done"
)


def derived(env: dict[str, str]) -> dict[str, Any]:
    """The config for machines without GPUs, with what needs the internet replaced, and with short waits.

    Machines without GPUs stand for those with: a spot type, another spot type, and on demand. On AWS the nodes have
    keys by their role and find the endpoint by their region; here both are in the environment.
    """
    config = yaml.safe_load(CONFIG.read_text())
    # One more than the job uses: a replacement is asked for while the node still drains.
    config |= {"max_workers": 3, "idle_timeout_minutes": 0.25}
    config["provider"]["use_internal_ips"] = True
    gpu = config["available_node_types"]["gpu"]
    assert gpu["resources"].pop("GPU") == 1
    gpu |= {"max_workers": 3, "resources": {"CPU": 1}}
    gpu["node_config"]["InstanceType"] = FIRST
    other, _ = gpu["node_config"]["fallback"]
    assert set(other) == {"InstanceType"}
    other["InstanceType"] = SECOND
    replaced = {"uv/0.8.0/install.sh": None, "uv venv": _PYTHON}
    commands = []
    for command in config["setup_commands"]:
        (mark,) = [mark for mark in replaced if mark in command] or [""]
        commands.append(replaced.pop(mark) if mark else command)
    assert not replaced
    here = {**env, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    exports = " ".join(f"{key}={value}" for key, value in here.items())
    commands.append(f"grep -q AWS_ENDPOINT_URL ~/.bashrc || sed -i '1i export {exports}' ~/.bashrc")
    config["setup_commands"] = [command for command in commands if command]
    for key in ("head_setup_commands", "worker_setup_commands"):
        (command,) = config[key]
        assert "uv pip install" in command
        config[key] = [_PACKAGES]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        text = json.dumps(config[key])
        assert text.count("ray start ") == 1
        config[key] = json.loads(text.replace("ray start ", "ray start --object-store-memory=100000000 "))
    return config


class Laptop:
    """The machine on which the user types, in the checkout."""

    def __init__(self, host: Host, env: dict[str, str], folder: Path):
        self._host, self._folder, self._jobs = host, folder, 0
        names = {**env, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        names["PYTHONUNBUFFERED"] = "1"  # `ray job submit` would keep what the job prints for itself
        exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in names.items())
        self._first = f"export PATH={Path(sys.executable).parent}:$PATH {exports}; cd {shlex.quote(str(ROOT))}; "

    def type(self, command: str, seconds: float = PATIENCE, check: bool = True) -> str:
        """What a command prints."""
        # By a file: Ray's SSH connections outlive the command, and would keep a pipe open.
        kept = f"({command}) > ~/typed 2>&1; code=$?; cat ~/typed; exit $code"
        run = self._host.run(self._first + kept, seconds, check)
        return run.stdout + run.stderr

    def start(self, command: str, status_file: Path | None = None) -> Job:
        """A command that is not waited for; close it."""
        self._jobs += 1
        log = self._folder / f"typed-{self._jobs}.log"
        return Job(self._host.command(self._first + command), log, status_file=status_file)


@dataclass
class Aws:
    """AWS with an account as docs/clusters/aws.md leaves it, and a laptop with the cluster's YAML in ~/cluster.yaml.

    Attributes:
        shared: a folder that all hosts see.
    """

    cloud: Cloud
    cloudlet: Cloudlet
    laptop: Laptop
    shared: Path
    timeline: Timeline
    job: Job | None = None

    def workers(self) -> dict[str, dict[str, Any]]:
        """Instances of running workers, by id."""
        found = self.cloud.instances("pending", "running")
        return {i["InstanceId"]: i for i in found if i["Tags"].get("ray-node-type") == "worker"}

    def head(self) -> dict[str, Any]:
        """The head's instance."""
        (head,) = [i for i in self.cloud.instances("running") if i["Tags"].get("ray-node-type") == "head"]
        return head

    def monitor(self) -> list[str]:
        """What raytf's provider has said in the autoscaler's log, without times."""
        head = self.cloudlet.host(self.head()["InstanceId"])
        found = head.run("cat /tmp/ray/session_latest/logs/monitor.log").stdout.splitlines()
        return [line.partition("-- raytf: ")[2] for line in found if "-- raytf: " in line]

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Wait until something holds, and say it."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.cloudlet.check()
            if self.job is not None and not self.job.is_running:
                raise RuntimeError(f"the job has ended, and not: {what}\n{self.job.output}")
            if time.monotonic() > deadline:
                monitor = "ray exec ~/cluster.yaml 'tail -n 60 /tmp/ray/session_latest/logs/monitor*'"
                raise TimeoutError(f"{seconds:.0f} s in vain until {what}\n{self.laptop.type(monitor, check=False)}")
            time.sleep(0.5)
        self.timeline.say(what)


@pytest.fixture
def aws(hosts_are_possible: None, tmp_path: Path) -> Iterator[Aws]:
    """AWS, whose instances are hosts of this machine; nothing of it stays."""
    timeline = Timeline()
    with Hosts() as hosts, Cloud(hosts.gateway, tmp_path / "cloud.log") as cloud:
        zones = list(hosts.subnet.subnets(prefixlen_diff=2))
        cloud.network({f"{REGION}{letter}": str(zones[i]) for i, letter in enumerate("abc", 1)}, str(hosts.subnet))
        cloud.account([BUCKET])
        laptop = Laptop(hosts.add("laptop", str(hosts.subnet[5])), cloud.env, tmp_path)
        (hosts.shared / "cluster.yaml").write_text(yaml.safe_dump(derived(cloud.env)))
        laptop.type(f"cp {hosts.shared}/cluster.yaml ~/cluster.yaml; ray get-auth-token --generate > /dev/null")
        with Cloudlet(cloud, hosts, timeline.say) as cloudlet:
            yield Aws(cloud, cloudlet, laptop, hosts.shared, timeline)


@pytest.mark.timeout(1500)
def test_a_job_on_spot_instances_of_which_one_is_taken(aws: Aws, monkeypatch):
    cloud, laptop, say, until = aws.cloud, aws.laptop, aws.timeline.say, aws.until
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    endpoint = f"?endpoint_override={cloud.url.removeprefix('http://')}&scheme=http&region={REGION}"
    runs, run = f"s3://{BUCKET}/runs{endpoint}", Storage(f"s3://{BUCKET}/runs/spot{endpoint}")

    cloud.empty([{"type": FIRST, "market": "spot", "code": "InsufficientInstanceCapacity"}])
    say(f"EC2 has no {FIRST} on spot, in no zone")
    said = laptop.type(
        f"raytf check --offline ~/cluster.yaml --job 'python {law.JOB} --workers 1:2 --storage s3://b/r'"
    )
    assert "nothing found" in said, said
    say("`raytf check` finds nothing")
    laptop.type("ray up -y ~/cluster.yaml", 600)
    say("`ray up` has ended")
    head = aws.head()
    assert head["PrivateIpAddress"] in laptop.type("ray get-head-ip ~/cluster.yaml")
    assert aws.workers() == {}

    status = aws.shared / "status.json"
    flags = (
        f"--data digits --model batchnorm --global-batch-size 64 --epochs {EPOCHS} --pause 0.1 --workers 1:2 --run spot"
    )
    # It sleeps after each step until there is nothing more to come.
    (pause := aws.shared / "pause").touch()
    flags += f" --pause-while {pause}"
    flags += f" --max-failures 0 --checkpoint-every-seconds 3600 --resize-every-seconds 5 --status-file {status}"
    flags += " --no-warm-workers"  # nobody dies unannounced
    submit = f"ray job submit --address {DASHBOARD} --submission-id spot --"
    with laptop.start("ray dashboard ~/cluster.yaml"):
        curl = f"curl -s -o /dev/null -w '%{{http_code}}' {DASHBOARD}/api/version"
        until(lambda: laptop.type(curl, check=False) in ("200", "401", "403"), "the tunnel of `ray dashboard` stands")
        with laptop.start(f"{submit} python {law.JOB} {flags} --storage '{runs}'", status) as job:
            aws.job = job
            say("`ray job submit`")
            until(lambda: len(aws.workers()) == 2, "EC2 has given two instances for workers")
            first = aws.workers()
            assert {(i["InstanceType"], i["InstanceLifecycle"]) for i in first.values()} == {(SECOND, "spot")}
            zones = [f"{REGION}{letter}" for letter in "abc"]
            refused = [(c["zone"], c["type"]) for c in cloud.calls() if c.get("error")]
            assert refused == [(zone, FIRST) for zone in zones]
            until(lambda: len(aws.monitor()) >= 4, "monitor.log says:")
            for line in aws.monitor():
                say(f"  raytf: {line}")
            job.until(lambda: trains(job, 2), PATIENCE)
            say("the job trains on two spot instances")

            victim, since, starts = sorted(first)[0], len(cloud.calls()), groups(run)
            aws.cloudlet.notice(victim, NOTICE_SECONDS)
            told = time.monotonic()
            until(lambda: "AWS will terminate it" in job.output, "the job says that it was told")
            until(lambda: "drain" in kinds(run), "Ray drains the node")
            until(lambda: replaced(cloud, since), "EC2 has given a replacement")
            until(lambda: groups(run) > starts and trains(job), "the run has moved, and trains on")
            assert time.monotonic() - told < NOTICE_SECONDS
            if victim in aws.workers():
                aws.cloudlet.take(victim)
            until(lambda: victim not in aws.workers() and trains(job, 2), "it trains on two instances again")
            assert victim not in aws.workers()
            pause.unlink()
            output = job.wait(PATIENCE)
            aws.job = None
            say("the job has completed")
    # Each record was learned from once in each epoch, and nothing was lost on the way.
    seen = re.findall(r"^epoch \d+: .*seen_0 (\S+), seen_1 (\S+)", output, re.MULTILINE)
    assert len(seen) == EPOCHS
    assert {float(count) for counts in seen for count in counts} == {0.0}
    assert "workers were lost" not in output
    assert all(event["preemption"] for event in ledger.read(run) if event["kind"] == "fault")
    say(f"of {EPOCHS} epochs no record was missed or seen twice; no failure was counted")

    last = set(aws.workers())
    until(lambda: not aws.workers(), "idle workers are terminated")
    by_head = [call["ended"] for call in cloud.terminations() if call["client"] == head["PrivateIpAddress"]]
    assert last <= {instance for ended in by_head for instance in ended}
    launched = [i for i in cloud.instances() if i["Tags"].get("ray-node-type") == "worker"]
    say(f"{len(launched)} workers were launched in all: {', '.join(i['InstanceType'] for i in launched)}")
    # Two, a replacement, and at most one for the moment in which both groups want their nodes.
    assert len(launched) in (3, 4)
    laptop.type("ray down -y ~/cluster.yaml", 600)
    say("`ray down` has ended")
    left = cloud.instances(*ALIVE)
    say(f"{len(left)} instances are left")
    assert left == []


def trains(job: Job, workers: int | None = None) -> bool:
    """Whether a group of this many workers has made a step."""
    status = job.status or {}
    if status.get("phase") != "training" or not status["samples_per_second"] > 0:
        return False
    return workers in (None, status["workers"])


def kinds(run: Storage) -> list[str]:
    """Of all events in a run's ledger."""
    return [event["kind"] for event in ledger.read(run)]


def groups(run: Storage) -> int:
    """How often a run's workers have begun, in place or anew."""
    return len(run.list("attempts"))


def replaced(cloud: Cloud, since: int) -> bool:
    """Whether RunInstances has given an instance after so many calls."""
    return any(call.get("ids") for call in cloud.calls()[since:])
