"""`raytf up` and `raytf attach` by the real `ray up` on three hosts: a step that fails, Ctrl-C, and a job's result."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest
import yaml

from raytf.testing.processes import wait_until
from tests.cluster.hosts import Host, Hosts
from tests.cluster.onprem import PATIENCE, OnPrem, command_lines

#: Five minutes; tests/unit/commands/test_up.py has the decisions.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
RUN = "after-ctrl-c"


@pytest.fixture(scope="module")
def onprem(hosts_are_possible: None) -> Iterator[OnPrem]:
    """Hosts on which nothing runs yet."""
    with Hosts() as hosts:
        yield OnPrem(hosts)


def typed(host: Host, command: str) -> psutil.Process:
    """The process of a command of raytf that the user has typed."""
    for process in host.processes():
        line = process.cmdline()
        if len(line) > 2 and line[1].endswith("/raytf") and line[2] == command:
            return process
    raise LookupError(command)


def head_of_ray(onprem: OnPrem) -> list[int]:
    """Process ids of Ray's head."""
    return [p.pid for p in onprem.head.processes() if "gcs_server" in p.name()]


def test_a_step_that_fails_is_named_with_what_still_runs(onprem: OnPrem):
    config = yaml.safe_load(onprem.config.read_text())
    config["setup_commands"].insert(0, "echo no disk; exit 3")
    broken = onprem.shared / "broken.yaml"
    broken.write_text(yaml.safe_dump(config))
    with onprem.start(f"raytf up {broken} -- true") as up:
        assert up.ended(PATIENCE) == 1, up.output
    print(up.output)
    assert "raytf up: $ ray get-auth-token --generate > /dev/null" in up.output
    assert f"raytf up: $ raytf check {broken} --job true --working-dir ." in up.output
    assert f"raytf up: This step failed (exit code 1): ray up -y {broken}" in up.output
    assert "A part of the cluster may run. These are hosts of your own" in up.output
    assert f"To end it: ray down -y {broken}; raytf down-check {broken}" in up.output
    assert "ray dashboard" not in up.output


def test_ctrl_c_leaves_the_job_and_attach_follows_it_to_its_result(onprem: OnPrem):
    go = onprem.shared / "go"
    job = f"python jobs/mnist.py --data digits --steps 20 --workers 1:2 --run {RUN} --storage {onprem.shared}/runs"
    command = f"echo the job waits; until test -e {go}; do sleep 0.5; done; {job}"
    with onprem.start(f"raytf up {onprem.config} --command '{command}'") as up:
        up.until(lambda: "\nthe job waits" in up.output, 2 * PATIENCE)
        typed(onprem.laptop, "up").send_signal(signal.SIGINT)
        assert up.ended(60) == 130, up.output
    print(up.output)
    assert f"raytf up: Detached. To follow the newest job again: raytf attach {onprem.config}" in up.output
    assert f"It runs until you end it: ray down -y {onprem.config}" in up.output
    wait_until(lambda: not any("dashboard" in line for line in command_lines(onprem.laptop)), "the tunnel closes", 30)

    with onprem.start(f"raytf attach {onprem.config}") as attach:
        attach.until(lambda: "\nthe job waits" in attach.output, PATIENCE)
        go.touch()
        output = attach.wait(2 * PATIENCE)
    print(output)
    assert "test accuracy" in output
    assert f"raytf attach: $ ray exec {onprem.config} 'raytf show {onprem.shared}/runs/{RUN}'" in output
    assert "finished: 20 steps" in output.partition("ray exec")[2]


def test_a_cluster_that_runs_is_not_restarted_and_a_refused_job_is_named(onprem: OnPrem):
    before = head_of_ray(onprem)
    assert len(before) == 1
    with onprem.start(f"raytf up {onprem.config} -- bash -c 'exit 2'") as up:
        assert up.ended(PATIENCE) == 2, up.output
    print(up.output)
    assert f"raytf up: $ ray up -y --no-restart {onprem.config}" in up.output
    assert "raytf up: This step failed (exit code 2): RAY_AUTH_MODE=token raytf submit http://127.0.0.1:" in up.output
    assert f"It runs until you end it: ray down -y {onprem.config}" in up.output
    assert head_of_ray(onprem) == before
    onprem.type(f"ray down -y {onprem.config}")
