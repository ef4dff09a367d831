"""`raytf init DIR`: start a project: a job page, a README and, on request, a cluster's configuration."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

import raytf
from raytf.commands import _shipped, _wheel
from raytf.config.terminal_text import say
from raytf.errors import DISTRIBUTION, ConfigError

#: What `ray up` copies of a checkout so that pip can install it.
_MOUNTS = re.compile(r"^  ~/raytf/(?:raytf|pyproject\.toml|LICENSE): .*\n", re.MULTILINE)
#: The checkout as pip takes it, with extras.
_CHECKOUT = re.compile(r"'\.\[([\w,]+)\]'")


@dataclass(frozen=True)
class Init:
    """Start a project in a folder of its own: a job page to change, and what a cluster needs to run it."""

    folder: tyro.conf.Positional[str]
    """Where to write; created if it is missing. Existing files are never overwritten."""
    cluster: str | None = None
    """Write the configuration of a cluster too, for `ray up`: aws-gpu-spot, aws-gpu-on-demand, gcp-gpu-spot,
    azure-gpu-spot, or local for hosts of your own."""
    job: str = "mnist"
    """The example to start with; `raytf jobs` lists them."""


def main(flags: Init) -> None:
    """Run the command."""
    shipped, into = _shipped.folder(), Path(flags.folder).expanduser()
    _known("--job", flags.job, _shipped.jobs(shipped))
    if flags.cluster is not None:
        _known("--cluster", flags.cluster, _shipped.clusters(shipped))
    wheel = _wheel.for_nodes(shipped)
    texts = project(shipped, flags.job, flags.cluster, None if wheel is None else wheel.name)
    files = {name: text.encode() for name, text in texts.items()}
    if wheel is not None:
        files[wheel.name] = wheel.content
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
        say(f"{wheel.name} is your raytf, which is not released yet")
    say(f"next: cd {flags.folder} && python job.py")
    if flags.cluster is not None:
        say("      fill in what the first lines of cluster.yaml name, then: raytf check cluster.yaml")


def project(shipped: Path, job: str, cluster: str | None, wheel: str | None) -> Mapping[str, str]:
    """Return the text files of a project: path below its folder -> text.

    Args:
        shipped: see `_shipped.folder`.
        job: an example of `shipped`.
        cluster: a configuration of `shipped`.
        wheel: name of the wheel that the project has; None if a registry has this version of raytf.
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
            text = re.sub(r" --storage [^\s']+| --job '[^']*'", "", text)
        files["cluster.yaml"] = _cluster_text(text, cluster, wheel)
        parts.append(_on_a_cluster(files["cluster.yaml"], cluster))
        if "constraints-gpu.txt" in text:
            files["constraints-gpu.txt"] = (shipped / "constraints-gpu.txt").read_text(encoding="utf-8")
        if cluster.startswith("aws"):
            for policy in sorted((shipped / "cluster-configs" / "iam").glob("*.json")):
                files[f"iam/{policy.name}"] = policy.read_text(encoding="utf-8")
    files["README.md"] = "\n".join([*parts, f"More: {_shipped.REPOSITORY}/tree/main/docs\n"])
    return files


def _first(page: str, wheel: str | None) -> str:
    """Return the section of the project's README about its job.

    Args:
        page: the example that it begins with.
        wheel: see `project`.
    """
    extras = "data,ui" if "ImageFolderSource" in page else "ui"
    package = _requirement(wheel, extras)
    lines = [
        "# A raytf project",
        "",
        f"`job.py` is the whole program. {_shipped.summary(page)}",
        "",
        f"    python -m pip install -c constraints.txt '{package}'  # where raytf is not installed",
        "    python job.py                 # on this machine; `--help` has the flags",
    ]
    if "raytf.fit(" in page:
        lines += [
            "    raytf show job                # what became of the run",
            "    raytf ui                      # all runs in a browser, live",
            "",
            "Stop it at any time, even with `kill -9`: the same command continues.",
        ]
    if wheel is not None:
        lines += [
            "",
            f"There is no release of raytf yet, so `{wheel}` holds the raytf that wrote this project.",
            "To change to another raytf, begin another project with it and copy its wheel and `constraints*.txt` here.",
        ]
    return "\n".join([*lines, ""])


def _on_a_cluster(text: str, cluster: str) -> str:
    """Return the section of the project's README about its cluster.

    Args:
        text: of the project's `cluster.yaml`, whose first lines have the commands.
        cluster: the configuration's name.
    """
    commands = "\n".join(re.findall(r"^# ( {4}.*)", text.partition("\ncluster_name:")[0], re.MULTILINE))
    place = cluster.partition("-")[0]
    guide = f"{_shipped.REPOSITORY}/blob/main/docs/clusters/{'on-prem' if place == 'local' else place}.md"
    return f"""## On a cluster

The first lines of `cluster.yaml` say what to fill in. The one-time set-up is described here:
{guide}

Then type in this folder, in this order:

{commands}

`raytf submit` shows what the job prints, and submits it again if its driver or the head node dies. The nodes install
the raytf of this project and the versions of `constraints*.txt`.
"""


def _known(flag: str, name: str, known: Collection[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Expected one of {', '.join(known)}."
    raise ConfigError(f"{flag} {name} is not known. {hint}")


def _requirement(wheel: str | None, extras: str) -> str:
    """Return what pip installs: the released version, or a wheel in the folder in which pip runs."""
    return f"{DISTRIBUTION}[{extras}]=={raytf.__version__}" if wheel is None else f"./{wheel}[{extras}]"


def _cluster_text(text: str, name: str, wheel: str | None) -> str:
    """Return the configuration of a cluster that installs the package instead of the checkout."""
    mount = "" if wheel is None else f"  ~/raytf/{wheel}: {wheel}\n"
    text = _MOUNTS.sub("", text.replace("\nfile_mounts:\n", f"\nfile_mounts:\n{mount}"))
    text = _CHECKOUT.sub(lambda extras: f"'{_requirement(wheel, extras[1])}'", text)
    # Ray wants the same Python on all machines, to the patch level.
    text = re.sub(r"(venv --seed --python) \S+", rf"\1 {platform.python_version()}", text)
    text = re.sub(r"in the root of(\n# | )the checkout", "in this folder", text)
    return _in_project(text, name)


def _in_project(text: str, name: str) -> str:
    """Return a text of the checkout with the names that its files have in a project.

    Args:
        text: of a configuration or an example.
        name: of the configuration, in `cluster-configs`.
    """
    text = text.replace(f"cluster-configs/{name}.yaml", "cluster.yaml").replace("jobs/mnist.py", "job.py")
    text = text.replace("cluster-configs/iam/", "iam/")
    return re.sub(r"(?<![\w/])(docs/[\w/-]+\.md)", rf"{_shipped.REPOSITORY}/blob/main/\1", text)
