"""`raytf init` and `raytf jobs`: what they write is what somebody without a checkout needs."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import raytf
from raytf.commands import init
from raytf.config.command_line import DESCRIBE
from raytf.doctor.check import offline
from raytf.doctor.finding import Severity
from raytf.doctor.local_environment import Surroundings
from raytf.errors import DISTRIBUTION

ROOT = Path(__file__).parents[3]
CLUSTERS = sorted(file.stem for file in (ROOT / "cluster-configs").glob("*.yaml"))
JOBS = sorted(file.stem for file in (ROOT / "jobs").glob("*.py"))


WHEEL = f"raytf_train-{raytf.__version__}-py3-none-any.whl"
#: Configuration, up to its first dash -> where runs are kept, and the page of docs/clusters/.
PLACES = {
    "aws": ("s3://BUCKET/runs", "aws"),
    "gcp": ("gs://BUCKET/runs", "gcp"),
    "azure": ("az://raytf/runs?account_name=ACCOUNT", "azure"),
    "local": ("/mnt/runs", "on-prem"),
}
ORDER = [
    "ray get-auth-token",
    "raytf check",
    "ray up",
    "ray dashboard",
    "export RAY_AUTH_MODE=token",
    "raytf submit",
    "ray down",
    "raytf down-check",
]


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from raytf.commands.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, check=False
    )


@pytest.mark.parametrize("job", JOBS)
def test_a_project_begins_with_any_job(job: str):
    page = init.project(init.shipped_folder(), job, None, None)["job.py"]
    ast.parse(page)
    assert "python job.py" in page
    assert "jobs/" not in page


@pytest.mark.parametrize("wheel", [None, WHEEL])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nodes_install_the_released_package_or_a_wheel_and_no_checkout(cluster: str, wheel: str | None):
    files = init.project(init.shipped_folder(), "mnist", cluster, wheel)
    text = files["cluster.yaml"]
    document = yaml.safe_load(text)
    commands = " ".join(c for key in document if key.endswith("setup_commands") for c in document[key])
    pins = re.findall(rf"'{DISTRIBUTION}\[all(?:,gpu)?\]==([\w.]+)'", commands)
    wheels = re.findall(r"'\./(\S+\.whl)\[all(?:,gpu)?\]'", commands)
    assert (set(pins), set(wheels)) == (set(), {wheel}) if wheel else ({raytf.__version__}, set())
    assert "'.[" not in text
    mounts = {local: there for there, local in document["file_mounts"].items() if "raytf/" in there}
    assert mounts == {local: f"~/raytf/{local}" for local in mounts}
    assert "constraints.txt" in mounts
    assert {name for name in files if name.startswith("constraints")} | ({wheel} - {None}) == set(mounts)
    assert f"--python {platform.python_version()} " in commands
    assert "cluster-configs" not in text
    assert "checkout" not in text
    for word in re.findall(r"\S*docs/\S*", text):
        assert word.startswith(init.REPOSITORY)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nothing_is_wrong_with_what_is_written(cluster: str, tmp_path: Path):
    done = command("init", "x", "--cluster", cluster, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "x" / "cluster.yaml").read_text()
    here = Surroundings(platform.python_version(), "2.60.0", tmp_path / "x", {"HOME": str(tmp_path)})
    found = [f for f in offline.check(text, here).findings if f.severity is not Severity.FILL_IN]
    # The token is made by a command that the file names.
    assert [f for f in found if "auth_token" not in f.what] == []
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    assert [f for f in offline.check(text, here).findings if f.severity is not Severity.FILL_IN] == []


def typed(readme: str) -> list[list[str]]:
    """Return the commands of a README as words, without what redirects them."""
    lines = re.findall(r"^ {4}(\S.*)", readme.replace("\\\n", ""), re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    return [re.split("\n[>&]", "\n".join(words))[0].split("\n") for words in commands]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_readme_has_commands_of_its_cloud_that_their_programs_accept(cluster: str, tmp_path: Path):
    from ray.scripts.scripts import cli

    assert command("init", "x", "--cluster", cluster, cwd=tmp_path).returncode == 0
    project, described = tmp_path / "x", tmp_path / "described.json"
    readme = (project / "README.md").read_text()
    storage, page = PLACES[cluster.partition("-")[0]]
    assert f"docs/clusters/{page}.md\n" in readme
    assert (ROOT / "docs" / "clusters" / f"{page}.md").exists()
    assert {place for place, _ in PLACES.values() if place in readme} == {storage}
    of_cluster = typed(readme.partition("## On a cluster")[2])
    assert [" ".join(words[:2]) for words in of_cluster if words[0] != "python"] == ORDER

    # This machine starts nodes with the same packages of the cloud as the head.
    (head,) = yaml.safe_load((project / "cluster.yaml").read_text()).get("head_setup_commands", [""])
    packages = {word for words in of_cluster if words[0] == "python" for word in words[4:]}
    assert packages - {"-c", "constraints.txt"} == set(head.partition("[all]'")[2].split())

    commands = typed(readme)
    assert f"./{WHEEL}[ui]" in commands[0]
    for words in (words for words in commands if words[0] == "ray"):
        group = cli.make_context("ray", words[1:], resilient_parsing=True)
        name, taken, rest = cli.resolve_command(group, words[1:])
        taken.make_context(name, rest, parent=group)
    env = os.environ | {DESCRIBE: str(described)}
    parse = "import json, sys; from raytf.commands.main import main; [main(words) for words in json.loads(sys.argv[1])]"
    ours = json.dumps([words[1:] for words in commands if words[0] == "raytf"])
    subprocess.run([sys.executable, "-c", parse, ours], check=True, timeout=120, cwd=project, env=env)
    check, submit = (next(words for words in commands if words[:2] == ["raytf", name]) for name in ("check", "submit"))
    job = submit[submit.index("--") + 1 :]
    assert shlex.split(check[check.index("--job") + 1]) == job
    subprocess.run([sys.executable, *job[1:]], check=True, timeout=120, cwd=project, env=env)
    assert json.loads(described.read_text())["storage"] == storage


@pytest.mark.parametrize(("line", "words"), [("a 'b c' > d  # e", ["a", "b c"]), ("a b &  # c", ["a", "b"])])
def test_a_command_of_a_readme_ends_where_it_is_redirected(line: str, words: list[str]):
    assert typed(f"text\n\n    {line}\n") == [words]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_job_without_runs_gets_no_storage(cluster: str):
    files = init.project(init.shipped_folder(), "pi", cluster, None)
    assert "--storage" not in files["README.md"] + files["cluster.yaml"]
    assert ["raytf", "check", "cluster.yaml"] in typed(files["README.md"])


def test_equal_code_gives_equal_wheels():
    one, two = (init.build_wheel(init.installed(), init.shipped_folder()) for _ in range(2))
    assert one == (WHEEL, two[1])


def test_the_files_beside_the_package_are_those_that_pip_installs():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    patterns = [pattern for each in data.values() for pattern in each]
    assert set(init.shipped_files(ROOT)) == {file for pattern in patterns for file in ROOT.glob(pattern)}


def test_nothing_is_written_over(tmp_path: Path):
    assert command("init", "x", cwd=tmp_path).returncode == 0
    (tmp_path / "x" / "job.py").write_text("mine")
    done = command("init", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: x/job.py exists already, and nothing is overwritten. Choose another folder.\n"
    assert (tmp_path / "x" / "job.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--cluster", "aws-gpu-spt"], "--cluster aws-gpu-spt is not known. Did you mean aws-gpu-spot?"),
        (["x", "--job", "mnits"], "--job mnits is not known. Did you mean mnist?"),
        (["x", "--job", "../secret"], "--job ../secret is not known."),
        (["file"], "file is a file, and nothing is overwritten."),
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
    assert old.stderr == f"raytf watch was renamed to raytf node\n{new.stderr}"


def test_the_address_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["urls"]["Homepage"]) == (DISTRIBUTION, init.REPOSITORY)
    assert not re.findall(r"\]\((?!https://)", project["readme"]["text"])
