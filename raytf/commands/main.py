"""The command `raytf`: find the subcommand, and run it with its flags."""

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

#: Former name of a subcommand -> its name now. The former name still works, and prints the new one.
RENAMED = {"watch": "node"}
#: Name of a subcommand in other tools -> its name here.
_ELSEWHERE = {"train": "run", "fit": "run", "delete": "rm", "remove": "rm"}
#: Subcommand -> its module, or a function in one, and what the overview says. The function takes a dataclass of flags;
#: by default it is called `main`, and a module without it has SUBCOMMANDS.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init", "start a project: a job page, and a cluster's configuration"),
    "jobs": ("init.list_jobs", "list the example jobs that `raytf init` can start with"),
    "runs": ("runs", "list the runs of a storage: state, steps, metric, size"),
    "show": ("show", "show the state of a run, and where its time went"),
    "ui": ("ui", "show the runs of a storage in a browser, live"),
    "report": ("report", "draw a run as a page: curves, timeline, restarts, ledger"),
    "run": ("run", "run a Keras program as it is, with its training on workers"),
    "tune": ("tune", "try values of a job's flags, each in a run of its own, and keep the best"),
    "replay": ("replay", "compute a step of a run again, and compare it bit for bit"),
    "bisect": ("bisect", "find the first step at which two runs differ, and why"),
    "prove": ("prove", "check that a run's records fit together, and compute a share of its steps again"),
    "rm": ("rm", "delete runs, with all their files"),
    "verify": ("verify", "check every byte of a run's checkpoints, and say what a resume restores"),
    "data": ("data", "convert data to TFRecord or Parquet, and find what is damaged in them"),
    "export": ("export", "make a checkpoint a version for TensorFlow Serving, a .keras file or ONNX"),
    "serve": ("serve", "serve a model with the REST API of TensorFlow Serving, on Ray Serve"),
    "predict": ("predict", "predict for each record of a data set, on Ray Data"),
    "check": ("check", "find what is wrong with a cluster's YAML, before it costs money"),
    "down-check": ("down_check", "find what a torn-down cluster left behind, and what it costs"),
    "submit": ("submit", "run a job on a cluster, and again if its driver or the head dies, until it finishes"),
    "autostop": ("autostop", "have a cluster's machines end themselves when no job has run for a while"),
    "node": ("node", "run a Ray node that leaves in time on SIGTERM or on a notice of its cloud"),
}


def main(args: list[str] | None = None) -> None:
    """Run a subcommand; see `raytf --help`."""
    printable()
    argv = sys.argv[1:] if args is None else args
    if not hasattr(raytf, "__version__"):  # its __init__.py is empty, and was written over that of this package
        print(f"error: {FOREIGN}", file=sys.stderr)
        sys.exit(2)
    if argv[:1] in (["--version"], ["-V"]):
        print(f"raytf {raytf.__version__}")
        sys.exit(0)
    if argv[:1] and argv[0] in RENAMED:
        now = RENAMED[argv[0]]
        print(f"raytf {argv[0]} is called raytf {now} now, and does the same", file=sys.stderr)
        argv = [now, *argv[1:]]
    name = _chosen("raytf", argv, {name: text for name, (_, text) in COMMANDS.items()})
    module, run = load(name)
    prog, rest = f"raytf {name}", argv[1:]
    if run is None:  # it has subcommands
        if not rest:
            names = " or ".join(module.SUBCOMMANDS)
            print(f"error: {prog}: expected {names}. {prog} --help says more.", file=sys.stderr)
            sys.exit(2)
        name = _chosen(prog, rest, {name: _summary(command) for name, command in module.SUBCOMMANDS.items()})
        prog, run, rest = f"{prog} {name}", module.SUBCOMMANDS[name], rest[1:]
    arguments = module.arguments(rest) if hasattr(module, "arguments") else with_rest(run, rest)
    cli(_bounded(run), arguments, prog=prog)


def load(name: str) -> tuple[Any, Callable[[Any], object] | None]:
    """Import a subcommand.

    Returns:
        Its module and its function; None for one that has subcommands of its own.
    """
    file, _, function = COMMANDS[name][0].partition(".")
    module = importlib.import_module(f"raytf.commands.{file}")
    return module, getattr(module, function or "main", None)


def with_rest(run: Callable[[Any], object], args: list[str]) -> list[str]:
    """Return arguments with everything after `--` as the value of the flag that it stands for, if there is one."""
    if "--" not in args:
        return args
    at = args.index("--")
    for group in flag_parsing.of_command(run):
        for flag in group.flags:
            if any(isinstance(note, Rest) for note in flag.notes):
                return [*args[:at], f"{flag.flag}={shlex.join(args[at + 1 :])}"]
    return args


def _bounded(run: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a command that refuses flags outside the bounds that its fields name."""

    @functools.wraps(run)
    def call(*args: Any, **named: Any) -> None:
        for values in (*args, *named.values()):
            setting.check(values)
        run(*args, **named)

    return call


def _chosen(prog: str, argv: list[str], known: Mapping[str, str]) -> str:
    """Return the subcommand that was typed. If there is none, show the overview or say what is wrong, and exit."""
    if argv[:1] in ([], ["-h"], ["--help"], ["help"]):
        width = max(map(len, known))
        lines = [f"    {prog} {name:<{width}}  {text}" for name, text in known.items()]
        print("\n".join([f"usage: {prog} COMMAND ...", "", *lines, "", f"`{prog} COMMAND --help` says more."]))
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
