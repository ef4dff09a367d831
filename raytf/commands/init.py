"""`raytf init DIR`: start a project: a job page, a README and, on request, a cluster's configuration.

A project consists of files that are released with the package: example jobs, which `raytf jobs` lists, cluster
configurations, and tested versions.
"""

from __future__ import annotations

import ast
import base64
import difflib
import hashlib
import importlib.metadata
import io
import platform
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

import tyro

import raytf
from raytf.config.terminal_text import say
from raytf.errors import DISTRIBUTION, ConfigError

#: The address of the code and its documentation, as in pyproject.toml.
REPOSITORY = "https://github.com/raytf/raytf"
#: The parts of a checkout that `ray up` copies so that pip can install it.
_MOUNTS = re.compile(r"^  ~/raytf/(?:raytf|pyproject\.toml|LICENSE): .*\n", re.MULTILINE)
#: The checkout as an argument of pip, with extras.
_CHECKOUT = re.compile(r"'\.\[([\w,]+)\]'")
#: The metadata of a wheel; the other files in its folder describe one installation.
_METADATA = ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")


@dataclass(frozen=True)
class Init:
    """Start a project in its own folder: an example job to change, and on request the files to run it on a cluster."""

    folder: tyro.conf.Positional[str]
    """The project's folder, created if it is missing. Existing files are never overwritten."""
    cluster: str | None = None
    """Also write a cluster configuration for `ray up`: aws-gpu-spot, aws-gpu-on-demand, gcp-gpu-spot, azure-gpu-spot,
    or local for your own hosts."""
    job: str = "mnist"
    """The example to start with; `raytf jobs` lists them."""


@dataclass(frozen=True)
class Jobs:
    """List the example jobs; `raytf init DIR --job NAME` starts a project with one."""


def list_jobs(flags: Jobs) -> None:
    """Print the example jobs."""
    examples = job_summaries(shipped_folder())
    width = max(map(len, examples))
    for name, text in examples.items():
        say(f"{name:<{width}}  {text}")
    say(f"\nTo start a project with one: raytf init DIR --job {next(iter(examples))}", lines=True)


def main(flags: Init) -> None:
    """Write the project."""
    shipped, into = shipped_folder(), Path(flags.folder).expanduser()
    _check_name("--job", flags.job, job_summaries(shipped))
    if flags.cluster is not None:
        clusters = sorted(file.stem for file in (shipped / "cluster-configs").glob("*.yaml"))
        _check_name("--cluster", flags.cluster, clusters)
    wheel, content = wheel_for_nodes(shipped) or (None, b"")
    files = {name: text.encode() for name, text in project(shipped, flags.job, flags.cluster, wheel).items()}
    if wheel is not None:
        files[wheel] = content
    there = [name for name in files if (into / name).exists()]
    if there or (into.exists() and not into.is_dir()):
        what = f"{into / there[0]} exists already" if there else f"{into} is a file"
        raise ConfigError(f"{what}, and nothing is overwritten. Choose another folder.")
    try:
        for name, content in files.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write to {into}: {error.strerror}. Choose another folder.") from error
    names = dict.fromkeys(f"{name.partition('/')[0]}/" if "/" in name else name for name in files)
    say(f"{into}: {', '.join(names)}")
    if wheel is not None:
        say(f"{wheel} contains this raytf, which is not released")
    say(f"next: cd {flags.folder} && python job.py")
    if flags.cluster is not None:
        say("      fill in what the first lines of cluster.yaml name, then: raytf check cluster.yaml")


