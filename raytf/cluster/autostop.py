"""Autostop: when a cluster without a job ends, and the timer on its machines that ends them without raytf.

The state is one number, the deadline: it is the modification time of a file, which can be set on a full disk and which
outlives the processes that read it. A running job puts the deadline off. The watcher on the head ends the cluster
`SPARE_SECONDS` before the deadline. If there is no watcher any more, the machine ends after the deadline, since systemd
runs `guard_script` on it each minute.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from raytf.cluster.providers.fallback import AUTOSTOP
from raytf.errors import ConfigError

#: Where `ray up` puts the cluster's config on the head, and the file whose modification time is the deadline.
HEAD_CONFIG, DEADLINE_FILE = "~/ray_bootstrap_config.yaml", "~/.raytf-autostop"
#: A run that is submitted again waits for up to five minutes, and then needs time to start.
LEAST_SECONDS = 420.0
#: Seconds by which the timer of a machine is later than the watcher, and between two looks of the watcher.
SPARE_SECONDS, POLL_SECONDS = 120.0, 30.0
_UNITS = {"s": 1, "m": 60, "h": 3600}
#: Part of the title of processes that show that a job may run: of the actor in which Ray runs a submitted job, on the
#: head, and of Ray's own process on a worker. Brackets keep pgrep from finding the shell around it.
_SIGNS = {"head": "[r]ay::JobSupervisor", "worker": "[r]aylet/raylet"}


class Activity(StrEnum):
    """What the head shows of its jobs."""

    BUSY = "a job runs"
    IDLE = "no job runs"
    GONE = "Ray has stopped"
    UNKNOWN = "Ray runs, and its job server does not answer"


def seconds_of(duration: object) -> float:
    """Return the seconds of a duration such as 15m, 900s or 1h30m.

    Raises:
        ConfigError: it is none, or too short.
    """
    text = str(duration)
    if not re.fullmatch(r"(\d{1,4}h)?(\d{1,5}m)?(\d{1,7}s)?", text) or not text:
        raise ConfigError(f"{AUTOSTOP} is {duration!r}. Write a number and s, m or h, such as 15m.")
    seconds = float(sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([hms])", text)))
    if seconds < LEAST_SECONDS:
        raise ConfigError(
            f"{AUTOSTOP} is {duration!r}. Write {LEAST_SECONDS / 60:g}m or more: a job needs time to start."
        )
    return seconds


def with_timer(command: str, after: str) -> str:
    """Return a command that first starts the timer of the head, where Ray runs the commands of jobs."""
    return f"raytf autostop arm --after {seconds_of(after):.0f}s && {{\n{command}\n}}" if after else command


def without_timer(command: str) -> str:
    """Return the command that `with_timer` was called with."""
    match = re.fullmatch(r"raytf autostop arm --after \d+s && \{\n(.*)\n\}", command, re.DOTALL)
    return match[1] if match else command


def next_deadline(activity: Activity, deadline: float, now: float, period: float) -> float:
    """Return the deadline after a look at the jobs. Only a job puts it off."""
    return now + period + SPARE_SECONDS if activity is Activity.BUSY else deadline


def is_over(activity: Activity, deadline: float, now: float) -> bool:
    """Return whether the watcher ends the cluster. It never does so while a job may run."""
    return activity in (Activity.IDLE, Activity.GONE) and now >= deadline - SPARE_SECONDS


def dashboard_of(config: Mapping[str, Any]) -> str:
    """Return the address of the job server on the head of a cluster."""
    start = " ".join(map(str, config.get("head_start_ray_commands") or ()))
    port = re.search(r"--dashboard-port[= ](\d+)", start)
    return f"http://127.0.0.1:{port[1] if port else 8265}"


def with_start_commands(config: dict[str, Any]) -> dict[str, Any]:
    """Return a cluster's config in which each machine starts its timer, if the provider has a period."""
    period = config["provider"].get(AUTOSTOP)
    if period is None:
        return config
    seconds = f"{math.ceil(seconds_of(period))}s"
    more = {"head": f"raytf autostop arm --after {seconds}", "worker": f"raytf autostop arm --worker --after {seconds}"}
    for kind, command in more.items():
        commands = list(config.get(f"{kind}_start_ray_commands") or ())
        config[f"{kind}_start_ray_commands"] = [*(c for c in commands if "raytf autostop arm" not in c), command]
    return config


def guard_script(kind: str, deadline_file: str, period: float, end: str) -> str:
    """Return the shell script that systemd runs each minute, which needs neither Python nor a cloud to see a job.

    Args:
        kind: of the node, head or worker.
        end: the command that ends the machine.
    """
    file = shlex.quote(deadline_file)
    return "\n".join(
        [
            "# Written by `raytf autostop arm`. Ends this machine after the modification time of the file below.",
            "now=$(date +%s)",
            f"if pgrep -f '{_SIGNS[kind]}' > /dev/null; then",
            f"    touch -d @$((now + {period + SPARE_SECONDS:.0f})) {file}",
            "fi",
            # A machine that was stopped has an old deadline when it starts again, and sets up Ray first.
            f"ready=$((now - $(cut -d. -f1 /proc/uptime) + {period + SPARE_SECONDS:.0f}))",
            f'if [ "$now" -lt "$ready" ] || [ "$now" -lt "$(stat -c %Y {file} || echo 0)" ]; then exit 0; fi',
            end,
            "",
        ]
    )


def unit_files(
    script: str, watcher: Sequence[str] = (), user: str = "", variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the files of a machine's timer, and of a watcher that systemd starts again whenever it dies.

    Args:
        script: of the guard.
        watcher: its command, on a head.
        user: who runs it, with these variables.
    """
    files = {
        "/etc/raytf-autostop.sh": script,
        "/etc/systemd/system/raytf-autostop.service": _unit(
            Service={
                "Type": "oneshot",
                "ExecStart": "/bin/sh /etc/raytf-autostop.sh",
                "StandardOutput": "journal+console",
            }
        ),
        "/etc/systemd/system/raytf-autostop.timer": _unit(
            Timer={"OnCalendar": "minutely", "AccuracySec": "1s"}, Install={"WantedBy": "timers.target"}
        ),
    }
    if watcher:
        environment = " ".join(f'"{name}={value}"' for name, value in sorted((variables or {}).items()))
        files["/etc/systemd/system/raytf-autostop-watch.service"] = _unit(
            Unit={"StartLimitIntervalSec": "0"},
            Service={
                "User": user,
                "Environment": environment,
                "ExecStart": shlex.join(watcher),
                "Restart": "always",
                "RestartSec": "10",
                "OOMScoreAdjust": "-500",
            },
        )
    return files


def _unit(**sections: Mapping[str, str]) -> str:
    lines = ["# Written by `raytf autostop arm`."]
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key}={value}" for key, value in values.items())]
    return "\n".join([*lines, ""])


def install_script(files: Mapping[str, str]) -> str:
    """Return a shell script for root that writes files and starts the units in them.

    After a kernel panic the machine boots again, and its timer runs: otherwise nothing on it could end it.
    """
    lines = ["set -e"]
    for path, text in files.items():
        # In one step, since the timer may be reading the old file.
        lines += [f"cat > {path}.new << 'END-OF-RAYTF'", text.rstrip("\n"), "END-OF-RAYTF", f"mv {path}.new {path}"]
    lines += ["systemctl daemon-reload", "systemctl enable --quiet --now raytf-autostop.timer"]
    if any(path.endswith("-watch.service") for path in files):
        lines.append("systemctl restart raytf-autostop-watch.service")
    return "\n".join([*lines, "sysctl -q -w kernel.panic=10 || true", ""])
