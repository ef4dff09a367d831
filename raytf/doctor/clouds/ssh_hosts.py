"""Runs scripts on hosts over SSH, with the user, key and proxy of `ray up`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytf.doctor.document import Document
from raytf.doctor.local_environment import Surroundings, is_host, is_user
from raytf.errors import ConfigError, one_line

_CONNECT_SECONDS, _SCRIPT_SECONDS = 5, 18
#: The most hosts on which the script runs at the same time.
_AT_ONCE = 16


@dataclass(frozen=True)
class ScriptOutput:
    """The output of a script on a host.

    Attributes:
        host: its address.
        values: the values in its lines `KEY=VALUE`; the last one of a repeated key.
        problem: why there is no answer, as reported by SSH; empty if there is one.
    """

    host: str
    values: Mapping[str, str]
    lines: Sequence[str]
    problem: str = ""


def addresses(document: Document) -> list[str]:
    """Return the head's address, followed by the workers' addresses."""
    hosts = [document.get("provider", "head_ip"), *document.sequence("provider", "worker_ips")]
    return [str(host) for host in hosts if host]


def proxy_of(document: Document) -> str:
    """Return the proxy command that connects this machine to a file's hosts, or an empty string."""
    proxy = document.get("auth", "ssh_proxy_command")
    return proxy.strip() if isinstance(proxy, str) else ""


def ask(
    document: Document, here: Surroundings, hosts: Sequence[str], script: str, trust: bool = False
) -> list[ScriptOutput]:
    """Run a bash script, which must only read, on hosts in parallel, and return their outputs.

    Args:
        document: has the user, key and proxy.
        hosts: the hosts' addresses.
        trust: allow the proxy command in the file to run on this machine.

    Raises:
        ConfigError: there is no ssh, a host or user is malformed, or the file names a command and is not trusted.
    """
    odd = next((host for host in hosts if not is_host(host)), None)
    if odd is not None:
        raise ConfigError(
            f"{odd!r} is neither an address nor the name of a host. Use letters, digits, dots and colons."
        )
    if document.get("auth", "ssh_user") and not is_user(document.get("auth", "ssh_user")):
        raise ConfigError(f"auth.ssh_user {document.get('auth', 'ssh_user')!r} is not a valid user name.")
    if proxy_of(document) and not trust:
        raise ConfigError(untrusted(document))
    tool = shutil.which("ssh", path=here.environ.get("PATH"))
    if tool is None:
        raise ConfigError("There is no ssh on this machine. Install openssh-client, which `ray up` needs too.")
    options = _options(document, here)
    user = document.get("auth", "ssh_user")
    if not hosts:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(
            pool.map(lambda host: _ask([tool, *options, "--", f"{user}@{host}" if user else host], host, script), hosts)
        )


def untrusted(document: Document) -> str:
    """Return the message that a file names a proxy command and is not trusted."""
    return (
        f"the file names a command to run on this machine (auth.ssh_proxy_command: {proxy_of(document)[:200]!r}), "
        "which was not run. Pass --trust if you trust the file"
    )


def _options(document: Document, here: Surroundings) -> list[str]:
    settings = {
        "BatchMode": "yes",  # nobody can answer a question
        "ConnectTimeout": str(_CONNECT_SECONDS),
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        # The author of the file chose the host: it gets no key agent, no display and no port of this machine.
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "PermitLocalCommand": "no",
    }
    private, proxy = document.get("auth", "ssh_private_key"), proxy_of(document)
    if proxy:
        settings["ProxyCommand"] = proxy
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    if isinstance(private, str):
        options += ["-o", "IdentitiesOnly=yes", "-i", str(here.local(private))]
    return options


def _ask(command: list[str], host: str, script: str) -> ScriptOutput:
    try:
        done = subprocess.run(
            [*command, "bash", "-s"], input=script, capture_output=True, text=True, timeout=_SCRIPT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ScriptOutput(host, {}, [], f"no answer within {_SCRIPT_SECONDS} s")
    except OSError as problem:
        return ScriptOutput(host, {}, [], one_line(problem))
    lines = done.stdout.splitlines()
    if done.returncode == 255 or "end=here" not in lines:
        return ScriptOutput(host, {}, lines, one_line(done.stderr, 200) or f"ssh exited with {done.returncode}")
    return ScriptOutput(host, dict(line.partition("=")[::2] for line in lines if "=" in line), lines)
