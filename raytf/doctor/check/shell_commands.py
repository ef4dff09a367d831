"""Shell commands of a cluster YAML: those that set a node up, and those that start Ray."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from raytf.doctor.check import ray_start
from raytf.doctor.check.versions import NIGHTLY
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, near, warning
from raytf.errors import one_line

_SETUP = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
_HEAD, _WORKER = "head_start_ray_commands", "worker_start_ray_commands"
_DEFAULT_PORT = "6379"
_AUTH_MODES = ("token", "disabled")
_SECONDS = 5


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find commands that wait for an answer, lose what they set, or start no cluster."""
    for path, command in _all(document):
        yield from _setup(path, command)
    yield from check_syntax([*_all(document), *document.commands(_HEAD, _WORKER)])
    for path, command in document.commands(_HEAD, _WORKER):
        yield from ray_start.check(path, command, str(document.get("provider", "type")))
    yield from _head(document)
    yield from _worker(document)
    yield from _watched(document)
    yield from _auth(document)


def _all(document: Document) -> Iterator[tuple[Path, str]]:
    yield from document.commands(*_SETUP)
    for name in document.mapping("available_node_types"):
        for key in ("initialization_commands", "worker_setup_commands"):
            for i, command in enumerate(document.sequence("available_node_types", name, key)):
                if isinstance(command, str):
                    yield ("available_node_types", name, key, i), command


def _setup(path: Path, command: str) -> Iterator[ConfigFinding]:
    asks = re.search(r"\b(apt-get|apt|yum|dnf|conda)\s+(-\S+\s+)*(install|upgrade|create|remove)\b", command)
    if asks and not re.search(r"\s(-y|-yq|-qy|-qqy|-yqq|--yes|--assume-yes)\b", command):
        yield error(
            "asks-for-answer",
            path,
            f"`{asks[0]} ...` waits for a yes",
            "Nobody answers on the node: `ray up` ends, or waits for ever.",
            "Add -y.",
        )
    alone = re.fullmatch(
        r"\s*(export\s+\w+=\S*|cd\s+\S+|conda\s+activate\s+\S+|source\s+\S*activate|ulimit\s+.*)\s*", command
    )
    if alone:
        yield error(
            "lost-setting",
            path,
            f"`{command.strip()}` is a command of its own",
            "Ray runs each command in a shell of its own: what this one sets is gone in the next.",
            f"Join it by && with what needs it, or keep it: echo '{command.strip()}' >> ~/.bashrc.",
        )
    if re.search(r"(^|[;&|]\s*|sudo\s+)(reboot|shutdown|poweroff)\b", command):
        yield error(
            "reboot",
            path,
            "the command restarts the node",
            "The connection ends, and Ray takes the set-up for failed.",
            "Put what needs a restart into the image.",
        )
    if NIGHTLY.search(command):
        yield warning(
            "nightly-ray",
            path,
            "this installs the Ray of tonight",
            "Nodes that start tomorrow have another version than the head: `Version mismatch`, and they never join.",
            'Write pip install "ray[default,train]==2.60.0", the version of your own machine.',
        )


def _head(document: Document) -> Iterator[ConfigFinding]:
    if _HEAD not in document.mapping():
        return
    commands = [c for c in document.sequence(_HEAD) if isinstance(c, str)]
    starts = [(i, c) for i, c in enumerate(commands) if re.search(r"\bray start\b", c)]
    if not starts:
        yield error(
            "head-start",
            (_HEAD,),
            "no command starts Ray",
            "The head runs, and no Ray on it.",
            "Add `ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml`.",
        )
        return
    i, start = starts[-1]
    if "--head" not in start:
        yield error(
            "head-start",
            (_HEAD, i),
            "`ray start` of the head lacks --head",
            "It looks for another head and fails.",
            "Add --head.",
        )
    if "--autoscaling-config" not in start:
        yield error(
            "no-autoscaler",
            (_HEAD, i),
            "`ray start --head` lacks --autoscaling-config",
            "The workers' hosts are never set up: it is the head that does that."
            if document.get("provider", "type") == "local"
            else "The head comes up, and no worker is ever started.",
            "Add --autoscaling-config=~/ray_bootstrap_config.yaml.",
        )
    if not any(re.search(r"\bray stop\b", c) for c in commands):
        yield warning(
            "no-ray-stop",
            (_HEAD,),
            "`ray stop` does not come first",
            "A second `ray up` finds the port taken.",
            "Put `ray stop` before.",
        )
    everything = " ".join(commands)
    if "RAY_gcs_storage=rocksdb" in everything and "RAY_gcs_storage_path=" not in everything:
        yield error(
            "gcs-storage",
            (_HEAD, i),
            "RAY_gcs_storage=rocksdb without RAY_gcs_storage_path",
            "`ray start --head` ends.",
            "Add RAY_gcs_storage_path=$HOME/raytf-gcs, on a disk that stays.",
        )
    for flag in re.findall(r"(?<=\s)-[a-z]\w+=", start):
        yield error(
            "one-dash",
            (_HEAD, i),
            f"{flag} has one dash",
            "`ray start` refuses it.",
            f"Write -{flag}.",
        )


