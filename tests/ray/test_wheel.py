"""raytf as it is installed: by its wheel alone, and from a clone that a script lies beside."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.ray.conftest import ROOT, result_of

pytestmark = pytest.mark.gate


def alone() -> dict[str, str]:
    """The environment, without a path on which a checkout counts as installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def copied_checkout(folder: Path) -> None:
    ignored = shutil.ignore_patterns(".git", ".venv", "build", ".*cache*", "*.egg-info", "docs", "tests")
    shutil.copytree(ROOT, folder, ignore=ignored)


def environment(folder: Path, *installed: str | Path) -> Path:
    """The programs of an environment that has what is installed in the place of the checkout, and the packages of this
    one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python, env = folder / "bin" / "python", alone()
    if installed:
        install = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", *installed]
        subprocess.run(install, check=True, timeout=300, env=env)
    own = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        check=True,
        capture_output=True,
        text=True,
        env=env,
    ).stdout.strip()
    # A folder that a .pth file names is searched, and its own .pth files, which lead to the checkout, are not read.
    Path(own, "others.pth").write_text("\n".join(site.getsitepackages()))
    return python.parent


#: In place of uv, which would fetch packages: `uv pip install --python PYTHON ...` by pip, without a network.
UV = f"""\
#!/bin/sh
[ "$1 $2 $3" = "pip install --python" ] || exit 9
python=$4
shift 4
exec {sys.executable} -m pip --quiet --python "$python" install --no-deps --no-index "$@"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copied_checkout(folder / "source")
    build = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"]
    subprocess.run(build, check=True, timeout=300, env=alone())
    (made,) = folder.glob("raytf_train-*.whl")
    return made


@pytest.fixture(scope="module")
def released(wheel: Path) -> Path:
    return environment(wheel.parent / "venv", wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, without the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def begun(programs: Path, folder: Path, *flags: str) -> Path:
    """A project that the raytf of an environment begins."""
    command = [programs / "python", programs / "raytf", "init", folder, *flags]
    subprocess.run(command, check=True, timeout=300, env=alone(), cwd=folder.parent)
    return folder


@pytest.mark.parametrize("cluster", ["aws-gpu-spot", "local"])
def test_the_nodes_of_a_project_install_the_wheel_that_is_mounted(released: Path, cluster: str, tmp_path: Path):
    project, home = begun(released, tmp_path / "x", "--cluster", cluster), tmp_path / "home"
    config = yaml.safe_load((project / "cluster.yaml").read_text())
    for there, here in config["file_mounts"].items():
        if there.startswith("~/raytf/"):
            target = home / there.removeprefix("~/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(project / here, target)
    programs = environment(home / "venv")
    uv = home / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    keys = ("setup_commands", "head_setup_commands", "worker_setup_commands")
    installs = [line for key in keys for line in config.get(key, ()) if "uv pip install" in line]
    assert installs
    for line in installs:
        subprocess.run(["bash", "-c", line], check=True, timeout=300, env=alone() | {"HOME": str(home)})
    code = "import raytf; from raytf.commands import init; print(raytf.__file__, init.shipped_folder())"
    done = subprocess.run(
        [programs / "python", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=alone(),
        cwd=tmp_path,
    )
    assert all(Path(path).is_relative_to(home / "venv") for path in done.stdout.split()), done.stdout


def test_a_raytf_of_a_registry_is_pinned(wheel: Path, tmp_path: Path):
    programs = environment(tmp_path / "venv", "--no-index", "--find-links", wheel.parent, "raytf-train")
    project = begun(programs, tmp_path / "x", "--cluster", "aws-gpu-spot")
    assert not [*project.glob("*.whl")]
    assert f"'raytf-train[all]=={wheel.name.split('-')[1]}'" in (project / "cluster.yaml").read_text()


def test_a_script_beside_a_clone_has_raytf_its_types_and_its_wheel(wheel: Path, tmp_path: Path):
    copied_checkout(tmp_path / "raytf")
    programs = environment(tmp_path / "venv", "-e", tmp_path / "raytf")
    script = tmp_path / "script.py"
    script.write_text("import raytf\n\nprint(raytf.__file__, raytf.fit)\nwrong: int = raytf.TrainConfig.of()\n")
    typed = tmp_path / "typed.py"
    typed.write_text(
        "import raytf\n\n"
        "raytf.fit(None, workers=2, exact=True, storage='runs', batch_size=8)\n"
        "raytf.TrainConfig(epochs=3, workers='1:2')\n"
        "raytf.fit(None, wrokers=2)\n"
        "raytf.TrainConfig(exact='yes')\n"
        "raytf.fit(None, config={})\n"
    )

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=alone(), capture_output=True, text=True, timeout=300, check=False
        )
        return done.stdout + done.stderr

    assert run(programs / "python", script).startswith(str(tmp_path / "raytf" / "raytf" / "__init__.py"))
    told = run(sys.executable, "-m", "mypy", "--python-executable", programs / "python", script)
    assert 'expression has type "TrainConfig", variable has type "int"' in told
    assert contents(begun(programs, tmp_path / "x") / wheel.name) == contents(wheel)
    told = run(sys.executable, "-m", "mypy", "--python-executable", programs / "python", typed)
    assert [line.split(":")[1] for line in told.splitlines() if ": error: " in line] == ["5", "6", "7"]
    assert 'Unexpected keyword argument "wrokers" for "fit"; did you mean "workers"?' in told


def test_a_project_begins_trains_and_has_a_cluster_that_is_right(released: Path, wheel: Path, tmp_path: Path):
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("t" * 40)
    env = alone() | {"HOME": str(tmp_path), "PATH": f"{released}:{os.environ['PATH']}"}

    def run(*words: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(
            words,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import raytf; print(raytf.__file__)")
    assert where.startswith(str(released.parent))
    run("raytf", "init", "x", "--cluster", "aws-gpu-spot")
    project = tmp_path / "x"
    assert contents(project / wheel.name) == contents(wheel)
    assert "cluster.yaml: nothing found" in run("raytf", "check", "cluster.yaml", "--offline", folder=project)
    assert "test accuracy" in run("python", "job.py", "--epochs", "2", "--workers", "1", folder=project)
    assert result_of(tmp_path / "raytf-runs" / "job")["steps"] == 24
    assert "finished" in run("raytf", "runs")
