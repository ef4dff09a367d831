"""Texts of the checkout, as somebody needs them who has the released package and no checkout."""

from __future__ import annotations

import re

from raytf.errors import DISTRIBUTION

#: What `ray up` copies of a checkout so that pip can install it.
_MOUNTS = ("raytf", "pyproject.toml", "LICENSE")
#: The checkout as pip takes it, with extras.
_CHECKOUT = re.compile(r"'\.\[([\w,]+)\]'")


def cluster(text: str, name: str, version: str, python: str, repository: str) -> str:
    """A cluster's configuration that installs the released package in place of the checkout.

    Args:
        text: of `cluster-configs/NAME.yaml`.
        name: that NAME.
        version: of the package.
        python: version that the machine here has, to the patch level: Ray wants the same everywhere.
        repository: address of the code, for what the text refers to.
    """
    mounts = "|".join(map(re.escape, _MOUNTS))
    text = re.sub(rf"^  ~/raytf/(?:{mounts}): .*\n", "", text, flags=re.MULTILINE)
    text = _CHECKOUT.sub(rf"'{DISTRIBUTION}[\1]=={version}'", text)
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
