"""`raytf init DIR`: begins a project: a job page, a README and, where asked for, a cluster's configuration."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro

import raytf
from raytf.commands import _released, _shipped
from raytf.config.terminal_text import say
from raytf.errors import DISTRIBUTION, ConfigError


@dataclass(frozen=True)
class Init:
    """Begin a project in a folder of its own: a job page to change, and what a cluster needs to run it."""

    folder: tyro.conf.Positional[str]
    """Where to write; made where it is missing. Files that are there are never written over."""
    cluster: str | None = None
    """Write the configuration of a cluster too, for `ray up`: aws-gpu-spot, aws-gpu-on-demand, gcp-gpu-spot, gcp-tpu,
    azure-gpu-spot, or local for hosts of your own."""
    job: str = "mnist"
    """The example to begin with; `raytf jobs` lists them."""


def main(flags: Init) -> None:
    """Run the command."""
    shipped, into = _shipped.folder(), Path(flags.folder).expanduser()
    _known("--job", flags.job, _shipped.jobs(shipped))
    if flags.cluster is not None:
        _known("--cluster", flags.cluster, _shipped.clusters(shipped))
    files = project(shipped, flags.job, flags.cluster)
    there = [name for name in files if (into / name).exists()]
    if there or (into.exists() and not into.is_dir()):
        what = f"{into / there[0]} is there already" if there else f"{into} is a file"
        raise ConfigError(f"{what}, and nothing is written over. Give another folder.")
    try:
        for name, text in files.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {into}: {error.strerror}. Give another folder.") from error
    names = dict.fromkeys(f"{name.partition('/')[0]}/" if "/" in name else name for name in files)
    say(f"{into}: {', '.join(names)}")
    say(f"next: cd {flags.folder} && python job.py")
    if flags.cluster is not None:
        say("      fill in what the first lines of cluster.yaml name, then: raytf check cluster.yaml")


def project(shipped: Path, job: str, cluster: str | None) -> Mapping[str, str]:
    """The files of a project: path below its folder -> text.

    Args:
        shipped: see `_shipped.folder`.
        job: an example of `shipped`.
        cluster: a configuration of `shipped`.
    """
    page = (shipped / "jobs" / f"{job}.py").read_text(encoding="utf-8")
    files = {
        "job.py": _released.job(page, job, _shipped.REPOSITORY),
        "README.md": _readme(page, cluster),
        "constraints.txt": (shipped / "constraints.txt").read_text(encoding="utf-8"),
    }
    if cluster is None:
        return files
    configs = shipped / "cluster-configs"
    text = (configs / f"{cluster}.yaml").read_text(encoding="utf-8")
    files["cluster.yaml"] = _released.cluster(
        text, cluster, raytf.__version__, platform.python_version(), _shipped.REPOSITORY
    )
    if "constraints-gpu.txt" in text:
        files["constraints-gpu.txt"] = (shipped / "constraints-gpu.txt").read_text(encoding="utf-8")
    if cluster.startswith("aws"):
        for policy in sorted((configs / "iam").glob("*.json")):
            files[f"iam/{policy.name}"] = policy.read_text(encoding="utf-8")
    return files


def _readme(page: str, cluster: str | None) -> str:
    """The project's README.

    Args:
        page: the example that it begins with.
        cluster: whether there is a cluster's configuration.
    """
    extras = "data,ui" if "ImageFolderSource" in page else "ui"
    lines = [
        "# A raytf project",
        "",
        f"`job.py` is the whole program. {_shipped.summary(page)}",
        "",
        f"    python -m pip install -c constraints.txt '{DISTRIBUTION}[{extras}]=={raytf.__version__}'",
        "    python job.py                 # on this machine; `--help` has the flags",
    ]
    if "raytf.fit(" in page:
        lines += [
            "    raytf show job                # what became of the run",
            "    raytf ui                      # all runs in a browser, live",
            "",
            "Stop it at any time, even with `kill -9`: the same command continues.",
        ]
    lines.append("")
    if cluster is not None:
        lines += [
            "## On a cluster",
            "",
            "The first lines of `cluster.yaml` say what to fill in, and describe the one-time account set-up. Then:",
            "",
            "    raytf check cluster.yaml      # finds mistakes in it before you pay",
            "    ray up -y cluster.yaml",
            "    ray dashboard cluster.yaml    # in another shell: a tunnel to port 8265",
            "    ray job submit --address http://127.0.0.1:8265 --working-dir . -- python job.py --storage s3://BUCKET/runs",
            "    ray down -y cluster.yaml",
            "",
            "Its nodes install the versions of `constraints.txt`, so that they are those of this machine.",
            "",
        ]
    lines += [f"More: {_shipped.REPOSITORY}/tree/main/docs", ""]
    return "\n".join(lines)


def _known(flag: str, name: str, known: Collection[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Expected one of {', '.join(known)}."
    raise ConfigError(f"{flag} {name} is not known. {hint}")
