"""`raytf autostop arm`: have a cloud machine of a cluster end itself when no job has run for a while."""

from __future__ import annotations

import getpass
import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml

from raytf.cluster import autostop
from raytf.cluster.autostop import Activity
from raytf.cluster.providers import fallback
from raytf.config.terminal_text import say
from raytf.doctor import local_environment
from raytf.doctor.leftovers import report
from raytf.errors import ConfigError, one_line

#: Variables that the watcher needs to reach Ray and the cloud. None is a secret, since every user can read units; the
#: address of a proxy with a password is left out.
_VARIABLES = re.compile(
    "PATH|RAY_AUTH_MODE|RAY_AUTH_TOKEN_PATH|AWS_(PROFILE|REGION|DEFAULT_REGION|CONFIG_FILE|SHARED_CREDENTIALS_FILE)"
    "|AZURE_(CLIENT|TENANT)_ID|GOOGLE_APPLICATION_CREDENTIALS|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|(https?|no|all)_proxy",
    re.IGNORECASE,
)
#: Seconds for stopping Ray, for finding what is left, and for a timer's attempt to end the cluster.
_STOP_SECONDS, _LOOK_SECONDS, _END_SECONDS = 60.0, 30.0, 240


@dataclass(frozen=True)
class Autostop:
    """Have a cluster on AWS, Azure or Google Cloud end itself, workers and head, when no job has run for a while.

    `arm` starts a timer of systemd on this machine, and on a head a watcher that asks Ray for its jobs. raytf's
    providers do this at each start of a node if the cluster's YAML has `autostop: 15m` below `provider`, and
    `raytf submit --autostop 15m` does it before a job. The watcher runs `watch`, and the timer runs `end`, which ends
    the cluster now unless a job runs.
    """

    action: tyro.conf.Positional[Literal["arm", "watch", "end"]]
    """What to do."""
    after: str = ""
    """How long no job may have run, such as 15m. By default provider.autostop of the cluster."""
    config: str = autostop.HEAD_CONFIG
    """The cluster's YAML on its head."""
    worker: bool = False
    """This machine is a worker: it ends once Ray has not run on it for so long."""


def main(flags: Autostop) -> None:
    """Run the command."""
    config = {} if flags.worker else _read(flags.config)
    period = autostop.seconds_of(flags.after or config.get("provider", {}).get(fallback.AUTOSTOP))
    if flags.action == "arm":
        _arm(flags, config, period)
        return
    from raytf.cluster.autostop_head import HeadJobs

    watcher = Watcher(HeadJobs(autostop.dashboard_of(config)).poll, lambda: end(config), period, time.time)
    if flags.action == "end":
        watcher.end_unless_busy()
    while flags.action == "watch":
        watcher.poll_once()
        time.sleep(autostop.POLL_SECONDS)


class Watcher:
    """Puts the deadline off while a job runs, and ends the cluster when it is near.

    Args:
        poll: returns what the head shows of its jobs.
        end: ends the cluster.
        period: seconds without a job.
        clock: seconds since 1970, as the timer's script reads them.
        file: the one whose modification time is the deadline.
    """

    def __init__(
        self,
        poll: Callable[[], Activity],
        end: Callable[[], None],
        period: float,
        clock: Callable[[], float],
        file: str = autostop.DEADLINE_FILE,
    ):
        self._poll, self._end, self._period, self._clock = poll, end, period, clock
        self._file = Path(file).expanduser()
        self._last: Activity | None = None

    def poll_once(self) -> None:
        """Look at the jobs, and end the cluster if it is time."""
        activity, now = self._poll(), self._clock()
        if activity is not self._last:
            _say(activity.value)
            self._last = activity
        before = self._file.stat().st_mtime if self._file.exists() else now
        deadline = autostop.next_deadline(activity, before, now, self._period)
        if deadline != before:
            set_deadline(self._file, deadline)
        if autostop.is_over(activity, deadline, now):
            _say(f"{activity.value}, for {self._period:.0f} s: ending the cluster")
            self._end()

    def end_unless_busy(self) -> None:
        """End the cluster, whose deadline has passed, unless a job runs."""
        if self._poll() is Activity.BUSY:
            set_deadline(self._file, self._clock() + self._period + autostop.SPARE_SECONDS)
        else:
            self._end()


