"""`raytf up` and `raytf attach` without a cluster: the steps, and what follows from each. tests/cluster has one."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raytf.commands import _up_runner as runner
from raytf.commands import _up_steps as steps
from raytf.commands._up_steps import ClusterFile, Job, Outcome, Part, Step
from raytf.doctor import local_environment
from raytf.errors import ConfigError
from raytf.testing.processes import environment, free_port, wait_until

CONFIGS = Path(__file__).parents[3] / "cluster-configs"
CLUSTER = ClusterFile("c.yaml", has_token=True, bill="It costs 0.10 to 8.15 USD an hour.")
NOTHING = ("This command has started nothing.",)
RUNS = (
    "The cluster runs. It costs 0.10 to 8.15 USD an hour.",
    "It runs until you end it: ray down -y c.yaml; raytf down-check c.yaml",
)
IN_PART = (
    "A part of the cluster may run. It costs 0.10 to 8.15 USD an hour.",
    "To try again, repeat the same command. To end it: ray down -y c.yaml; raytf down-check c.yaml",
)
DETACHED = "Detached. To follow the newest job again: raytf attach c.yaml"


def lines(cluster: ClusterFile, job: Job, is_up: bool = False) -> list[str]:
    return [s.line for s in (*steps.first_steps(cluster, job), *steps.further_steps(cluster, job, 8265, is_up))]


def test_the_steps_of_a_cluster_with_a_token():
    job = Job("python job.py --run a", ".", ("A=b c",), "raytf show s3://b/runs/a")
    assert lines(replace(CLUSTER, autostop="15m"), job) == [
        "ray get-auth-token --generate > /dev/null",
        "raytf check c.yaml --job 'python job.py --run a' --working-dir .",
        "ray exec c.yaml 'ray status || pgrep -x gcs_server' > /dev/null 2>&1",
        "ray up -y c.yaml",
        "ray exec c.yaml 'raytf autostop arm --after 900s'",
        "ray dashboard c.yaml --port 8265 &",
        "RAY_AUTH_MODE=token raytf submit http://127.0.0.1:8265 --working-dir . --env 'A=b c' -- python job.py --run a",
        "ray exec c.yaml 'raytf show s3://b/runs/a'",
    ]


def test_the_steps_of_a_cluster_that_runs_without_a_token():
    job = Job("cd x && python a.py", "")
    assert lines(ClusterFile("c.yaml"), job, is_up=True) == [
        "raytf check c.yaml --job 'cd x && python a.py'",
        "ray exec c.yaml 'ray status || pgrep -x gcs_server' > /dev/null 2>&1",
        "ray up -y --no-restart c.yaml",
        "ray dashboard c.yaml --port 8265 &",
        "raytf submit http://127.0.0.1:8265 --working-dir '' --command 'cd x && python a.py'",
    ]


@pytest.mark.parametrize(
    ("part", "code", "exit_code", "lines"),
    [
        (Part.TOKEN, 0, None, ()),
        (Part.TOKEN, 1, 1, NOTHING),
        (Part.CHECK, 0, None, ()),
        (Part.CHECK, 1, None, ()),  # warnings
        (Part.CHECK, 2, 2, NOTHING),
        (Part.CHECK, -9, 1, NOTHING),
        (Part.PROBE, 0, None, ()),
        (Part.PROBE, 1, None, ()),
        (Part.CLUSTER, 0, None, ()),
        (Part.CLUSTER, 1, 1, IN_PART),
        (Part.CLUSTER, 2, 1, IN_PART),  # usage of click, not a refusal of the job
        (Part.TUNNEL, 0, None, ()),
        (Part.TUNNEL, 1, 1, RUNS),
        (Part.FOLLOW, 0, None, ()),
        (Part.FOLLOW, 1, 1, RUNS),
        (Part.FOLLOW, 2, 2, RUNS),
        (Part.FOLLOW, -9, 1, RUNS),
        (Part.SUMMARY, 0, None, ()),
        (Part.SUMMARY, 1, None, ("The job has finished all the same.",)),
    ],
)
def test_what_follows_from_an_exit_code(part: Part, code: int, exit_code: int | None, lines: tuple[str, ...]):
    first = (f"This step failed (exit code {code}): ray x",) if lines else ()
    assert steps.after(Step(part, ("ray", "x")), code, False, CLUSTER).lines == first + lines
    assert steps.after(Step(part, ("ray", "x")), code, False, CLUSTER).code == exit_code


@pytest.mark.parametrize(
    ("part", "code", "outcome"),
    [
        (Part.CHECK, 130, Outcome(130, ("Interrupted during: ray x", *NOTHING))),
        (Part.PROBE, 1, Outcome(130, ("Interrupted during: ray x", *NOTHING))),
        (Part.CLUSTER, 1, Outcome(130, ("Interrupted during: ray x", *IN_PART))),
        (Part.CLUSTER, 0, Outcome(130, ("Interrupted during: ray x", *IN_PART))),
        (Part.TUNNEL, 130, Outcome(130, ("Interrupted during: ray x", *RUNS))),
        (Part.FOLLOW, 130, Outcome(130, (DETACHED, *RUNS))),
        (Part.FOLLOW, -2, Outcome(130, (DETACHED, *RUNS))),
        (Part.FOLLOW, 0, Outcome()),  # it had finished
        (Part.SUMMARY, 1, Outcome(130, ("Interrupted during: ray x", *RUNS))),
    ],
)
def test_what_follows_from_ctrl_c(part: Part, code: int, outcome: Outcome):
    assert steps.after(Step(part, ("ray", "x")), code, True, CLUSTER) == outcome


def test_a_step_that_was_interrupted_alone_counts_as_interrupted():
    assert steps.after(Step(Part.FOLLOW, ("raytf", "x")), 130, False, CLUSTER).lines[0] == DETACHED


def test_values_to_fill_in_end_it_after_the_check():
    step = Step(Part.CHECK, ("raytf", "check"))
    outcome = steps.after(step, 0, False, ClusterFile("c.yaml", is_filled_in=False))
    first = "Write your own values into c.yaml first; `raytf check` lists them above."
    assert outcome == Outcome(2, (first, *NOTHING))


def test_with_autostop_the_cluster_ends_by_itself_once_it_is_up():
    cluster = ClusterFile("c.yaml", autostop="15m")
    assert "ends by itself 15m after its last job" in steps.running(Part.FOLLOW, cluster)[1]
    assert "by itself" not in " ".join(steps.running(Part.CLUSTER, cluster))


@pytest.mark.parametrize(
    ("name", "bill", "is_filled_in"),
    [
        ("aws-gpu-spot.yaml", "It costs 0.11 to ", True),
        ("gcp-gpu-spot.yaml", "It costs 0.07 to ", False),
        ("local.yaml", "These are hosts of your own, for which raytf knows no price.", False),
    ],
)
def test_a_shipped_configuration_is_read(name: str, bill: str, is_filled_in: bool, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a token, which is made before the check
    cluster = runner.read(str(CONFIGS / name))
    assert cluster.bill.startswith(bill)
    assert (cluster.has_token, cluster.is_filled_in, cluster.autostop) == (True, is_filled_in, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("provider: {type: aws, autostop: 15m}", ClusterFile("c", bill="Its price is not known.", autostop="15m")),
        (
            "available_node_types: {a: {node_config: {InstanceType: m7i.large}}}\nprovider: {type: aws}\n"
            "head_node_type: a\nmax_workers: 0\nsetup_commands: [export RAY_AUTH_MODE=disabled]",
            ClusterFile("c", bill="It costs 0.11 USD an hour and more (list prices of 2026-07)."),
        ),
        ("", ClusterFile("c")),
    ],
)
def test_a_file_is_read(text: str, expected: ClusterFile):
    assert steps.cluster_file("c", text, local_environment.here()) == expected


def test_autostop_of_the_command_line_goes_before_that_of_the_file():
    text = "provider: {type: aws, autostop: 15m}"
    assert steps.cluster_file("c", text, local_environment.here(), "1h").autostop == "1h"


@pytest.mark.parametrize(
    ("command", "summary"),
    [
        ("python job.py --storage s3://b/runs/", "raytf show s3://b/runs/job"),
        ("python job.py --storage=s3://b/runs --run a", "raytf show s3://b/runs/a"),
        ("python job.py --storage '/mnt/my runs' --new", "raytf runs '/mnt/my runs'"),
        ("python job.py --storage 'az://c/runs?account_name=a'", "raytf show 'az://c/runs/job?account_name=a'"),
        ("python job.py", ""),
        ("python job.py --storage a --workers x", ""),
    ],
)
def test_the_command_that_shows_the_result(command: str, summary: str):
    from raytf.cluster.submission import run_of

    assert steps.summary_command(command, run_of(command)) == summary


@pytest.mark.parametrize("path", [CONFIGS / "kuberay/rayjob.yaml", CONFIGS / "kuberay/overlays/eks"])
def test_manifests_of_kubernetes_are_refused_in_one_line(path: Path):
    with pytest.raises(ConfigError, match=r"`kubectl apply.*docs/clusters/kubernetes\.md"):
        runner.read(str(path))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["up"], "No cluster YAML given. Usage: raytf up cluster.yaml -- "),
        (["up", "a", "b", "--", "true"], "2 files given, expected one"),
        (["up", "a"], "No command given"),
        (["up", "a", "--", "a; b"], "'a; b' is in quotes"),
        (["up", str(CONFIGS / "local.yaml"), "--autostop", "15m", "--", "true"], "--autostop 15m: "),
        (["up", "no.yaml", "--", "true"], "no.yaml cannot be read"),
        (["up", "-", "--", "true"], "- is standard input; expected one cluster YAML"),
        (["up", str(CONFIGS / "local.yaml"), "--env", "A", "--", "true"], "--env A: expected NAME=VALUE"),
        (["up", "a", "--", "python", "a.py", "--workers", "x"], "--workers x"),
        (["attach"], "No cluster YAML given. Usage: raytf attach cluster.yaml"),
    ],
)
def test_a_refusal_is_one_line_and_starts_nothing(args: list[str], words: str):
    command = [sys.executable, "-m", "raytf", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


class Recorded(runner.Runner):
    """A runner whose steps have given exit codes, or are interrupted."""

    def __init__(self, codes: dict[Part, int | type[BaseException]]):
        super().__init__("raytf up")
        self.given, self.ran, self.said = codes, [], []

    def say(self, line: str) -> None:
        self.said.append(line)

    def run(self, step: Step) -> tuple[int, bool]:
        self.ran.append(step.part)
        code = self.given.get(step.part, 0)
        if not isinstance(code, int):
            raise code
        return code, False


@pytest.mark.parametrize(
    ("codes", "last", "code"),
    [
        ({Part.CLUSTER: 1}, Part.CLUSTER, 1),
        ({Part.TUNNEL: KeyboardInterrupt}, Part.TUNNEL, 130),
        ({Part.SUMMARY: 1}, Part.SUMMARY, None),
    ],
)
def test_the_first_step_that_fails_is_the_last(codes: dict[Part, int], last: Part, code: int | None):
    job = Job("true", summary="raytf show a")
    run = Recorded(codes)
    assert run.perform(steps.further_steps(CLUSTER, job, 8265, False), CLUSTER) == code
    assert run.ran[-1] is last
    assert run.said[0] == "$ ray up -y c.yaml"


#: Answers one request, and ends.
ONE_ANSWER = """
import http.server, sys
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
print("up", flush=True)
server.handle_request()
"""


def test_a_tunnel_that_breaks_is_opened_again_and_closed_in_the_end(monkeypatch):
    monkeypatch.setattr(runner, "_AGAIN_SECONDS", 0.1)
    step = steps.tunnel(CLUSTER, free_port())
    monkeypatch.setattr(runner, "_program", lambda s: ([sys.executable, "-c", ONE_ANSWER, s.argv[-1]], {}))
    with runner.Tunnel(step) as tunnel:
        assert tunnel.is_ready(60)
        assert tunnel.is_ready(60)
        wait_until(lambda: tunnel.last_lines().count("up") == 3, "it has been opened again", 60)
        process = tunnel._process
    assert process is not None
    assert process.returncode == -signal.SIGTERM


def test_a_step_has_this_environment_s_program_and_its_exit_code(capfd):
    with runner.Runner("raytf up") as run:
        assert run.run(Step(Part.CHECK, ("raytf", "--version"))) == (0, False)
        assert run.run(Step(Part.CHECK, ("raytf", "nonsense"))) == (2, False)
        assert run.run(Step(Part.TOKEN, ("ray", "--version"))) == (0, False)
    out = capfd.readouterr().out
    assert out.startswith("raytf ")
    assert "ray, version" not in out


def test_ctrl_c_reaches_a_step_also_if_the_terminal_does_not_send_it(monkeypatch):
    ends = "import signal, sys, time\nsignal.signal(2, lambda *_: sys.exit(7))\nprint('on', flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(runner, "_program", lambda step: ([sys.executable, "-c", ends], {}))
    monkeypatch.setattr(runner, "_GRACE_SECONDS", 2.0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        assert runner._foreground(Step(Part.FOLLOW, ("raytf", "submit"))) == (7, True)
    finally:
        signal.signal(signal.SIGALRM, before)
