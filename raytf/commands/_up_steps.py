"""The steps of `raytf up` and `raytf attach`: their order, their command lines, and what follows from each exit code.

Nothing here has an effect; `_up_runner.py` runs the steps.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from raytf.cluster.autostop import seconds_of
from raytf.cluster.providers.fallback import AUTOSTOP, MODULES, cloud_of
from raytf.config import exit_codes
from raytf.doctor.check import job_fit, offline, shell_commands
from raytf.doctor.check.kuberay import is_manifest
from raytf.doctor.document import Platform, parse, place_of
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError

INTERRUPTED = 130
_KUBERNETES = "Start it with `kubectl apply -f {0}`; docs/clusters/kubernetes.md shows how."


class Part(StrEnum):
    """A step's place in the sequence."""

    TOKEN = "token"
    CHECK = "check"
    PROBE = "probe"
    CLUSTER = "ray up"
    ARM = "autostop"
    TUNNEL = "tunnel"
    FOLLOW = "follow"
    SUMMARY = "summary"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        argv: starts with `ray` or `raytf`.
        needs_token: run it with RAY_AUTH_MODE=token.
    """

    part: Part
    argv: tuple[str, ...]
    needs_token: bool = False

    @property
    def command(self) -> str:
        """The command for messages."""
        return f"{'RAY_AUTH_MODE=token ' if self.needs_token else ''}{shlex.join(self.argv)}"

    @property
    def line(self) -> str:
        """The command as a user types it in a shell."""
        rest = {Part.TOKEN: " > /dev/null", Part.PROBE: " > /dev/null 2>&1", Part.TUNNEL: " &"}.get(self.part, "")
        return f"{self.command}{rest}"


@dataclass(frozen=True)
class ClusterFile:
    """What the steps need to know of a cluster's YAML.

    Attributes:
        path: as the user typed it.
        has_token: whether its head asks for a token.
        is_filled_in: whether no value is still a placeholder.
        bill: what it costs, as a sentence.
        autostop: the time without a job after which it ends by itself, such as 15m; empty if it does not.
    """

    path: str
    has_token: bool = False
    is_filled_in: bool = True
    bill: str = ""
    autostop: str = ""


@dataclass(frozen=True)
class Job:
    """The job of `raytf up`.

    Attributes:
        summary: the command that shows the result, on the head; empty for none.
    """

    command: str
    working_dir: str = "."
    env: tuple[str, ...] = ()
    summary: str = ""


@dataclass(frozen=True)
class Outcome:
    """What follows from a step.

    Attributes:
        code: the exit code, if this was the last step; None to continue.
        lines: for the user.
    """

    code: int | None = None
    lines: tuple[str, ...] = ()


def cluster_file(path: str, text: str, here: Surroundings, autostop: str = "") -> ClusterFile:
    """Read a cluster's YAML.

    Raises:
        ConfigError: it contains manifests of Kubernetes.
    """
    documents, _ = parse(text)
    if any(map(is_manifest, documents)):
        how = _KUBERNETES.format(path)
        raise ConfigError(f"{path} contains manifests of Kubernetes; expected a cluster YAML of `ray up`. {how}")
    if not documents:
        return ClusterFile(path)  # `raytf check` reports what is wrong with it
    document, report = documents[0], offline.check(text, here)
    if autostop and cloud_of(document.mapping("provider")) not in MODULES.values():
        raise ConfigError(
            f"--autostop {autostop}: {path} is not of a cluster on AWS, Azure or Google Cloud, and autostop cannot end "
            "another one. Leave the flag out."
        )
    cost = report.cost
    if cost is not None:
        bill = f"It costs {cost.per_hour} (list prices of {cost.prices_of})."
    elif place_of(document) is Platform.HOSTS:
        bill = "These are hosts of your own, for which raytf knows no price."
    else:
        bill = "Its price is not known."
    return ClusterFile(
        path,
        shell_commands.auth_mode_of_head(document) == "token",
        not any(finding.code == "placeholder" for finding in report.findings),
        bill,
        autostop or str(document.get("provider", AUTOSTOP) or ""),
    )


def first_steps(cluster: ClusterFile, job: Job) -> list[Step]:
    """Return the steps of `raytf up` that start nothing. The last one fails if Ray does not run on the head."""
    folder = ("--working-dir", job.working_dir) if job.working_dir else ()
    return [
        *([Step(Part.TOKEN, ("ray", "get-auth-token", "--generate"))] if cluster.has_token else []),
        Step(Part.CHECK, ("raytf", "check", cluster.path, "--job", job.command, *folder)),
        # Without a token on the head `ray status` fails, though Ray runs.
        Step(Part.PROBE, ("ray", "exec", cluster.path, "ray status || pgrep -x gcs_server")),
    ]


def further_steps(cluster: ClusterFile, job: Job, port: int, is_up: bool) -> list[Step]:
    """Return the other steps of `raytf up`.

    Args:
        port: of this machine, for the tunnel.
        is_up: whether Ray runs on the head already. `ray up` would restart it, and so end all jobs.
    """
    env = tuple(word for pair in job.env for word in ("--env", pair))
    flags = ("--working-dir", job.working_dir, *env)
    return [
        Step(Part.CLUSTER, ("ray", "up", "-y", *(("--no-restart",) if is_up else ()), cluster.path)),
        *_arm(cluster),
        tunnel(cluster, port),
        Step(Part.FOLLOW, ("raytf", "submit", address_at(port), *flags, *_as_typed(job.command)), cluster.has_token),
        *summary(cluster, job.summary),
    ]


def _arm(cluster: ClusterFile) -> list[Step]:
    """Return the step that starts autostop, which `ray up --no-restart` does not do; none without autostop."""
    if not cluster.autostop:
        return []
    command = f"raytf autostop arm --after {seconds_of(cluster.autostop):.0f}s"
    return [Step(Part.ARM, ("ray", "exec", cluster.path, command))]


def _as_typed(command: str) -> tuple[str, ...]:
    """Return the arguments of `raytf submit` that stand for a command: words after `--` if it is only words."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    return ("--", *words) if shlex.join(words) == command else ("--command", command)


