"""Turns the instances of a stand-in for EC2 into hosts: boots them, gives them metadata, and ends them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from raytf.testing import MetadataServer
from tests.cluster.cloud import Cloud
from tests.cluster.hosts import ROOT, Host, Hosts
from tests.cluster.link_local import ADDRESS
from tests.cluster.network import call

_LOOK_SECONDS = 1.0


class Cloudlet:
    """The machines of a cloud, as hosts; a context manager.

    An instance gets a host with its private address and its key pair, as soon as it runs, and the metadata service at
    the clouds' address. A host goes, by SIGKILL to all on it, when its instance is terminated.

    Args:
        cloud: where instances are launched and terminated.
        hosts: where they live.
        say: takes a line for each thing that happens.
    """

    def __init__(self, cloud: Cloud, hosts: Hosts, say: Callable[[str], None]):
        self._cloud, self._hosts, self._say = cloud, hosts, say
        self._machines: dict[str, tuple[Host, Any]] = {}
        self._services: list[subprocess.Popen[bytes]] = []
        self._stop = threading.Event()
        self._trouble: BaseException | None = None

    def __enter__(self) -> Cloudlet:
        self._metadata = MetadataServer(self._hosts.gateway).__enter__()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stop.set()
        self._thread.join(120)
        for host, _ in self._machines.values():
            host.kill()
        for service in self._services:
            service.kill()
            service.wait(30)
        self._metadata.__exit__(*exc)

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._trouble is not None:
            raise RuntimeError("the cloudlet has failed") from self._trouble

    def host(self, instance: str) -> Host:
        """The host of a running instance."""
        return self._machines[instance][0]

    def notice(self, instance: str, seconds: float) -> None:
        """EC2 is going to interrupt a spot instance after this many seconds; only told here."""
        self._say(f"notice: {instance} is interrupted in {seconds:.0f} s")
        self._machines[instance][1].notice(seconds)

    def take(self, instance: str) -> None:
        """EC2 takes an instance."""
        self._say(f"EC2 takes {instance}")
        self._cloud.client("ec2").terminate_instances(InstanceIds=[instance])

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                for instance in self._cloud.instances():
                    name, state = instance["InstanceId"], instance["State"]["Name"]
                    if state in ("pending", "running") and name not in self._machines:
                        self._boot(name, instance)
                    elif state in ("shutting-down", "terminated", "stopped") and name in self._machines:
                        host, _ = self._machines.pop(name)
                        self._hosts.remove(host)
                        self._say(f"{name} is gone")
        except BaseException as error:  # told by `check`
            self._trouble = error

    def _boot(self, name: str, instance: dict[str, Any]) -> None:
        pairs = self._cloud.client("ec2").describe_key_pairs(KeyNames=[instance["KeyName"]], IncludePublicKey=True)
        host = self._hosts.add(name, instance["PrivateIpAddress"], [pairs["KeyPairs"][0]["PublicKey"]])
        call("nsenter", f"--target={host.pid}", "--net", "ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
        machine = self._metadata.add("aws", name)
        script = f"cd {ROOT} && exec {sys.executable} -m tests.cluster.link_local {machine.url}"
        self._services.append(
            subprocess.Popen(
                host.command(script, user="root"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
            )
        )
        self._machines[name] = host, machine
        lifecycle = instance.get("InstanceLifecycle", "on-demand")
        zone, kind = instance["Placement"]["AvailabilityZone"], instance["Tags"].get("ray-user-node-type")
        self._say(f"{name} runs: {kind}, {instance['InstanceType']} {lifecycle} in {zone}, {host.address}")


class Timeline:
    """What happened and when, printed as it comes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self.lines: list[tuple[float, str]] = []

    def say(self, text: str) -> None:
        """Something happened now."""
        with self._lock, contextlib.suppress(ValueError):  # a closed stdout
            at = time.monotonic() - self._start
            self.lines.append((at, text))
            print(f"{at:6.1f} s  {text}", flush=True)

    def at(self, words: str) -> float:
        """When a line with these words came first.

        Raises:
            LookupError: there is none.
        """
        for at, text in self.lines:
            if words in text:
                return at
        raise LookupError(f"nothing with {words!r} happened")