def project(shipped: Path, job: str, cluster: str | None, wheel: str | None) -> Mapping[str, str]:
    """Return the text files of a project: path in its folder -> text.

    Args:
        wheel: the file name of the project's wheel; None if a registry has this version of raytf.
    """
    page = (shipped / "jobs" / f"{job}.py").read_text(encoding="utf-8")
    files = {
        "job.py": _in_project(page.replace(f"jobs/{job}.py", "job.py"), job),
        "README.md": "",
        "constraints.txt": (shipped / "constraints.txt").read_text(encoding="utf-8"),
    }
    parts = [_first(page, wheel)]
    if cluster is not None:
        text = (shipped / "cluster-configs" / f"{cluster}.yaml").read_text(encoding="utf-8")
        if "raytf.fit(" not in page:  # such a job keeps no runs, for which `raytf check --job` wants a storage
            text = re.sub(r" --storage '?[^\s']+'?|( \\\n# +)? --job '[^']*'", "", text)
        files["cluster.yaml"] = _cluster_text(text, cluster, wheel)
        parts.append(_on_a_cluster(files["cluster.yaml"], cluster))
        if "constraints-gpu.txt" in text:
            files["constraints-gpu.txt"] = (shipped / "constraints-gpu.txt").read_text(encoding="utf-8")
        if cluster.startswith("aws"):
            for policy in sorted((shipped / "cluster-configs" / "iam").glob("*.json")):
                files[f"iam/{policy.name}"] = policy.read_text(encoding="utf-8")
    files["README.md"] = "\n".join([*parts, f"More: {REPOSITORY}/tree/main/docs\n"])
    return files


def _first(page: str, wheel: str | None) -> str:
    """Return the section of the project's README about its job."""
    extras = "data,ui" if "ImageFolderSource" in page else "ui"
    package = _requirement(wheel, extras)
    lines = [
        "# A raytf project",
        "",
        f"`job.py` is the whole program. {summary(page)}",
        "",
        f"    python -m pip install -c constraints.txt '{package}'  # where raytf is not installed",
        "    python job.py                 # on this machine; `--help` shows the flags",
    ]
    if "raytf.fit(" in page:
        lines += [
            "    raytf show job                # the state of the run",
            "    raytf ui                      # all runs in a browser, live",
            "",
            "Stop it at any time, even with `kill -9`: the same command continues.",
        ]
    if wheel is not None:
        lines += [
            "",
            f"This version of raytf is not released, so `{wheel}` contains the raytf that wrote this project.",
            "To use another raytf, start another project with it, and copy its wheel and `constraints*.txt` here.",
        ]
    return "\n".join([*lines, ""])


def _on_a_cluster(text: str, cluster: str) -> str:
    """Return the README section about the cluster, with the commands from the first lines of `cluster.yaml`."""
    commands = "\n".join(re.findall(r"^# ( {4}.*)", text.partition("\ncluster_name:")[0], re.MULTILINE))
    place = cluster.partition("-")[0]
    guide = f"{REPOSITORY}/blob/main/docs/clusters/{'on-prem' if place == 'local' else place}.md"
    return f"""## On a cluster

The first lines of `cluster.yaml` list the values to fill in. This page describes the one-time setup:
{guide}

Then run these commands in this folder, in this order:

{commands}

`raytf submit` shows what the job prints, and submits it again if its driver or the head node dies. The nodes install
the raytf of this project and the versions of `constraints*.txt`.
"""


def _check_name(flag: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Expected one of {', '.join(known)}."
        raise ConfigError(f"{flag} {name} is not known. {hint}")


def _requirement(wheel: str | None, extras: str) -> str:
    """Return the requirement for pip: the released version, or a wheel in the current folder."""
    return f"{DISTRIBUTION}[{extras}]=={raytf.__version__}" if wheel is None else f"./{wheel}[{extras}]"


def _cluster_text(text: str, name: str, wheel: str | None) -> str:
    """Return a cluster configuration, changed to install the package instead of the checkout."""
    mount = "" if wheel is None else f"  ~/raytf/{wheel}: {wheel}\n"
    text = _MOUNTS.sub("", text.replace("\nfile_mounts:\n", f"\nfile_mounts:\n{mount}"))
    text = _CHECKOUT.sub(lambda extras: f"'{_requirement(wheel, extras[1])}'", text)
    # Ray requires the same Python on all machines, down to the patch version.
    text = re.sub(r"(venv --seed --python) \S+", rf"\1 {platform.python_version()}", text)
    text = re.sub(r"in the root of(\n# | )the checkout", "in this folder", text)
    return _in_project(text, name)


def _in_project(text: str, name: str) -> str:
    """Return the text of a configuration or an example with file names changed to those in a project."""
    text = text.replace(f"cluster-configs/{name}.yaml", "cluster.yaml").replace("jobs/mnist.py", "job.py")
    text = text.replace("cluster-configs/iam/", "iam/")
    return re.sub(r"(?<![\w/])(docs/[\w/-]+\.md)", rf"{REPOSITORY}/blob/main/\1", text)


# -- files that are released with the package --------------------------------------------------------------------------


def shipped_folder() -> Path:
    """Return the folder with `jobs/`, `cluster-configs/` and `constraints.txt`: a checkout, or the folder where pip
    installed them.

    Raises:
        ConfigError: the files are missing; the message says how to install them.
    """
    checkout = Path(raytf.__file__).parents[1]
    if all((checkout / name).is_dir() for name in ("jobs", "cluster-configs")):
        return checkout
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-4:] == ("share", "raytf", "jobs", "mnist.py"):
            return Path(str(file.locate())).resolve().parents[1]
    raise ConfigError(
        f"the examples were not installed with this package. Run: pip install --force-reinstall {DISTRIBUTION}"
    )


