"""Checks the shell commands of a cluster YAML that set up nodes and start Ray, and their flags."""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator

from raytf.doctor.document import CLOUDS, Document
from raytf.doctor.finding import ConfigFinding, Path, error, near, warning
from raytf.errors import one_line

_SETUP = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
_HEAD, _WORKER = "head_start_ray_commands", "worker_start_ray_commands"
_START_WORKER = "`ray start --address=$RAY_HEAD_IP:6379`"
_AUTH_MODES = ("token", "disabled")
_SET_TOKEN = "Write RAY_AUTH_MODE=token to ~/.bashrc in setup_commands, which all nodes run."
_SECONDS = 5
#: Flags of Ray 2.60's `ray start` without their dashes.
START_OPTIONS = frozenset(
    {
        *("address", "autoscaling-config", "block", "cgroup-path", "dashboard-agent-grpc-port"),
        *("dashboard-agent-listen-port", "dashboard-host", "dashboard-port", "disable-usage-stats"),
        *("enable-object-reconstruction", "enable-resource-isolation", "head", "include-dashboard"),
        *("include-log-monitor", "labels", "labels-file", "log-color", "log-style", "max-worker-port", "memory"),
        *("metrics-export-port", "min-worker-port", "no-monitor", "no-redirect-output", "node-ip-address"),
        *("node-manager-port", "node-name", "num-cpus", "num-gpus", "object-manager-port"),
        *("object-spilling-directory", "object-store-memory", "plasma-directory", "port", "proxy-server-url"),
        *("ray-client-server-port", "ray-debugger-external", "redis-password", "redis-shard-ports"),
        *("redis-username", "resources", "runtime-env-agent-port", "system-config", "system-reserved-cpu"),
        *("system-reserved-memory", "temp-dir", "tracing-startup-hook", "verbose", "worker-port-list"),
    }
)
#: Flags that `ray start` had before Ray 1.0 -> their names since then.
_RENAMED = {
    "redis-address": "address",
    "redis-port": "port",
    "webui-host": "dashboard-host",
    "include-webui": "include-dashboard",
}
#: `raytf node`, and its former name `raytf watch`.
_NODE = re.compile(r"\braytf (?:node|watch)\b")
NODE_OPTIONS = frozenset(("follow-warnings", "grace-seconds", "margin-seconds", "notice-url", "notices"))
_NOTICES = ("auto", "off", *CLOUDS)
#: A setting, with nothing that uses it in the same shell.
_ALONE = re.compile(
    r"\s*(export(\s+\w+=[^\s;&|]*)+|cd\s+[^\s;&|]+|conda\s+activate\s+\S+|source\s+\S*activate|ulimit\s+[^;&|]+)\s*"
)
#: Characters that end a command in a shell.
_END = re.compile(r"[;&|<>)]")


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find commands that wait for an answer, lose their settings, or start no cluster."""
    setup, starts = list(setup_commands(document)), list(document.commands(_HEAD, _WORKER))
    for path, command in setup:
        yield from _setup(path, command)
    yield from check_syntax([*setup, *starts])
    for path, command in starts:
        yield from _lost_setting(path, command)
        yield from _flags_of(path, command, str(document.get("provider", "type")))
    yield from _head(document)
    yield from _worker(document)
    for path, command in starts:
        yield from _stays(path, command)
    yield from _auth(document, setup, starts)


def setup_commands(document: Document) -> Iterator[tuple[Path, str]]:
    """Yield the path and text of each command that prepares a node, including those of a single node type."""
    yield from document.commands(*_SETUP)
    for name in document.mapping("available_node_types"):
        own = ("initialization_commands", "worker_setup_commands")
        yield from document.commands(*own, below=("available_node_types", name))


def _setup(path: Path, command: str) -> Iterator[ConfigFinding]:
    asks = re.search(r"\b(apt-get|apt|yum|dnf|conda)\s+(-\S+\s+)*(install|upgrade|create|remove)\b", command)
    if asks and not re.search(r"\s(-y|-yq|-qy|-qqy|-yqq|--yes|--assume-yes)\b", command):
        why = "Nobody answers on the node: `ray up` exits, or waits forever."
        yield error("asks-for-answer", path, f"`{asks[0]} ...` waits for confirmation", why, "Add -y.")
    yield from _lost_setting(path, command)
    if re.search(r"(^|[;&|]\s*|sudo\s+)(reboot|shutdown|poweroff)\b", command):
        why = "The connection breaks, and Ray reports that the setup failed."
        yield error("reboot", path, "the command restarts the node", why, "Do steps that need a restart in the image.")


def _lost_setting(path: Path, command: str) -> Iterator[ConfigFinding]:
    """Find a setting in a line of its own. A setup that needs it fails; Ray starts without it."""
    if not _ALONE.fullmatch(command):
        return
    setting, is_start = command.strip(), path[0] in (_HEAD, _WORKER)
    what = f"`{setting}` does not affect later commands"
    why = "Ray runs each command in a new shell, which does not have the settings of this one."
    echo = f"echo {shlex.quote(setting)} >> ~/.bashrc"
    fix = f"Join it by && with the command that needs it, or run {echo} in setup_commands."
    yield (warning if is_start or setting.startswith("ulimit") else error)("lost-setting", path, what, why, fix)


def _flags_of(path: Path, command: str, provider: str) -> Iterator[ConfigFinding]:
    """Find unknown flags. A command with one fails at once on each node, again and again."""
    for match in re.finditer(r"\bray start\b", command):
        yield from _unknown_flags(path, "ray start", _words(command[match.end() :]), START_OPTIONS)
    for match in _NODE.finditer(command):
        own, _, _ = f"{command[match.end() :]} ".partition(" -- ")
        words = [word.replace("_", "-") for word in _words(own)]
        yield from _unknown_flags(path, "raytf node", words, NODE_OPTIONS)
        notices = re.search(r"--notices[= ](\w+)", " ".join(words))
        if notices and notices[1] not in _NOTICES:
            what = f"--notices {notices[1]} of `raytf node`{near(notices[1], _NOTICES)}"
            why = "`raytf node` refuses it and does not start Ray: workers start, but never join."
            yield error("start-flag", path, what, why, f"Write one of {', '.join(_NOTICES)}.")
        elif notices and notices[1] in CLOUDS and provider in (*CLOUDS, "local") and notices[1] != provider:
            what = f"--notices {notices[1]} on provider {provider}"
            why = "It polls a service that does not exist there: the node misses its notices and stops during work."
            yield warning(
                "start-flag", path, what, why, f"Write --notices {'off' if provider == 'local' else provider}."
            )


def _words(text: str) -> list[str]:
    """Return the words of the first command in a text, without words in quotes, which may contain anything."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    end = _END.search(bare)
    return (bare[: end.start()] if end else bare).split()


