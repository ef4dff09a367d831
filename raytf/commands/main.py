"""The command `raytf`, which runs a subcommand with its flags."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

import raytf
from raytf.config import flag_parsing, setting
from raytf.config.command_line import cli
from raytf.config.setting import Rest
from raytf.config.terminal_text import printable, visible
from raytf.errors import FOREIGN

#: Former name of a subcommand -> current name. The former name still works, and prints the current one.
RENAMED = {"watch": "node"}
#: Name of a subcommand in other tools -> its name here.
_ELSEWHERE = {"train": "run", "fit": "run", "delete": "rm", "remove": "rm"}
#: Subcommand -> module or MODULE.FUNCTION, and its text in the overview. The function, by default `main`, takes a
#: dataclass of flags. A module without `main` has SUBCOMMANDS.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init", "start a project: an example job and, on request, a cluster's configuration"),
    "jobs": ("init.list_jobs", "list the example jobs that `raytf init` can start with"),
    "runs": ("runs", "list the runs of a storage: state, steps, metric, size"),
    "show": ("show", "show the state of a run, and how it spent its time"),
    "ui": ("ui", "show the runs of a storage in a browser, live"),
    "report": ("report", "write a run as an HTML page: curves, timeline, restarts, ledger"),
    "run": ("run", "run a Keras program as it is, with its training on workers"),
    "tune": ("tune", "try values of a job's flags, each in a separate run, and keep the best"),
    "replay": ("replay", "compute a step of a run again, and compare it bit for bit"),
    "bisect": ("bisect", "find the first step at which two runs differ, and why"),
    "prove": ("prove", "check that a run's records are consistent, and compute a share of its steps again"),
    "rm": ("rm", "delete runs, with all their files"),
    "verify": ("verify", "check every byte of a run's checkpoints, and show which one a resume restores"),
    "data": ("data", "convert data to TFRecord or Parquet, and find damaged records"),
    "export": ("export", "export a checkpoint for TensorFlow Serving, as a .keras file or as ONNX"),
    "serve": ("serve", "serve a model with the REST API of TensorFlow Serving, on Ray Serve"),
    "predict": ("predict", "predict for each record of a data set, on Ray Data"),
    "check": ("check", "find mistakes in a cluster's YAML, before they cost money"),
    "down-check": ("down_check", "find resources that a deleted cluster left behind, and their cost"),
    "up": ("up", "start a cluster, run a job on it and show the result: one command for all steps"),
    "attach": ("attach", "follow the newest job of a cluster that `raytf up` has started"),
    "submit": ("submit", "run a job on a cluster, and submit it again if its driver or the head dies"),
    "autostop": ("autostop", "have a cluster's machines end themselves when no job has run for a while"),
    "node": ("node", "run a Ray node that drains in time on SIGTERM or a preemption notice"),
}


def main(args: list[str] | None = None) -> None:
    """Run the subcommand in `args`, by default from the command line."""
    printable()
    argv = sys.argv[1:] if args is None else args
    if not hasattr(raytf, "__version__"):  # another package with an empty __init__.py overwrote this one
        print(f"error: {FOREIGN}", file=sys.stderr)
        sys.exit(2)
    if argv[:1] in (["--version"], ["-V"]):
        print(f"raytf {raytf.__version__}")
        sys.exit(0)
    if argv[:1] and argv[0] in RENAMED:
        now = RENAMED[argv[0]]
        print(f"raytf {argv[0]} was renamed to raytf {now}", file=sys.stderr)
        argv = [now, *argv[1:]]
    name = _chosen("raytf", argv, {name: text for name, (_, text) in COMMANDS.items()})
    module, run = load(name)
    prog, rest = f"raytf {name}", argv[1:]
    if run is None:  # it has subcommands
        if not rest:
            names = " or ".join(module.SUBCOMMANDS)
            print(f"error: {prog}: expected {names}. See {prog} --help.", file=sys.stderr)
            sys.exit(2)
        name = _chosen(prog, rest, {name: _summary(command) for name, command in module.SUBCOMMANDS.items()})
        prog, run, rest = f"{prog} {name}", module.SUBCOMMANDS[name], rest[1:]
    arguments = module.arguments(rest) if hasattr(module, "arguments") else with_rest(run, rest)
    cli(_bounded(run), arguments, prog=prog)


def load(name: str) -> tuple[Any, Callable[[Any], object] | None]:
    """Import a subcommand.

    Returns:
        Its module, and its function or None if it has subcommands.
    """
    file, _, function = COMMANDS[name][0].partition(".")
    module = importlib.import_module(f"raytf.commands.{file}")
    return module, getattr(module, function or "main", None)


def with_rest(run: Callable[[Any], object], args: list[str]) -> list[str]:
    """Return arguments with everything after `--` as the value of the flag with a `Rest` annotation, if any."""
    if "--" not in args:
        return args
    at = args.index("--")
    for group in flag_parsing.of_command(run):
        for flag in group.flags:
            if any(isinstance(note, Rest) for note in flag.notes):
                return [*args[:at], f"{flag.flag}={shlex.join(args[at + 1 :])}"]
    return args


def _bounded(run: Callable[[Any], object]) -> Callable[[Any], object]:
    """Wrap a command so that it refuses values outside the bounds of its flags."""

    @functools.wraps(run)
    def call(*args: Any, **named: Any) -> None:
        for values in (*args, *named.values()):
            setting.check(values)
        run(*args, **named)

    return call


def _chosen(prog: str, argv: list[str], known: Mapping[str, str]) -> str:
    """Return the subcommand that was typed. Without a valid one, print the overview or an error, and exit."""
    if argv[:1] in ([], ["-h"], ["--help"], ["help"]):
        width = max(map(len, known))
        lines = [f"    {prog} {name:<{width}}  {text}" for name, text in known.items()]
        print("\n".join([f"usage: {prog} COMMAND ...", "", *lines, "", f"See `{prog} COMMAND --help` for its flags."]))
        sys.exit(0)
    if argv[0] not in known:
        elsewhere = [_ELSEWHERE[argv[0]]] if _ELSEWHERE.get(argv[0]) in known else []
        near = elsewhere or difflib.get_close_matches(argv[0], known, n=1)
        hint = f"Did you mean {prog} {near[0]}?" if near else f"{prog} --help lists the commands."
        print(f"error: {prog} {visible(argv[0])}: unknown command. {hint}", file=sys.stderr)
        sys.exit(2)
    return argv[0]


def _summary(run: Callable[..., object]) -> str:
    text = (inspect.getdoc(run) or "").partition("\n")[0].rstrip(".")
    return text[:1].lower() + text[1:]
