"""Which names of objects may become names of local files.

An object store takes any text for a name: `../../etc/passwd`, `/etc/passwd`, `a//b`. On a file system such a name leads
elsewhere, or to the file of another name.
"""

from __future__ import annotations

import re

from raytf.errors import StorageError

_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_SHOWN = 200


def leads_elsewhere(name: str) -> bool:
    """Whether a name with '/' has a part that a file system or a library takes for something else than a name."""
    return "\0" in name or any(part in ("", ".", "..") for part in name.split("/"))


def is_plain(name: str) -> bool:
    """Whether a name means one file below a folder, on any file system."""
    return not (leads_elsewhere(name) or "\\" in name or _DRIVE.match(name) or _CONTROL.search(name))


def check_plain(name: str, where: str) -> None:
    """Do nothing for a plain name.

    Args:
        where: the folder that has it, as a person would look for it.

    Raises:
        StorageError: the name is refused.
    """
    if not is_plain(name):
        raise refusal(name, where)


def refusal(name: str, where: str) -> StorageError:
    """The error about a name that is refused."""
    shown = ascii(name)  # it may hold what a terminal obeys
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}..."
    return StorageError(
        f"{where} has a file with the name {shown}, which is not a plain relative name (such as a/b.txt): it could be "
        "written outside its folder. Nothing was written. Delete or rename it.",
        "refused",
    )