def _worker(document: Document) -> Iterator[ConfigFinding]:
    if _WORKER not in document.mapping():
        return
    head = " ".join(c for c in document.sequence(_HEAD) if isinstance(c, str))
    port = re.search(r"--port[= ](\d+)", head)
    head_port = port[1] if port else _DEFAULT_PORT
    starts = [(i, c) for i, c in enumerate(document.sequence(_WORKER)) if isinstance(c, str) and "ray start" in c]
    if not starts:
        yield error(
            "worker-start",
            (_WORKER,),
            "no command starts Ray",
            "Workers come up, and never join.",
            "Add `ray start --address=$RAY_HEAD_IP:6379`.",
        )
        return
    i, start = starts[-1]
    address = re.search(r"--address[= ]['\"]?([^\s'\"]+)", start)
    if "--head" in start:
        yield error(
            "worker-start",
            (_WORKER, i),
            "a worker starts with --head",
            "Each worker becomes a cluster of its own.",
            "Write `ray start --address=$RAY_HEAD_IP:6379`.",
        )
    elif address is None:
        yield error(
            "worker-start",
            (_WORKER, i),
            "`ray start` of the workers lacks --address",
            "They do not find the head.",
            "Add --address=$RAY_HEAD_IP:6379.",
        )
    elif address[1].rsplit(":", 1)[-1] != head_port and ":" in address[1]:
        yield error(
            "port-mismatch",
            (_WORKER, i),
            f"workers look for the head at port {address[1].rsplit(':', 1)[-1]}, and it listens at {head_port}",
            "They never join; Ray starts and ends them again and again.",
            f"Write --address=$RAY_HEAD_IP:{head_port}.",
        )
    elif "$RAY_HEAD_IP" not in address[1] and "${RAY_HEAD_IP}" not in address[1]:
        yield warning(
            "fixed-head-address",
            (_WORKER, i),
            f"the head's address {address[1]} is fixed",
            "A new head has another address.",
            "Write --address=$RAY_HEAD_IP:6379; Ray sets RAY_HEAD_IP.",
        )


def _watched(document: Document) -> Iterator[ConfigFinding]:
    for path, command in document.commands(_HEAD, _WORKER):
        if not re.search(r"\bray start\b", command):
            continue
        if ray_start.NODE.search(command) and "--block" not in command:
            yield error(
                "watch-without-block",
                path,
                "`raytf node` runs a `ray start` that does not stay",
                "`ray start` ends at once without --block, and `raytf node` with it: nobody watches the node.",
                "Add --block after `ray start`.",
            )
        elif "--block" in command and not re.search(r"&\s*\)?\s*$", command):
            yield error(
                "start-never-ends",
                path,
                "`ray start --block` stays in the foreground",
                "`ray up` waits for it forever, and never goes on.",
                "Leave --block out, or put it into the background: setsid nohup ... > LOG 2>&1 < /dev/null &",
            )


