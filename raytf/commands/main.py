"""The command `raytf`: looks at runs, checks them, and does what a node of a cluster needs."""

from __future__ import annotations

import difflib
import importlib
import sys

import raytf
from raytf.config.command_line import cli
from raytf.config.terminal_text import printable, visible

#: Subcommand -> module with a `main` that takes a dataclass of flags; the text is what the overview says.
COMMANDS: dict[str, tuple[str, str]] = {
    "runs": ("runs", "list the runs of a storage: state, steps, metric, size"),
    "show": ("show", "what became of a run, and where its time went"),
    "ui": ("ui", "show the runs of a storage in a browser, live"),
    "report": ("report", "draw a run as a page: curves, timeline, restarts, ledger"),
    "run": ("run", "run a Keras program as it is, with its training on workers"),
    "tune": ("tune", "try values of a job's flags, each in a run of its own, and keep the best"),
    "replay": ("replay", "compute a step of a run again, and compare it bit for bit"),
    "bisect": ("bisect", "find the first step at which two runs part, and why"),
    "prove": ("prove", "check that a run's records fit together, and compute a share of its steps again"),
    "verify": ("verify", "check every byte of a run's checkpoints, and say what a resume restores"),
    "data": ("data", "convert data to TFRecord or Parquet, and find what is damaged in them"),
    "export": ("export", "make a checkpoint a version for TensorFlow Serving, a .keras file or ONNX"),
    "serve": ("serve", "serve a model with the REST API of TensorFlow Serving, on Ray Serve"),
    "predict": ("predict", "predict for each record of a data set, on Ray Data"),
    "check": ("check", "find what is wrong with a cluster's YAML, before it costs money"),
    "down-check": ("down_check", "what a torn-down cluster left behind, and what it costs"),
    "submit": ("submit", "run a job on a cluster, and again when its driver or the head died, until it finishes"),
    "watch": ("watch", "run a Ray node that leaves in time on SIGTERM or on a notice of its cloud"),
}


def main(args: list[str] | None = None) -> None:
    """Run a subcommand; see `raytf --help`."""
    printable()
    argv = sys.argv[1:] if args is None else args
    if argv[:1] in ([], ["-h"], ["--help"], ["help"]):
        print(_overview())
        sys.exit(0)
    if argv[0] in ("--version", "-V"):
        print(f"raytf {raytf.__version__}")
        sys.exit(0)
    name = argv[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean raytf {near[0]}?" if near else "raytf --help lists those that there are."
        print(f"error: raytf {visible(name)}: there is no such command. {hint}", file=sys.stderr)
        sys.exit(2)
    module = importlib.import_module(f"raytf.commands.{COMMANDS[name][0]}")
    arguments = getattr(module, "arguments", list)
    cli(module.main, arguments(argv[1:]), prog=f"raytf {name}")


def _overview() -> str:
    width = max(map(len, COMMANDS), default=0)
    lines = [f"    raytf {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: raytf COMMAND ...", "", *lines, "", "`raytf COMMAND --help` says more."])
