"""`raytf up CLUSTER.yaml -- COMMAND ...`: start a cluster, and run a job on it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from raytf.cluster import autostop
from raytf.commands import _up_runner as runner
from raytf.commands import _up_steps as steps
from raytf.commands import submit
from raytf.commands._up_steps import Part
from raytf.config.setting import Rest
from raytf.doctor.check import job_fit
from raytf.errors import ConfigError

_USAGE = "raytf up cluster.yaml -- python job.py --storage s3://bucket/runs"


@dataclass(frozen=True)
class Up:
    """Check a cluster's YAML, start the cluster, run a job on it and show the result:
    raytf up cluster.yaml -- python job.py --run a --storage s3://bucket/runs

    Each command that it runs is printed first, and can be typed alone: `ray get-auth-token`, `raytf check`, `ray up`,
    `ray dashboard`, `raytf submit`, `raytf show`. Ctrl-C leaves the job running; `raytf attach` follows it again. The
    cluster runs until you end it, unless it has autostop. The exit codes are those of `raytf submit`.
    """  # noqa: D415

    file: tyro.conf.Positional[tuple[str, ...]] = ()
    """The cluster's YAML for `ray up`."""
    command: Annotated[str, Rest("-- COMMAND ...")] = ""
    """What to run, as one text for a shell; or give it after `--`."""
    working_dir: str = "."
    """A folder that is packed once and sent with the job; '' for none."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for the job and its workers; can be repeated."""
    autostop: str = ""
    """End the cluster after it has had no job for so long, such as 15m."""


def main(flags: Up) -> None:
    """Run the command; exits with its code."""
    path = steps.only_path(flags.file, _USAGE)
    if not flags.command.strip():
        raise ConfigError(f"No command given. Usage: {_USAGE}")
    job_fit.parse(flags.command)  # refuses wrong flags here, before anything is started
    if flags.autostop:
        autostop.seconds_of(flags.autostop)
    problem = submit.mistake(submit.Submit(("here",), flags.command))
    if problem:
        raise ConfigError(f"{problem}. Usage: {_USAGE}")
    cluster = runner.read(path, flags.autostop)
    from raytf.cluster.submission import environment_of, run_of  # Ray takes a second

    environment_of(flags.env)
    summary = steps.summary_command(flags.command, run_of(flags.command))
    job = steps.Job(flags.command, flags.working_dir, flags.env, summary)
    with runner.Runner("raytf up") as run:
        code = run.perform(steps.first_steps(cluster, job), cluster)
        if code is None:
            is_up = run.codes[Part.PROBE] == 0
            if is_up:
                run.say("Ray already runs on the head, so `ray up` does not restart it. Running jobs continue.")
            code = run.perform(steps.further_steps(cluster, job, runner.free_port(), is_up), cluster)
        if code is None:
            code = 0
            for line in steps.running(Part.SUMMARY, cluster):
                run.say(line)
    sys.exit(code)