def _auth(document: Document) -> Iterator[ConfigFinding]:
    head = " ".join(str(c) for c in document.sequence(_HEAD))
    worker = " ".join(str(c) for c in document.sequence(_WORKER))
    setup = " ".join(command for _, command in _all(document))
    modes = {name: _mode(text) or _mode(setup) for name, text in (("head", head), ("workers", worker))}
    for path, command in [*_all(document), *document.commands(_HEAD, _WORKER)]:
        mode = _mode(command)
        if mode not in (None, *_AUTH_MODES):
            yield error(
                "auth-mode",
                path,
                f"RAY_AUTH_MODE is {mode!r}{near(mode, _AUTH_MODES)}",
                "Ray takes every other word for `disabled`, and says nothing: the cluster takes orders from anybody.",
                "Write RAY_AUTH_MODE=token.",
            )
            return
    if head and worker and modes["head"] != modes["workers"]:
        yield error(
            "auth-mode",
            (_HEAD,),
            f"RAY_AUTH_MODE: {modes['head'] or 'not set'} for the head, {modes['workers'] or 'not set'} for workers",
            "Workers are turned away (InvalidAuthToken) or the head takes anybody.",
            "Set RAY_AUTH_MODE=token in setup_commands, which all nodes run, by ~/.bashrc.",
        )
    local = document.get("provider", "type") == "local"
    if local and not any(modes.values()):
        yield warning(
            "auth-not-chosen",
            (_HEAD,) if head else ("provider", "type"),
            "RAY_AUTH_MODE is not set",
            "Where ray.init() ever ran on the head's host there is a token, and `ray start --head` then turns "
            "authentication on by itself: workers are turned away (InvalidAuthToken).",
            "Set RAY_AUTH_MODE=token, or =disabled, in setup_commands, which all hosts run, by ~/.bashrc.",
        )
    mounted = [remote for remote in document.mapping("file_mounts") if "auth_token" in remote]
    token = bool(mounted)
    if token and modes["head"] != "token" and (modes["head"] or not local):
        yield warning(
            "auth-not-chosen",
            ("file_mounts", mounted[0]),
            f"nodes are given a token, and RAY_AUTH_MODE is {modes['head'] or 'not set'} for the head",
            "Nobody is asked for the token: whoever reaches the head runs code there."
            if modes["head"]
            else "The head then turns authentication on by itself, and workers do not: they are turned away.",
            "Set RAY_AUTH_MODE=token in setup_commands, which all nodes run, by ~/.bashrc.",
        )
    fetched = "auth_token" in setup + head or "RAY_AUTH_TOKEN" in setup + head
    if modes["head"] == "token" and not token and not fetched:
        yield error(
            "auth-token",
            (_HEAD,),
            "RAY_AUTH_MODE=token, and no node is given the token",
            "`ray start` ends on each node: with token authentication there must be a token.",
            "Run `ray get-auth-token --generate`, and add file_mounts: {~/.ray/auth_token: ~/.ray/auth_token}.",
        )
    wide = re.search(r"--dashboard-host[= ]['\"]?(0\.0\.0\.0|::)", head)
    if wide and modes["head"] != "token":
        index = next(i for i, c in enumerate(document.sequence(_HEAD)) if "--dashboard-host" in str(c))
        yield warning(
            "dashboard-open",
            (_HEAD, index),
            f"the dashboard listens on {wide[1]} without authentication",
            "Whoever reaches port 8265 submits jobs, which are code, with the cluster's rights (CVE-2023-48022).",
            "Leave --dashboard-host out and use `ray dashboard CLUSTER.yaml`, or set RAY_AUTH_MODE=token.",
        )


def _mode(text: str) -> str | None:
    match = re.search(r"RAY_AUTH_MODE=[\"']?([\w-]+)", text)
    return match[1].lower() if match else None  # Ray takes small and large letters


def check_syntax(commands: Iterable[tuple[Path, str]]) -> Iterator[ConfigFinding]:
    """Find commands with a quote or a bracket that does not end, and the like. Without bash here, none."""
    commands = list(commands)
    if not _parse("\n".join(command for _, command in commands)):
        return  # one process for a good file
    for path, command in commands:
        issue = _parse(command)
        if issue:
            yield error(
                "shell-syntax",
                path,
                f"bash cannot read it: {issue}",
                "The command fails on each node, and the node is set up again and again.",
                "Fix the quotes; in YAML, `- >-` and the command on the lines below needs no quotes around it.",
            )


def _parse(command: str) -> str:
    bash = shutil.which("bash")
    if bash is None:
        return ""
    try:
        done = subprocess.run(
            [bash, "-n"], input=command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    first = done.stderr.splitlines()[0] if done.returncode and done.stderr else ""
    return one_line(first.partition(": line ")[2].partition(": ")[2] or first, 120)
