"""Jobs through Ray's job server, on a Ray that runs already."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

import raytf
from raytf.testing import ElasticCluster, Job
from tests.ray.conftest import MNIST_JOB, PATIENCE, environment, manifests, result_of

RAY_SUBMIT = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address"]
MODE = "Set RAY_AUTH_MODE=token. "
TOKEN = "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token must contain the head's token."
RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()"]


def submission(dashboard: str | None, folder: Path, *flags: object, submit: Sequence[str] = RAY_SUBMIT) -> list[str]:
    """The command that submits the MNIST job from a folder with nothing else in it."""
    working = folder / "project"
    working.mkdir(exist_ok=True)
    (working / "mnist.py").write_text(MNIST_JOB.read_text())
    job = ["python", "mnist.py", "--data", "digits", "--workers", "1", "--no-warm-workers", "--storage", str(folder)]
    return [*submit, str(dashboard), "--working-dir", str(working), "--", *job, *map(str, flags)]


#: Figures of a run that are there as soon as it has a checkpoint, each with a label that it must have.
FIGURES = {
    "step": "",
    "steps_wanted": "",
    "world_size": "",
    "loss": "",
    "goodput": "",
    "samples_per_second": "",
    "snapshot_bytes": "",
    "checkpoint_step": 'tier="durable"',
    "checkpoint_age_seconds": 'tier="memory"',
    "seconds_total": 'category="training"',
    "saves_total": "",
}


def exported(cluster: ElasticCluster) -> dict[str, float]:
    """What Prometheus would get from the nodes of the cluster, of the figures of the run."""
    with urllib.request.urlopen(f"{cluster.dashboard_url}/api/prometheus/sd", timeout=10) as answer:
        places = json.loads(answer.read())
    text = ""
    for target in (target for place in places for target in place["targets"]):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            text += answer.read().decode()
    found = {}
    for name, tags, value in re.findall(r"^ray_raytf_(\w+){(.*)} ([0-9.e+-]+)$", text, re.MULTILINE):
        if 'run="mnist"' in tags and FIGURES.get(name, "") in tags:
            found[name] = float(value)
    return found


@pytest.mark.slow  # the last one of this file submits with the same command
def test_ray_job_submit(cluster: dict[str, str], tmp_path: Path):
    done = subprocess.run(
        submission(cluster["dashboard"], tmp_path, "--epochs", 12),
        env=environment(RAY_AUTH_MODE="disabled"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: handwritten digits" in done.stdout
    assert "epoch 12: loss" in done.stdout
    assert "test accuracy: 0.9" in done.stdout
    result = result_of(tmp_path / "mnist")
    assert (result["steps"], result["restarts"]) == (144, 0)
    assert result["world_sizes"] == [1]


def test_ctrl_c_leaves_the_job_running_and_a_stopped_job_has_saved_first(cluster: dict[str, str], tmp_path: Path):
    status = tmp_path / "status.json"
    # Nothing is saved on the way but for the first steps.
    flags = ("--run", "a", "--steps", 100_000, "--status-file", status, "--checkpoint-every-seconds", 3600)
    command = submission(cluster["dashboard"], tmp_path, *flags, submit=[*RAYTF, "submit"])
    with Job(command, tmp_path / "first.log", environment(RAY_AUTH_MODE="disabled"), status_file=status) as job:
        job.until(lambda: (job.step or 0) >= 20, PATIENCE)
        job.process.send_signal(signal.SIGINT)
        assert job.ended(60) == 130
        at = job.step or 0
    assert "Traceback" not in job.output
    name = re.search(r"submitted as job (raytf-a-\w+-0)\n", job.output).group(1)
    assert job.output.splitlines()[-1].endswith(f"ray job stop --address {cluster['dashboard']} {name}")

    # The same command goes on with the job that runs, and does not start a second one.
    at_option = command.index("--")
    command[at_option:at_option] = ["--stop-on-interrupt"]
    with Job(command, tmp_path / "second.log", environment(RAY_AUTH_MODE="disabled")) as job:
        job.until(lambda: f"job {name} already runs this command" in job.output, PATIENCE)
        job.until(lambda: json.loads(status.read_text())["step"] > at, PATIENCE)
        job.until(lambda: "epoch 1: " in job.output, PATIENCE)  # the log, from its beginning
        assert max(manifests(tmp_path / "a")) < 20
        job.process.send_signal(signal.SIGINT)
        told = time.monotonic()
        assert job.ended(120) == 130
        print(f"a job was stopped {time.monotonic() - told:.1f} s after Ctrl-C")
    saved = manifests(tmp_path / "a")[-1]
    assert f"told to stop (SIGTERM): saved step {saved}; the same command continues" in job.output
    assert saved > at
    assert raytf.read_steps(str(tmp_path / "a"))["step"][-1] == saved
    assert not (tmp_path / "a" / "lease.json").exists()
    shown = subprocess.run([*RAYTF, "show", str(tmp_path / "a")], capture_output=True, text=True, timeout=60)
    assert f"stopped (told to stop (SIGTERM), saved step {saved}): {saved} of 100000 steps" in shown.stdout


def submitted(address: str | None, *words: str, **env: str) -> tuple[int, str]:
    """Exit code and output of `raytf submit`, from a folder that nothing is taken of."""
    env = environment(**{"RAY_AUTH_MODE": "disabled", **env})
    command = [*RAYTF, "submit", str(address), "--working-dir", "", *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    return done.returncode, done.stdout


def test_only_what_died_is_submitted_again(cluster: dict[str, str]):
    address = cluster["dashboard"]
    code, output = submitted(address, "--env", "NAME=World", "--", "sh", "-c", 'echo "Hello $NAME"')
    assert (code, output.count("Hello World\n")) == (0, 1), output
    assert output.splitlines()[-1].endswith("-0 finished")

    code, output = submitted(address, "--", "sh", "-c", "echo because; exit 2")
    assert (code, output.count("because\n"), output.count("submitted as job ")) == (2, 1, 1), output
    assert "the job was refused (exit code 2); job raytf-run-" in output

    code, output = submitted(address, "--", "sh", "-c", "echo because; exit 1")
    assert (code, output.count("because\n"), output.count("submitted as job ")) == (1, 1, 1), output

    # EX_TEMPFAIL, and death.
    command = 'if [ -e "$MARK" ]; then kill -9 $$; fi; touch "$MARK"; exit 75'
    with tempfile.TemporaryDirectory() as folder:
        mark = ("--env", f"MARK={folder}/mark", "--max-resubmits", "2")
        code, output = submitted(address, *mark, "--command", command)
    assert (code, output.count("submitted as job ")) == (1, 3), output
    assert "another process still owns its run; submitting it again in " in output
    assert "the job's driver was killed (SIGKILL), after 2 resubmissions in a row; job " in output


def test_a_cluster_with_a_token():
    with ElasticCluster(dashboard=True, token="f" * 32) as cluster:
        url, job = cluster.dashboard_url, ("--", "echo", "Hello")
        code, output = submitted(url, *job)
        assert (code, output) == (2, f"error: the cluster at {url} needs a token. {MODE}{TOKEN}\n")
        code, output = submitted(url, *job, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="e" * 32)
        assert (code, output) == (2, f"error: the cluster at {url} does not accept this token. {TOKEN}\n")
        code, output = submitted(url, *job, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 32)
        assert (code, output.splitlines().count("Hello")) == (0, 1), output


@pytest.mark.slow  # test_resume.py goes on on another machine, test_metrics.py reads the figures
def test_a_new_cluster_goes_on_where_one_was_that_is_gone(tmp_path: Path):
    folder = tmp_path / "mnist"
    flags = ("--steps", 1200, "--checkpoint-every-steps", 60)

    def submit(cluster: ElasticCluster, log: str) -> Job:
        env = environment(RAY_AUTH_MODE="disabled")
        return Job(submission(cluster.dashboard_url, tmp_path, *flags), tmp_path / log, env)

    with ElasticCluster(head_cpus=2, dashboard=True) as cluster, submit(cluster, "first.log") as job:
        job.until(lambda: manifests(folder)[-1:] >= [120], PATIENCE)
        job.until(lambda: exported(cluster).keys() >= FIGURES.keys(), PATIENCE)
        figures = exported(cluster)
        assert figures["steps_wanted"] == 1200
        assert 0 < figures["goodput"] < 1
        assert figures["seconds_total"] > 0
        cluster.head.kill()  # with the driver, the controller, the workers and what they had in memory
    at = manifests(folder)[-1]  # not sooner: a save may have been at its end
    with ElasticCluster(head_cpus=2, dashboard=True) as cluster, submit(cluster, "second.log") as job:
        output = job.wait(PATIENCE)
    assert f"restored step {at} from checkpoint 0" in output
    assert "test accuracy: 0.9" in output
    assert (result_of(folder)["steps"], result_of(folder)["restarts"]) == (1200, 1)
    assert raytf.read_steps(str(folder))["step"].tolist() == list(range(1, 1201))