def shipped_files(shipped: Path) -> list[Path]:
    """Return the files in that folder that belong to the package."""
    patterns = ("constraints*.txt", "jobs/*.py", "cluster-configs/*.yaml", "cluster-configs/iam/*.json")
    return [file for pattern in patterns for file in sorted(shipped.glob(pattern))]


def job_summaries(shipped: Path) -> dict[str, str]:
    """Return the example jobs in that folder: name -> description."""
    files = sorted((shipped / "jobs").glob("*.py"))
    return {file.stem: summary(file.read_text(encoding="utf-8")) for file in files}


def summary(page: str) -> str:
    """Return the description of an example, which is the first line of its docstring."""
    return (ast.get_docstring(ast.parse(page)) or "").partition("\n")[0]


# -- a wheel of the installed raytf, for nodes that cannot install it from a registry ----------------------------------


def wheel_for_nodes(shipped: Path) -> tuple[str, bytes] | None:
    """Return the file name and content of a wheel of the installed raytf, or None if a registry has this version.

    Raises:
        ConfigError: raytf is not installed.
    """
    package = installed()
    # PEP 610: pip writes this file if it installs from a folder, a file or a repository, but not from a registry.
    return build_wheel(package, shipped) if package.read_text("direct_url.json") else None


def build_wheel(package: Distribution, shipped: Path) -> tuple[str, bytes]:
    """Return the file name and content of a wheel of an installation, editable or not.

    Equal code produces equal bytes, so that `ray up` does not set up unchanged nodes again.
    """
    stem = f"{DISTRIBUTION.replace('-', '_')}-{package.version}"
    out, record = io.BytesIO(), f"{stem}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in _wheel_files(package, shipped, stem):
            _add(archive, name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(content)}\n")
        _add(archive, record, f"{''.join(lines)}{record},,\n".encode())
    return f"{stem}-py3-none-any.whl", out.getvalue()


def installed() -> Distribution:
    """Return the metadata of the installed raytf.

    Raises:
        ConfigError: raytf is not installed.
    """
    # A checkout may contain *.egg-info of setuptools, which is found first but is not the metadata of a wheel.
    for package in importlib.metadata.distributions(name=DISTRIBUTION):
        if package.read_text("METADATA"):
            return package
    raise ConfigError(
        f"raytf is not installed, so a project cannot install it either. Run: pip install -e "
        f"{Path(raytf.__file__).parents[1]}"
    )


def _wheel_files(package: Distribution, shipped: Path, stem: str) -> Iterator[tuple[str, bytes]]:
    code = Path(raytf.__file__).parent
    for file in sorted(code.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield f"raytf/{file.relative_to(code)}", file.read_bytes()
    for file in shipped_files(shipped):
        yield f"{stem}.data/data/share/raytf/{file.relative_to(shipped)}", file.read_bytes()
    for name in _METADATA:
        text = package.read_text(name)
        if text is not None:
            yield f"{stem}.dist-info/{name}", text.encode()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name)  # dated 1980 by default
    entry.external_attr = 0o100644 << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
