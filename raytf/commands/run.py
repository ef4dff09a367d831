"""`raytf run SCRIPT.py`: run an unchanged Keras program, with each `fit` on workers."""

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
    """Run an unchanged Keras program, with its training on workers:
    raytf run --workers 1:4 --storage s3://bucket/runs train.py --its-own flags

    Each `model.fit(...)` of the program is a separate run: NAME/1, NAME/2 and so on. It sets the trained weights in the
    program's model and returns a History. The same command continues where it stopped; finished calls return
    immediately. `evaluate` and `predict` run in the program. NAME is --run, by default the script's name.
    """  # noqa: D415

    program: Annotated[str, Rest("SCRIPT.py [its arguments]")] = ""
    """The script and its arguments, as one text for a shell; passing them at the end is easier."""
    train: Flags = field(default_factory=TrainConfig)


def arguments(args: Sequence[str]) -> list[str]:
    """Return arguments with everything from the first Python file on as the value of --program."""
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
        raise ConfigError(f"No script given. {_EXPECTED}")
    flags.train.check()
    with _process.working("importing Ray"):
        from raytf.driver import keras_program

    keras_program.run(words[0], words[1:], flags.train)