def _unknown_flags(path: Path, command: str, words: list[str], known: frozenset[str]) -> Iterator[ConfigFinding]:
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name and name not in {*known, "help", "no-follow-warnings"}:
            why = "The command fails at once, on each node, again and again."
            nearest = difflib.get_close_matches(_RENAMED.get(name, name), known, n=3, cutoff=0.6)
            names = " or ".join(f"--{flag}" for flag in nearest[: 1 if name in _RENAMED else 3])
            fix = f"Write {names}, or delete it." if names else f"Delete it; `{command} --help` lists the flags."
            yield error("start-flag", path, f"`{command}` has no flag --{name}", why, fix)


def _head(document: Document) -> Iterator[ConfigFinding]:
    if _HEAD not in document.mapping():
        return
    commands = [c for c in document.sequence(_HEAD) if isinstance(c, str)]
    starts = [(i, c) for i, c in enumerate(commands) if re.search(r"\bray start\b", c)]
    if not starts:
        fix = "Add `ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml`."
        yield error("head-start", (_HEAD,), "no command starts Ray", "The head runs without Ray.", fix)
        return
    path, start = (_HEAD, starts[-1][0]), starts[-1][1]
    if "--head" not in start:
        why = "It looks for another head and fails."
        yield error("head-start", path, "`ray start` of the head lacks --head", why, "Add --head.")
    if "--autoscaling-config" not in start:
        is_local = document.get("provider", "type") == "local"
        why = "Workers are never set up, which is the head's job." if is_local else "The head never starts a worker."
        fix = "Add --autoscaling-config=~/ray_bootstrap_config.yaml."
        yield error("no-autoscaler", path, "`ray start --head` lacks --autoscaling-config", why, fix)
    if not any(re.search(r"\bray stop\b", c) for c in commands):
        what, why = "no command runs `ray stop` first", "A second `ray up` finds the port in use."
        yield warning("no-ray-stop", (_HEAD,), what, why, "Put `ray stop` before `ray start`.")
    everything = " ".join(commands)
    if "RAY_gcs_storage=rocksdb" in everything and "RAY_gcs_storage_path=" not in everything:
        what, why = "RAY_gcs_storage=rocksdb needs RAY_gcs_storage_path", "`ray start --head` exits."
        yield error("gcs-storage", path, what, why, "Add RAY_gcs_storage_path=$HOME/raytf-gcs, on a persistent disk.")
    for flag in re.findall(r"(?<=\s)-[a-z]\w+=", start):
        yield error("one-dash", path, f"{flag} has only one dash", "`ray start` refuses it.", f"Write -{flag}.")


