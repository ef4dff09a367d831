"""Choose the run that a program trains: the run that the user named, the program's own run, or with --new a new run."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
from collections.abc import Callable, Collection, Iterator

from raytf.audit import step_replay
from raytf.config.program import Program, replace_new
from raytf.config.train_config import TrainConfig
from raytf.errors import ConfigError, RunMismatchError
from raytf.runs import run_folder, start_command
from raytf.storage.storage import Storage

#: Folder of the first run of a program that calls `model.fit`, below the program's name; it holds the start command.
FIRST_OF_PROGRAM = "1"
#: URIs of the runs that this process has started with --new; a job that trains twice starts two.
_STARTED: set[str] = set()


def named(config: TrainConfig, program: Program) -> TrainConfig:
    """Return the settings with the run named after the program, unless the user named the run."""
    if config.run.new and step_replay.is_requested():
        raise ConfigError("--new cannot recompute steps of an existing run. Pass that run's name as --run instead.")
    return config.replace(run=program.name) if config.run.run is None else config


def settled(
    config: TrainConfig,
    program: Program,
    is_named: bool,
    say: Callable[[str], None],
    first: str = "",
    started: set[str] = _STARTED,
) -> TrainConfig:
    """Return the settings, naming a run that the program may train.

    Args:
        config: settings in which the run has a name; see `named`.
        program: the program that this process runs.
        is_named: whether the user named the run. If not, the run must not belong to another program.
        say: prints a line for the user.
        first: folder of the first run below the name, for a program with several runs.
        started: the runs that this process has started with --new.
    """
    storage, name = Storage(config.storage_uri), config.run.name
    if config.run.new:
        free = _new(storage, name, start_command.of_process(program.path), first, started)
        new, run = ("--new", "--run {}") if config.is_from_flags else ("new=True", "run={!r}")
        before = f"{run.format(name)} and {new}" if is_named else new
        replace_new(before, run.format(free))
        say(f"{new} starts run {free}; to continue it later, replace {before} with {run.format(free)}")
        return config.replace(run=free, new=False)
    if not is_named:
        with config.named_as_typed():
            _check_program(storage, name, program.path, first)
            what = conflict(storage.list(name), bool(first))
            if what:
                raise RunMismatchError(
                    f"{storage.locate(name)} holds {what}. Name this run with --run NAME, or start {name}-2 with --new."
                )
    return config


@contextlib.contextmanager
def unused_removed(config: TrainConfig, is_new: bool) -> Iterator[None]:
    """Delete the folder that --new created for a program's runs if the program exits without training."""
    try:
        yield
    finally:
        place = Storage(config.storage_uri).child(config.run.name)
        if is_new and [file.name for file in place.files()] == [f"{FIRST_OF_PROGRAM}/{start_command.FILE}"]:
            place.delete("")


def conflict(entries: Collection[str], is_program: bool) -> str:
    """Return a description of the folder's contents that prevent keeping a run (or a program's runs) there, or ""."""
    names = {entry.rstrip("/") for entry in entries}
    if run_folder.SEARCH in names:
        return "a search of `raytf tune`"
    has_run = bool(names & {*run_folder.FILES, *run_folder.FOLDERS})
    if is_program:
        return "a run that was not started by `raytf run`" if has_run else ""
    is_program_there = FIRST_OF_PROGRAM in names and not has_run
    return "the runs of a program that was started by `raytf run`" if is_program_there else ""


def candidates(name: str, taken: Collection[str]) -> list[str]:
    """Return the existing runs that --new may have started for a name, in order: NAME, NAME-2 and so on."""
    number = re.compile(rf"{re.escape(name)}-([2-9]|[1-9]\d+)")
    runs = {1: name} if name in taken else {}
    runs |= {int(match[1]): match[0] for match in map(number.fullmatch, taken) if match}
    return [runs[key] for key in sorted(runs)]


def _new(storage: Storage, name: str, command: start_command.StartCommand, first: str, started: set[str]) -> str:
    """Return the name of a run that does not exist yet, or that an earlier job of this submission has started."""
    there = {entry.rstrip("/") for entry in storage.list()}
    inside = f"/{first}" if first else ""
    for known in candidates(name, there) if command.submission else ():
        run = storage.child(known + inside)
        before = start_command.read_or_none(run)
        if before is not None and before.submission == command.submission and run.uri not in started:
            started.add(run.uri)
            return known
    for number in itertools.count(1):
        free = name if number == 1 else f"{name}-{number}"
        run = storage.child(free + inside)
        # If two commands start at once, one of them creates the file.
        if free not in there and run.create(start_command.FILE, start_command.encoded(command)):
            started.add(run.uri)
            return free
    raise AssertionError  # there are more numbers than runs


def _check_program(storage: Storage, name: str, path: str, first: str) -> None:
    before = start_command.read_or_none(storage.child(f"{name}/{first}" if first else name))
    if before is not None and before.is_another_program(path, socket.gethostname()):
        raise RunMismatchError(
            f"run {name!r} in {storage.locate('')} belongs to {before.program}, and this program is {path}. Name this "
            f"program's run with --run NAME, start {name}-2 with --new, or continue that run with --run {name}."
        )