def set_deadline(file: Path, deadline: float) -> None:
    """Set the time after which the timer ends this machine."""
    file.touch()
    os.utime(file, (deadline, deadline))


def _read(path: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read ({one_line(error, 100)}). Autostop works on the head of a cluster that `ray up` "
            "started on AWS, Azure or Google Cloud. On Kubernetes, set shutdownAfterJobFinishes in a RayJob."
        ) from None
    if not isinstance(config, dict) or fallback.cloud_of(config.get("provider", {})) not in fallback.MODULES.values():
        raise ConfigError(f"{path} is not of a cluster on AWS, Azure or Google Cloud; autostop cannot end another one.")
    return config


def _arm(flags: Autostop, config: Mapping[str, Any], period: float) -> None:
    kind = "worker" if flags.worker else "head"
    file = Path(autostop.DEADLINE_FILE).expanduser()
    variables = {k: v for k, v in os.environ.items() if _VARIABLES.fullmatch(k) and not {"@", "%", '"'} & set(v)}
    own = [sys.executable, "-m", "raytf", "autostop"]
    more = ["--after", f"{period:.0f}s", "--config", str(Path(flags.config).expanduser())]
    user = getpass.getuser()
    off = "systemctl poweroff"
    if kind == "head":
        as_user = ["sudo", "-u", user, "-H", "env", *(f"{name}={value}" for name, value in variables.items())]
        first = shlex.join(["timeout", "-k", "10", str(_END_SECONDS), *as_user, *own, "end", *more])
        # On Azure a machine that is off is paid for: the timer tries again a minute later.
        off = first if fallback.cloud_of(config["provider"]) == "azure" else f"{first} || {off}"
    script = autostop.guard_script(kind, str(file), period, off)
    watcher = [*own, "watch", *more] if kind == "head" else ()
    set_deadline(file, time.time() + period + autostop.SPARE_SECONDS)
    install = autostop.install_script(autostop.unit_files(script, watcher, user, variables))
    try:
        done = subprocess.run(["sudo", "-n", "sh", "-s"], input=install, text=True, capture_output=True, timeout=60)
        problem = one_line(done.stderr, 300) if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = one_line(error, 300)
    if problem:
        raise ConfigError(
            f"The timer of autostop cannot be started ({problem}). It needs systemd, and sudo without a password, as "
            "images of the clouds have them and containers do not."
        )
    _say(f"this machine ends after {period:.0f} s without {'Ray' if flags.worker else 'a job'}")


def end(config: Mapping[str, Any]) -> None:
    """Stop Ray on this head, and end all machines of the cluster."""
    from raytf.cluster.autostop_head import end_cluster

    try:  # or its autoscaler would replace the workers
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _say("`ray stop` does not end; ending the machines")
    module = importlib.import_module(f"raytf.cluster.providers.{fallback.cloud_of(config['provider'])}")
    provider = module.Provider(dict(config["provider"]), config["cluster_name"])
    end_cluster(provider, _say, lambda: _tell_what_is_left(config))


def _tell_what_is_left(config: Mapping[str, Any]) -> None:
    """Write to the log what will be left after the head, for at most some seconds."""

    def inspect() -> None:
        try:
            left = report.find("the cluster", yaml.safe_dump(dict(config)), local_environment.here())
        except Exception as error:
            _say(f"cannot find what is left: {one_line(error, 200)}")
            return
        for item in left.costly:
            _say(f"there is still {item.kind} {item.name} ({item.state}); to remove it: {item.remove}")
        for text in left.unseen:
            _say(f"could not inspect {text}")

    thread = threading.Thread(target=inspect, daemon=True)
    thread.start()
    thread.join(_LOOK_SECONDS)


def _say(message: str) -> None:
    say(f"raytf autostop: {message}", file=sys.stderr)
