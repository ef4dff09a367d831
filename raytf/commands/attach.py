"""`raytf attach CLUSTER.yaml`: follow the newest job of a cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import tyro

from raytf.commands import _up_runner as runner
from raytf.commands import _up_steps as steps
from raytf.commands import submit
from raytf.commands._up_steps import INTERRUPTED, ClusterFile, Part, Step
from raytf.errors import ClusterError


@dataclass(frozen=True)
class Attach:
    """Follow the newest job that raytf submitted to a cluster, as after Ctrl-C.

    It opens a tunnel, shows the job's output from the start, and then the result. It submits nothing: if the driver
    dies, type the command of `raytf up` or `raytf submit` again. The exit codes are those of `raytf submit`.
    """

    file: tyro.conf.Positional[tuple[str, ...]] = ()
    """The YAML that `ray up` was called with."""


def main(flags: Attach) -> None:
    """Run the command; exits with its code."""
    cluster = runner.read(steps.only_path(flags.file, "raytf attach cluster.yaml"))
    if cluster.has_token:
        os.environ["RAY_AUTH_MODE"] = "token"
    port = runner.free_port()
    with runner.Runner("raytf attach") as run:
        code = run.perform([steps.tunnel(cluster, port)], cluster)
        if code is None:
            code, summary = _follow(run, steps.address_at(port), cluster)
            if code == 0:
                code = run.perform(steps.summary(cluster, summary), cluster) or 0
            if code != INTERRUPTED:
                for line in steps.running(Part.SUMMARY, cluster):
                    run.say(line)
    sys.exit(code)


def _follow(run: runner.Runner, address: str, cluster: ClusterFile) -> tuple[int, str]:
    """Follow the newest job to its end, and return its exit code and the command that shows its result.

    Raises:
        ClusterError: there is no job of raytf, or the head does not say.
    """
    from raytf.cluster import submission
    from raytf.cluster.job_server import AwayError, reach
    from raytf.cluster.resubmission import ResubmissionLimits

    server = reach(address)
    try:
        newest = server.newest()
    except AwayError as error:
        raise ClusterError(f"The head does not list its jobs: {error}. Type the same command again.") from None
    if newest is None:
        raise ClusterError(f"The cluster of {cluster.path} knows no job of raytf. Submit one with `raytf up`.")
    name, command = newest
    run.say(f"following job {name}: {command}")
    outside = submit.at_terminal(run.say)
    job = submission.Submission(server, command, "", {}, ResubmissionLimits(resubmits=0), outside, name)
    try:
        return job.wait(), steps.summary_command(command, submission.run_of(command))
    except KeyboardInterrupt:
        job.leave()
        step = Step(Part.FOLLOW, ("raytf", "attach", cluster.path))
        for line in steps.after(step, INTERRUPTED, True, cluster).lines:
            run.say(line)
        return INTERRUPTED, ""
