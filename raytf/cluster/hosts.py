"""Hosts over SSH, as `ray up` reaches them: the same user, key, proxy and options."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytf.cluster.check.document import Document
from raytf.cluster.check.surroundings import Surroundings
from raytf.errors import ConfigError, one_line

_CONNECT_SECONDS, _SCRIPT_SECONDS = 5, 18
#: So many hosts are asked at the same time.
_AT_ONCE = 16


@dataclass(frozen=True)
class Answer:
    """What a script said on a host.

    Attributes:
        host: its address.
        values: of its lines `KEY=VALUE`; of a key that comes several times, the last one.
        lines: all of its lines.
        problem: why there is no answer, in SSH's words; empty where there is one.
    """

    host: str
    values: Mapping[str, str]
    lines: Sequence[str]
    problem: str = ""


def addresses(document: Document) -> list[str]:
    """Head first, then the workers."""
    found = [document.get("provider", "head_ip"), *document.sequence("provider", "worker_ips")]
    return [str(host) for host in found if host]


def ask(document: Document, here: Surroundings, hosts: Sequence[str], script: str) -> list[Answer]:
    """Run a script of bash on hosts, at the same time; it must only read.

    Raises:
        ConfigError: there is no ssh here.
    """
    tool = shutil.which("ssh", path=here.environ.get("PATH"))
    if tool is None:
        raise ConfigError("there is no ssh on this machine. Install openssh-client, which `ray up` needs too.")
    options = _options(document, here)
    user = document.get("auth", "ssh_user")
    if not hosts:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(
            pool.map(lambda host: _ask([tool, *options, f"{user}@{host}" if user else host], host, script), hosts)
        )


def _options(document: Document, here: Surroundings) -> list[str]:
    settings = {
        "BatchMode": "yes",  # a question would wait for somebody who is not there
        "ConnectTimeout": str(_CONNECT_SECONDS),
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    private, proxy = document.get("auth", "ssh_private_key"), document.get("auth", "ssh_proxy_command")
    if isinstance(proxy, str):
        settings["ProxyCommand"] = proxy
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    if isinstance(private, str):
        options += ["-o", "IdentitiesOnly=yes", "-i", str(here.local(private))]
    return options


def _ask(command: list[str], host: str, script: str) -> Answer:
    try:
        done = subprocess.run(
            [*command, "bash", "-s"], input=script, capture_output=True, text=True, timeout=_SCRIPT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(host, {}, [], f"no answer within {_SCRIPT_SECONDS} s")
    except OSError as problem:
        return Answer(host, {}, [], one_line(problem))
    lines = done.stdout.splitlines()
    if done.returncode == 255 or "end=here" not in lines:
        return Answer(host, {}, lines, one_line(done.stderr, 200) or f"ssh ended with {done.returncode}")
    return Answer(host, dict(line.partition("=")[::2] for line in lines if "=" in line), lines)
