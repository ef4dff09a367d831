"""`raytf init` and `raytf jobs`: what they write is what somebody without a checkout needs."""

from __future__ import annotations

import ast
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import raytf
from raytf.cluster.check import run
from raytf.cluster.check.finding import Severity
from raytf.cluster.check.local_environment import Surroundings
from raytf.commands import _shipped, init
from raytf.errors import DISTRIBUTION

ROOT = Path(__file__).parents[3]
CLUSTERS = sorted(file.stem for file in (ROOT / "cluster-configs").glob("*.yaml"))
JOBS = sorted(file.stem for file in (ROOT / "jobs").glob("*.py"))


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from raytf.commands.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, check=False
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_project_begins_with_any_job(job: str):
    page = init.project(_shipped.folder(), job, None)["job.py"]
    ast.parse(page)
    assert "python job.py" in page
    assert "jobs/" not in page


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nodes_install_the_released_package_and_no_checkout(cluster: str, tmp_path: Path):
    files = init.project(_shipped.folder(), "mnist", cluster)
    text = files["cluster.yaml"]
    document = yaml.safe_load(text)
    commands = " ".join(c for key in document if key.endswith("setup_commands") for c in document[key])
    installs = re.findall(rf"'{DISTRIBUTION}\[all(?:,gpu)?\]==([\w.]+)'", commands)
    assert set(installs) == {raytf.__version__}
    assert "'.[" not in text
    mounted = {mount.partition("raytf/")[2] for mount in document["file_mounts"] if "raytf/" in mount}
    assert "constraints.txt" in mounted
    assert mounted <= set(files)
    assert {name for name in files if name.startswith("constraints")} == mounted
    assert f"--python {platform.python_version()} " in commands
    assert "cluster-configs" not in text
    assert "checkout" not in text
    for word in re.findall(r"\S*docs/\S*", text):
        assert word.startswith(_shipped.REPOSITORY)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nothing_is_wrong_with_what_is_written(cluster: str, tmp_path: Path):
    done = command("init", "x", "--cluster", cluster, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "x" / "cluster.yaml").read_text()
    here = Surroundings(platform.python_version(), "2.60.0", tmp_path / "x", {"HOME": str(tmp_path)})
    found = [f for f in run.check(text, here).findings if f.severity is not Severity.FILL_IN]
    # The token is made by a command that the file names.
    assert [f for f in found if "auth_token" not in f.problem] == []
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    assert [f for f in run.check(text, here).findings if f.severity is not Severity.FILL_IN] == []


def test_nothing_is_written_over(tmp_path: Path):
    assert command("init", "x", cwd=tmp_path).returncode == 0
    (tmp_path / "x" / "job.py").write_text("mine")
    done = command("init", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: x/job.py is there already, and nothing is written over. Give another folder.\n"
    assert (tmp_path / "x" / "job.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--cluster", "aws-gpu-spt"], "--cluster aws-gpu-spt is not known. Did you mean aws-gpu-spot?"),
        (["x", "--job", "mnits"], "--job mnits is not known. Did you mean mnist?"),
        (["x", "--job", "../secret"], "--job ../secret is not known."),
        (["file"], "file is a file, and nothing is written over."),
        (["/proc/x"], "cannot write to /proc/x: "),
        ([], "expected FOLDER."),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments: list[str], words: str, tmp_path: Path):
    (tmp_path / "file").touch()
    done = command("init", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_jobs_lists_each_example_with_what_it_does(tmp_path: Path):
    lines = command("jobs", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(JOBS)]] == JOBS
    assert all(len(line.split()) > 5 for line in lines[: len(JOBS)])


def test_the_old_name_of_raytf_node_works_with_a_hint(tmp_path: Path):
    old, new = (command(name, "--notices", "off", "--", "echo", "hi", cwd=tmp_path) for name in ("watch", "node"))
    assert (old.returncode, old.stdout) == (new.returncode, new.stdout) == (0, "hi\n")
    assert old.stderr == f"raytf watch is called raytf node now, and does the same\n{new.stderr}"


def test_the_address_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["urls"]["Homepage"]) == (DISTRIBUTION, _shipped.REPOSITORY)
    assert not re.findall(r"\]\((?!https://)", project["readme"]["text"])