def _worker(document: Document) -> Iterator[ConfigFinding]:
    if _WORKER not in document.mapping():
        return
    head = " ".join(c for c in document.sequence(_HEAD) if isinstance(c, str))
    port = re.search(r"--port[= ](\d+)", head)
    head_port = port[1] if port else "6379"
    starts = [(i, c) for i, c in enumerate(document.sequence(_WORKER)) if isinstance(c, str) and "ray start" in c]
    if not starts:
        why, fix = "Workers start, but never join.", f"Add {_START_WORKER}."
        yield error("worker-start", (_WORKER,), "no command starts Ray", why, fix)
        return
    path, start = (_WORKER, starts[-1][0]), starts[-1][1]
    address = re.search(r"--address[= ]['\"]?([^\s'\"]+)", start)
    if "--head" in start:
        why = "Each worker starts its own cluster."
        yield error("worker-start", path, "a worker starts with --head", why, f"Write {_START_WORKER}.")
    elif address is None and "--redis-address" in start:
        return  # a finding reports this flag
    elif address is None:
        what, why = "`ray start` of the workers lacks --address", "They cannot find the head."
        yield error("worker-start", path, what, why, "Add --address=$RAY_HEAD_IP:6379.")
    elif address[1].rsplit(":", 1)[-1] != head_port and ":" in address[1]:
        what = f"workers look for the head at port {address[1].rsplit(':', 1)[-1]}, but it listens at {head_port}"
        why = "They never join; Ray starts and stops them again and again."
        yield error("port-mismatch", path, what, why, f"Write --address=$RAY_HEAD_IP:{head_port}.")
    elif "$RAY_HEAD_IP" not in address[1] and "${RAY_HEAD_IP}" not in address[1]:
        what = f"the head's address {address[1]} is fixed"
        fix = "Write --address=$RAY_HEAD_IP:6379; Ray sets RAY_HEAD_IP."
        yield warning("fixed-head-address", path, what, "A new head has another address.", fix)


def _stays(path: Path, command: str) -> Iterator[ConfigFinding]:
    """Find a `ray start` that blocks `ray up`, or that does not block `raytf node`."""
    if not re.search(r"\bray start\b", command):
        return
    if _NODE.search(command) and "--block" not in command:
        what = "`raytf node` runs a `ray start` without --block"
        why = "Such a `ray start` exits at once, and `raytf node` with it: nothing watches the node."
        yield error("watch-without-block", path, what, why, "Add --block after `ray start`.")
    elif "--block" in command and not re.search(r"&\s*\)?\s*$", command):
        fix = "Delete --block, or start it in the background: setsid nohup ... > LOG 2>&1 < /dev/null &"
        what, why = "`ray start --block` stays in the foreground", "`ray up` waits for it forever."
        yield error("start-never-ends", path, what, why, fix)


