"""`raytf run SCRIPT.py`: run a Keras program as it is, with its `fit` carried out by workers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from raytf import _process
from raytf.config.setting import Rest
from raytf.config.train_config import Flags, TrainConfig
from raytf.errors import ConfigError

_EXPECTED = "Expected: raytf run [flags] SCRIPT.py [its arguments]"


@dataclass(frozen=True)
class Run:
    """Run a Keras program as it is, with its training on workers:
    raytf run --workers 1:4 --storage s3://bucket/runs train.py --its-own flags

    Each `model.fit(...)` of the program is a run of its own, NAME/1, NAME/2 and so on, and returns with the trained
    weights in the program's model and a History. The same command continues where it was stopped: calls that have
    finished return at once. `evaluate` and `predict` stay in the program. NAME is --run, by default the script's name.
    """  # noqa: D415

    program: Annotated[str, Rest("SCRIPT.py [its arguments]")] = ""
    """The script and its arguments, as one text for a shell; or pass them at the end."""
    train: Flags = field(default_factory=TrainConfig)


def arguments(args: Sequence[str]) -> list[str]:
    """Take everything from the first Python file on as the program with its own arguments."""
    own = list(args)
    at = next((i for i, arg in enumerate(own) if arg.endswith(".py") and not arg.startswith("-")), None)
    if at is None:
        return own
    before = own[:at]
    if before[-1:] == ["--"]:
        before.pop()
    return [*before, f"--program={shlex.join(own[at:])}"]


def main(flags: Run) -> None:
    """Run the command."""
    words = shlex.split(flags.program)
    if not words:
        raise ConfigError(f"there is no script. {_EXPECTED}")
    flags.train.check()
    with _process.working("importing Ray"):
        from raytf.driver import keras_program

    keras_program.run(words[0], words[1:], flags.train)
