"""Unknown flags of `ray start` and `raytf node`: the command fails at once, on each node again and again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytf.doctor.document import CLOUDS
from raytf.doctor.finding import ConfigFinding, Path, error, instead, near, warning

#: Flags of Ray 2.60's `ray start` without their dashes.
OPTIONS = frozenset(
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
#: `raytf node`, also by the name that it had first.
NODE = re.compile(r"\braytf (?:node|watch)\b")
#: Its flags.
NODE_OPTIONS = frozenset(("follow-warnings", "grace-seconds", "margin-seconds", "notice-url", "notices"))
_NOTICES = ("auto", "off", *CLOUDS)
#: Characters at which a shell's command ends; the rest belongs to another one.
_END = re.compile(r"[;&|<>)]")


def check(path: Path, command: str, provider: str) -> Iterator[ConfigFinding]:
    """Find flags of one command.

    Args:
        path: where it is.
        command: for the shell.
        provider: of the cluster: the cloud that it is on.
    """
    for match in re.finditer(r"\bray start\b", command):
        yield from _flags(path, "ray start", _words(command[match.end() :]), OPTIONS)
    for match in NODE.finditer(command):
        own, _, _ = f"{command[match.end() :]} ".partition(" -- ")
        words = [word.replace("_", "-") for word in _words(own)]
        yield from _flags(path, "raytf node", words, NODE_OPTIONS)
        notices = re.search(r"--notices[= ](\w+)", " ".join(words))
        if notices and notices[1] not in _NOTICES:
            yield error(
                "start-flag",
                path,
                f"--notices {notices[1]} of `raytf node`{near(notices[1], _NOTICES)}",
                "`raytf node` refuses it, and Ray is not started: workers come up, and never join.",
                f"Write one of {', '.join(_NOTICES)}.",
            )
        elif notices and notices[1] in CLOUDS and provider in (*CLOUDS, "local") and notices[1] != provider:
            yield warning(
                "start-flag",
                path,
                f"--notices {notices[1]} on provider {provider}",
                "It asks a service that is not there: a notice of this cloud is not seen, and the node dies at work.",
                f"Write --notices {'off' if provider == 'local' else provider}.",
            )


def _words(text: str) -> list[str]:
    """Return the words of one command without those in quotes, which may hold anything."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    end = _END.search(bare)
    return (bare[: end.start()] if end else bare).split()


def _flags(path: Path, command: str, words: list[str], known: frozenset[str]) -> Iterator[ConfigFinding]:
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name and name not in {*known, "help", "no-follow-warnings"}:
            yield error(
                "start-flag",
                path,
                f"`{command}` has no flag --{name}",
                "The command ends at once, on each node, again and again.",
                instead(name, known, "Its flags are"),
            )
