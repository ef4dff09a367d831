"""`raytf rm RUN ...`: delete runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from raytf.commands._places import RUN_MARKS, run_uri
from raytf.commands._table import size_text
from raytf.config.terminal_text import say, visible
from raytf.errors import ConfigError, RunInUseError
from raytf.runs import inventory, run_folder
from raytf.runs.lease import LEASE_FILE, Lease, is_held
from raytf.storage.local_files import StoredFile
from raytf.storage.storage import Storage

#: Files that `raytf tune` adds to its trials and to the copy of the best trial.
_OF_SEARCHES = ("job.log", "parameters.json")
#: Maximum number of foreign entries that a refusal names.
_NAMED = 3


@dataclass(frozen=True)
class Remove:
    """Delete runs with all their files: checkpoints, results, exported models and logs. The name of a program or of a
    search stands for all of its runs. raytf asks first, and refuses to delete a run that is being trained.
    """

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of runs: STORAGE/NAME, such as s3://bucket/runs/mnist; or names of runs in ~/raytf-runs."""
    yes: bool = False
    """Delete without asking."""


@dataclass(frozen=True)
class Removal:
    """A planned deletion.

    Attributes:
        place: the folder of a run, of a program's runs, or of a search.
        owners: the folders in it that have a lease, one for each run or one for the search.
        what: a description of its content, for people.
        bytes: the size of all files.
    """

    place: Storage
    owners: tuple[str, ...]
    what: str
    bytes: int


def main(flags: Remove) -> None:
    """Run the command."""
    if not flags.runs:
        raise ConfigError("No run given. Usage: raytf rm RUN ..., such as raytf rm mnist. `raytf runs` lists them.")
    removals = [find(Storage(run_uri(text))) for text in dict.fromkeys(flags.runs)]
    for removal in removals:
        say(f"{removal.place.locate('')}: {removal.what}, {size_text(removal.bytes)}")
    if not (flags.yes or _is_confirmed(len(removals))):
        say("nothing was deleted")
        return
    for removal in removals:
        remove(removal)
        say(f"deleted {removal.place.locate('')}, which frees {size_text(removal.bytes)}")


def find(place: Storage) -> Removal:
    """Plan the deletion of a folder.

    Args:
        place: the folder of a run, of a program's runs, or of a search.

    Raises:
        ConfigError: the folder is none of these, or has files that raytf did not write.
        RunInUseError: a live process owns a run in it.
    """
    files = place.files()
    where = place.locate("")
    owners = [name.removeprefix("run").strip("/") for name, _ in inventory.runs_in("run", files)]
    is_program = owners != [""]
    if not owners or (is_program and not all(name.isdecimal() for name in owners)):
        raise ConfigError(
            f"{where} is not a run. Expected the folder of a run, STORAGE/NAME, or the name of a run in ~/raytf-runs. "
            "`raytf runs` lists the runs of a storage."
        )
    is_search = any(file.name == f"{run_folder.SEARCH}/{run_folder.SEARCH_IDENTITY}" for file in files)
    others = foreign([file.name for file in files], len(owners) if is_program else 0, is_search)
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise ConfigError(
            f"{where} also has files that raytf did not write: {', '.join(map(visible, others[:_NAMED]))}{more}. Move "
            "them elsewhere first, or delete the folder yourself."
        )
    for file in files:
        above, _, name = f"/{file.name}".rpartition("/")
        if name == LEASE_FILE and is_held(place.child(above.strip("/")) if above else place):
            raise RunInUseError(
                f"{place.locate(above.strip('/'))} is in use by a live process. Stop it first, with Ctrl-C in its "
                "terminal or with `ray job stop`, then delete the run."
            )
    if is_search:
        trials = {file.name.partition("/")[0] for file in files if file.name.startswith(run_folder.TRIAL)}
        return Removal(place, (run_folder.SEARCH,), f"a search with {_count(len(trials), 'trial')}", _sum(files))
    what = f"a program with {_count(len(owners), 'run')}" if is_program else "a run"
    return Removal(place, tuple(owners), what, _sum(files))


def foreign(files: Sequence[str], runs: int, is_search: bool) -> list[str]:
    """Return the entries of a folder, up to the level of its runs, that raytf does not write.

    Args:
        files: names of all files in the folder.
        runs: how many runs of a program it holds; 0 for the folder of one run or of a search.
        is_search: whether it is the folder of a search.
    """
    entries = []
    for name in files:
        above, inner = name.partition("/")[::2] if runs or is_search else ("", name)
        if runs and not above.isdecimal():
            entries.append(above)
        elif is_search and above in (run_folder.SEARCH,):
            continue
        elif is_search and above != run_folder.BEST_TRIAL and not above.startswith(run_folder.TRIAL):
            entries.append(above)
        elif not _is_own(inner.partition("/")[0]):
            entries.append(f"{above}/{inner.partition('/')[0]}".strip("/"))
    return list(dict.fromkeys(entries))


def remove(removal: Removal) -> None:
    """Delete the files of a removal, while holding the leases so that no other process can start its runs.

    Raises:
        RunInUseError: a process has started one of the runs since the check.
        StorageError: the storage refuses.
    """
    place = removal.place
    with contextlib.ExitStack() as leases:
        for owner in removal.owners:
            leases.enter_context(Lease(place.child(owner) if owner else place, say))
        for base in removal.owners if removal.owners[0].isdecimal() else ("",):
            inside = f"{base}/" if base else ""
            entries = {entry.rstrip("/") for entry in place.list(base)} - {LEASE_FILE, run_folder.SEARCH}
            # Delete the files that mark a run last, so that an interrupted deletion can be repeated.
            for entry in sorted(entries, key=lambda entry: entry in RUN_MARKS):
                place.delete(f"{inside}{entry}")
    place.delete("")


def _is_own(entry: str) -> bool:
    known = {*run_folder.FILES, *run_folder.FOLDERS, *run_folder.SOMETIMES, *_OF_SEARCHES}
    return entry in known or entry.startswith(".") or entry.removesuffix(".claims") in known


def _is_confirmed(count: int) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("raytf rm asks before it deletes, but there is no terminal to ask on. Pass --yes.")
    try:
        return input(f"delete {'it' if count == 1 else 'them'}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _sum(files: Sequence[StoredFile]) -> int:
    return sum(file.bytes for file in files)
