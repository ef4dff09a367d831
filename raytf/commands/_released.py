"""Texts of the checkout, as somebody needs them who has the package and no checkout."""

from __future__ import annotations

import re

from raytf.errors import DISTRIBUTION

#: What `ray up` copies of a checkout so that pip can install it.
_MOUNTS = re.compile(r"^  ~/raytf/(?:raytf|pyproject\.toml|LICENSE): .*\n", re.MULTILINE)
#: The checkout as pip takes it, with extras.
_CHECKOUT = re.compile(r"'\.\[([\w,]+)\]'")


def requirement(version: str, wheel: str | None, extras: str) -> str:
    """Return what pip installs: the version that a registry has, or a wheel in the folder in which pip runs.

    Args:
        version: of the package.
        wheel: name of that file; None for the registry.
        extras: such as `data,ui`.
    """
    return f"{DISTRIBUTION}[{extras}]=={version}" if wheel is None else f"./{wheel}[{extras}]"


def cluster(text: str, name: str, version: str, wheel: str | None, python: str, repository: str) -> str:
    """Return a cluster's configuration that installs the package in place of the checkout.

    Args:
        text: of `cluster-configs/NAME.yaml`.
        name: that NAME.
        version: of the package.
        wheel: see `requirement`; mounted on each node.
        python: version that the machine here has, to the patch level: Ray wants the same everywhere.
        repository: address of the code, for what the text refers to.
    """
    mount = "" if wheel is None else f"  ~/raytf/{wheel}: {wheel}\n"
    text = _MOUNTS.sub("", text.replace("\nfile_mounts:\n", f"\nfile_mounts:\n{mount}"))
    text = _CHECKOUT.sub(lambda found: f"'{requirement(version, wheel, found[1])}'", text)
    text = re.sub(r"(venv --seed --python) \S+", rf"\1 {python}", text)
    text = re.sub(r"in the root of(\n# | )the checkout", "in this folder", text)
    return _here(text, name, repository)


def job(text: str, name: str, repository: str) -> str:
    """An example as `job.py`, with the commands that start it there.

    Args:
        text: of `jobs/NAME.py`.
        name: that NAME.
        repository: address of the code.
    """
    return _here(text.replace(f"jobs/{name}.py", "job.py"), name, repository)


def _here(text: str, name: str, repository: str) -> str:
    text = text.replace(f"cluster-configs/{name}.yaml", "cluster.yaml").replace("jobs/mnist.py", "job.py")
    text = text.replace("cluster-configs/iam/", "iam/")
    return re.sub(r"(?<![\w/])(docs/[\w/-]+\.md)", rf"{repository}/blob/main/\1", text)