def tunnel(cluster: ClusterFile, port: int) -> Step:
    """Return the step that forwards a port of this machine to the head's job server."""
    return Step(Part.TUNNEL, ("ray", "dashboard", cluster.path, "--port", str(port)))


def summary(cluster: ClusterFile, command: str) -> list[Step]:
    """Return the step that shows the result, on the head, which reaches the storage; none for no command."""
    return [Step(Part.SUMMARY, ("ray", "exec", cluster.path, command))] if command else []


def summary_command(command: str, run: str) -> str:
    """Return the command that shows the result of a job whose run has this name; empty if it names no storage."""
    words = command.replace("=", " ").split()
    try:
        storage = job_fit.parse(command).storage
    except ConfigError:  # a flag has a value that the job refuses
        return ""
    if "--storage" not in words:
        return ""
    base, mark, options = storage.partition("?") if "://" in storage else (storage, "", "")
    shown = ("runs", storage) if "--new" in words else ("show", f"{base.rstrip('/')}/{run}{mark}{options}")
    return shlex.join(("raytf", *shown))


def address_at(port: int) -> str:
    """Return the address of the head's job server at this machine's end of the tunnel."""
    return f"http://127.0.0.1:{port}"


def after(step: Step, code: int, is_interrupted: bool, cluster: ClusterFile) -> Outcome:
    """Decide what follows from a step's exit code.

    Args:
        is_interrupted: whether the user pressed Ctrl-C meanwhile, or the process was told to stop.
    """
    refused = exit_codes.REFUSED.code
    has_ended = step.part is Part.FOLLOW and code in (0, exit_codes.FAILED.code, refused)  # before Ctrl-C reached it
    if (is_interrupted and not has_ended) or code == INTERRUPTED:
        return _interrupted(step, cluster)
    is_fine = code == 0 or step.part is Part.PROBE or (step.part is Part.CHECK and code == 1)  # warnings
    if step.part is Part.CHECK and is_fine and not cluster.is_filled_in:
        first = f"Write your own values into {cluster.path} first; `raytf check` lists them above."
        return Outcome(refused, (first, *running(step.part, cluster)))
    if is_fine:
        return Outcome()
    failed = f"This step failed (exit code {code}): {step.command}"
    if step.part is Part.SUMMARY:
        return Outcome(None, (failed, "The job has finished all the same."))
    is_refused = step.part in (Part.CHECK, Part.FOLLOW) and code == refused
    return Outcome(refused if is_refused else exit_codes.FAILED.code, (failed, *running(step.part, cluster)))


def _interrupted(step: Step, cluster: ClusterFile) -> Outcome:
    first = f"Interrupted during: {step.command}"
    if step.part is Part.FOLLOW:
        first = f"Detached. To follow the newest job again: raytf attach {shlex.quote(cluster.path)}"
    return Outcome(INTERRUPTED, (first, *running(step.part, cluster)))


def running(part: Part, cluster: ClusterFile) -> tuple[str, ...]:
    """Return what runs after a step, what it costs and how to end it."""
    if part in (Part.TOKEN, Part.CHECK, Part.PROBE):
        return ("This command has started nothing.",)
    path = shlex.quote(cluster.path)
    end = f"ray down -y {path}; raytf down-check {path}"
    if part is Part.CLUSTER:
        what = f"A part of the cluster may run. {cluster.bill}"
        return (what, f"To try again, repeat the same command. To end it: {end}")
    if cluster.autostop and part is not Part.ARM:
        until = f"It ends by itself {cluster.autostop} after its last job. To end it now: {end}"
    else:
        until = f"It runs until you end it: {end}"
    return (f"The cluster runs. {cluster.bill}", until)


def only_path(paths: Sequence[str], usage: str) -> str:
    """Return the one path of a command line.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if len(paths) != 1:
        problem = "No cluster YAML given" if not paths else f"{len(paths)} files given, expected one"
        raise ConfigError(f"{problem}. Usage: {usage}")
    return paths[0]
