"""`raytf jobs`: list the examples that a project can start with."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.commands import _shipped
from raytf.config.terminal_text import say


@dataclass(frozen=True)
class Jobs:
    """List the example jobs; `raytf init DIR --job NAME` starts a project with one."""


def main(flags: Jobs) -> None:
    """Run the command."""
    examples = _shipped.jobs(_shipped.folder())
    width = max(map(len, examples))
    for name, text in examples.items():
        say(f"{name:<{width}}  {text}")
    say(f"\nraytf init DIR --job {next(iter(examples))} starts a project with one", lines=True)
