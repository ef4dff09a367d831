"""`cluster-configs/aws-gpu-spot.yaml` by the real `ray up`, on a stand-in for AWS whose instances are hosts."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import law
from raytf import ledger
from raytf.storage import Storage
from raytf.testing.job import Job
from raytf.testing.processes import free_port
from tests.cluster.cloud import REGION, Cloud
from tests.cluster.cloudlet import Cloudlet, Timeline
from tests.cluster.hosts import ROOT, Host, Hosts

CONFIG = ROOT / "cluster-configs" / "aws-gpu-spot.yaml"
PATIENCE = 300.0
BUCKET = "raytf-runs"
FIRST, SECOND = "m7i.large", "m6i.large"
#: Of the 2 minutes that AWS gives.
NOTICE_SECONDS = 120.0
ALIVE = ("pending", "running", "stopping", "stopped", "shutting-down")

#: In place of uv, which would fetch Python and packages from the network: hosts share this environment's. raytf itself is
#: the one that the config copies to `~/raytf`, since that comes first.
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
    config |= {"max_workers": 2, "idle_timeout_minutes": 0.25}
    config["provider"]["use_internal_ips"] = True
    gpu = config["available_node_types"]["gpu"]
    assert gpu["resources"].pop("GPU") == 1
    gpu |= {"max_workers": 2, "resources": {"CPU": 1}}
    gpu["node_config"]["InstanceType"] = FIRST
    assert [set(entry) for entry in gpu["node_config"]["fallback"]][0] == {"InstanceType"}
    gpu["node_config"]["fallback"][0]["InstanceType"] = SECOND
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
        exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in names.items())
        self._first = f"export PATH={Path(sys.executable).parent}:$PATH {exports}; cd {shlex.quote(str(ROOT))}; "

    def type(self, command: str, seconds: float = PATIENCE, check: bool = True) -> str:
        """What a command prints."""
        run = self._host.run(self._first + command, seconds, check)
        return run.stdout + run.stderr

    def start(self, command: str) -> Job:
        """A command that is not waited for; close it."""
        self._jobs += 1
        return Job(self._host.command(self._first + command), self._folder / f"typed-{self._jobs}.log")


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def aws(hosts_are_possible: None, timeline: Timeline, tmp_path: Path) -> Iterator[tuple[Cloud, Cloudlet, Laptop]]:
    """AWS with an account as docs/aws.md leaves it, and a laptop with a cluster's YAML in ~/cluster.yaml."""
    with Hosts() as hosts, Cloud(hosts.gateway, tmp_path / "cloud.log") as cloud:
        zones = list(hosts.subnet.subnets(prefixlen_diff=2))
        cloud.network({f"{REGION}{letter}": str(zones[i]) for i, letter in enumerate("abc", 1)}, str(hosts.subnet))
        cloud.account([BUCKET])
        laptop = hosts.add("laptop", str(hosts.subnet[5]))
        (hosts.shared / "cluster.yaml").write_text(yaml.safe_dump(derived(cloud.env)))
        with Cloudlet(cloud, hosts, timeline.say) as cloudlet:
            user = Laptop(laptop, cloud.env, tmp_path)
            user.type(f"cp {hosts.shared}/cluster.yaml ~/cluster.yaml; ray get-auth-token --generate > /dev/null")
            yield cloud, cloudlet, user


def test_a_job_on_spot_instances_of_which_one_is_taken(aws, timeline: Timeline, monkeypatch):
    cloud, cloudlet, laptop = aws
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    address = cloud.url.removeprefix("http://")
    runs = f"s3://{BUCKET}/runs?endpoint_override={address}&scheme=http&region={REGION}"
    run = Storage(runs.replace("/runs?", "/runs/spot?"))

    def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            cloudlet.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{seconds:.0f} s in vain until {what}\n{logs()}")
            time.sleep(0.5)
        timeline.say(what)

    def logs() -> str:
        said = laptop.type("ray exec ~/cluster.yaml 'tail -n 80 /tmp/ray/session_latest/logs/monitor*'", check=False)
        return f"{said}\n{job.output if job else ''}"

    def workers(*states: str) -> dict[str, dict[str, Any]]:
        found = cloud.instances(*(states or ("running",)))
        return {i["InstanceId"]: i for i in found if i["Tags"].get("ray-node-type") == "worker"}

    def book() -> list[dict[str, Any]]:
        return ledger.read(run) if job and "training starts" in job.output else []

    job: Job | None = None
    cloud.empty([{"type": FIRST, "market": "spot", "code": "InsufficientInstanceCapacity"}])
    timeline.say(f"EC2 has no {FIRST} on spot, in no zone")
    said = laptop.type("raytf check --offline ~/cluster.yaml --job 'python job.py --workers 1:2 --storage s3://b/r'")
    assert "nothing found" in said, said
    timeline.say("raytf check finds nothing")
    laptop.type("ray up -y ~/cluster.yaml", 600)
    timeline.say("ray up has ended")
    (head,) = cloud.instances("running")
    assert workers() == {}

    port = 8265
    tunnel = laptop.start(f"ray dashboard ~/cluster.yaml --port {port}")
    until(lambda: "ok" in laptop.type(f"curl -s -o /dev/null -w ok 127.0.0.1:{port}/api/version", check=False), "tunnel")
    flags = f"--data digits --model batchnorm --global-batch-size 64 --epochs 10 --pause 0.1 --workers 1:2 --run spot"
    flags += " --checkpoint-every-seconds 3600 --resize-every-seconds 5 --max-failures 0"
    submit = f"ray job submit --address http://127.0.0.1:{port} --submission-id spot --"
    job = laptop.start(f"{submit} python {law.JOB} {flags} --storage {shlex.quote(shlex.quote(runs))}")
    timeline.say("job submitted")
    with tunnel, job:
        until(lambda: len(workers()) == 2, "two workers run")
        assert {(i["InstanceType"], i["InstanceLifecycle"]) for i in workers().values()} == {(SECOND, "spot")}
        until(lambda: job.ended(0) if not job.is_running else "training" in job.output, "?")
        print(job.output[-3000:])
        print(logs())