def _auth(document: Document, setup: list[tuple[Path, str]], starts: list[tuple[Path, str]]) -> Iterator[ConfigFinding]:
    head, worker = (" ".join(str(c) for c in document.sequence(key)) for key in (_HEAD, _WORKER))
    prepared = " ".join(command for _, command in setup)
    of_head, of_workers = auth_mode_of_head(document), _mode(worker) or _mode(prepared)
    for path, command in [*setup, *starts]:
        mode = _mode(command)
        if mode not in (None, *_AUTH_MODES):
            what = f"RAY_AUTH_MODE is {mode!r}{near(mode, _AUTH_MODES)}"
            why = "Ray silently treats any other value as `disabled`: the cluster accepts jobs from anyone."
            yield error("auth-mode", path, what, why, "Write RAY_AUTH_MODE=token.")
            return
    if head and worker and of_head != of_workers:
        what = f"RAY_AUTH_MODE: {of_head or 'not set'} for the head, {of_workers or 'not set'} for workers"
        why = "Workers are rejected (InvalidAuthToken), or the head accepts anyone."
        yield error("auth-mode", (_HEAD,), what, why, _SET_TOKEN)
    is_local = document.get("provider", "type") == "local"
    if is_local and not (of_head or of_workers):
        yield warning(
            "auth-not-chosen",
            (_HEAD,) if head else ("provider", "type"),
            "RAY_AUTH_MODE is not set",
            "If ray.init() ever ran on the head's host, there is a token, and `ray start --head` then turns "
            "authentication on by itself: workers are rejected (InvalidAuthToken).",
            "Write RAY_AUTH_MODE=token, or =disabled, to ~/.bashrc in setup_commands, which all hosts run.",
        )
    yield from _token(document, of_head, is_local, prepared + head)
    wide = re.search(r"--dashboard-host[= ]['\"]?(0\.0\.0\.0|::)", head)
    if wide and of_head != "token":
        index = next(i for i, c in enumerate(document.sequence(_HEAD)) if "--dashboard-host" in str(c))
        what = f"the dashboard listens on {wide[1]} without authentication"
        why = "Anyone who reaches port 8265 can submit jobs, which are code with the cluster's rights (CVE-2023-48022)."
        fix = "Delete --dashboard-host and use `ray dashboard CLUSTER.yaml`, or set RAY_AUTH_MODE=token."
        yield warning("dashboard-open", (_HEAD, index), what, why, fix)


def _token(document: Document, mode: str | None, is_local: bool, commands: str) -> Iterator[ConfigFinding]:
    """Find a token that the head does not require, and a head that requires a token that the nodes lack."""
    mounted = [remote for remote in document.mapping("file_mounts") if "auth_token" in remote]
    if mounted and mode != "token" and (mode or not is_local):
        what = f"nodes get a token, and RAY_AUTH_MODE is {mode or 'not set'} for the head"
        why = "The head then turns authentication on by itself, but workers do not, and are rejected."
        if mode:
            why = "The head does not require the token: anyone who reaches the head can run code there."
        yield warning("auth-not-chosen", ("file_mounts", mounted[0]), what, why, _SET_TOKEN)
    if mode == "token" and not mounted and "auth_token" not in commands and "RAY_AUTH_TOKEN" not in commands:
        what, why = "RAY_AUTH_MODE=token, but no node gets the token", "`ray start` exits on each node."
        fix = "Run `ray get-auth-token --generate`, and add file_mounts: {~/.ray/auth_token: ~/.ray/auth_token}."
        yield error("auth-token", (_HEAD,), what, why, fix)


def auth_mode_of_head(document: Document) -> str | None:
    """Return the RAY_AUTH_MODE that a cluster YAML sets on the head, or None if it sets none."""
    head = " ".join(str(command) for command in document.sequence(_HEAD))
    return _mode(head) or _mode(" ".join(command for _, command in setup_commands(document)))


def _mode(text: str) -> str | None:
    match = re.search(r"RAY_AUTH_MODE=[\"']?([\w-]+)", text)
    return match[1].lower() if match else None  # Ray ignores case


def check_syntax(commands: Iterable[tuple[Path, str]]) -> Iterator[ConfigFinding]:
    """Find commands that bash cannot parse, for example because of an open quote. Find none if bash is missing."""
    commands = list(commands)
    if not _parse("\n".join(command for _, command in commands)):
        return  # one process for a good file
    for path, command in commands:
        issue = _parse(command)
        if issue:
            why = "The command fails on each node, and the node is set up again and again."
            fix = "Fix the quotes; in YAML, `- >-` and the command on the lines below needs no quotes around it."
            yield error("shell-syntax", path, f"bash cannot parse it: {issue}", why, fix)


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
