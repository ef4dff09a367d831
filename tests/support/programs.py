"""Run Keras programs one after another, each in a process that has already imported TensorFlow and Ray.

Importing them takes longer than most programs do. A server imports them once and forks a process for each program, so
that no program sees a setting, a class or a patch of the one before it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: What the server imports before it forks. None of these starts a thread of Ray's, or creates an operation.
_PRELOAD = ["tensorflow", "keras", "ray.train", "raytf.commands.run", "raytf.driver.keras_program"]
_PRELOAD += ["raytf.driver.ray_train.run", "tests.support.programs"]
_OUTCOME = "OUTCOME "
#: The key of an outcome that holds a hash of the weights.
WEIGHTS = "weights_sha256"
RELATIVE = 1e-5


@dataclass(frozen=True)
class Program:
    """A Keras program and what its first lines say about it.

    Attributes:
        path: its file.
        error: the text that its error must contain; empty for a program that trains.
        any_shards: whether its outcome is Keras's with several logical shards, too.
    """

    path: Path
    error: str = ""
    any_shards: bool = False

    @classmethod
    def read(cls, path: Path) -> Program:
        head = path.read_text().splitlines()[:5]
        said = {key: value for key, _, value in (line.removeprefix("# ").partition(": ") for line in head)}
        return cls(path, said.get("error", ""), said.get("shards") == "any")


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: the exit code; None if it did not end in time.
        outcome: what it printed after OUTCOME; None if it printed no such line.
        stdout: what it printed on standard output.
        output: stdout and stderr.
        seconds: how long it ran.
    """

    code: int | None
    outcome: Any
    stdout: str
    output: str
    seconds: float


class Programs:
    """Runs programs in forked processes; a context manager, which stops the server."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)

    def run(
        self, program: Path, folder: Path, flags: Sequence[str] | None, env: Mapping[str, str], seconds: float
    ) -> Ended:
        """Run a program in a new folder.

        Args:
            program: its file.
            folder: where it runs; made here.
            flags: those of `raytf run`; None for plain Keras.
            env: variables to set.
            seconds: after which it is killed.
        """
        folder.mkdir(parents=True)
        process = self._context.Process(target=_main, args=(str(program), str(folder), flags, dict(env)))
        began = time.monotonic()
        process.start()
        process.join(seconds)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        out = (folder / "stdout").read_text(errors="replace") if (folder / "stdout").exists() else ""
        error = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
        lines = [line.removeprefix(_OUTCOME) for line in out.splitlines() if line.startswith(_OUTCOME)]
        outcome = json.loads(lines[0]) if len(lines) == 1 else None
        return Ended(code, outcome, out, out + error, time.monotonic() - began)


def _main(program: str, folder: str, flags: Sequence[str] | None, env: dict[str, str]) -> None:
    """Run one program, in a process of its own, as `python PROGRAM` or `raytf run FLAGS PROGRAM` does."""
    os.environ.update(env)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    code = 1
    try:
        if flags is None:
            sys.argv[:] = [program]
            sys.path[0] = str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
        else:
            from raytf.commands.main import main

            main(["run", *flags, program])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        from raytf.driver.connection import disconnect

        disconnect()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def differences(mine: Any, theirs: Any, relative: float = RELATIVE, path: str = "") -> list[str]:
    """Return where two outcomes differ: floats by more than a relative error, all else at all."""
    at = path or "the outcome"
    if isinstance(theirs, dict) and isinstance(mine, dict):
        if list(mine) != list(theirs):
            return [f"{at} has the keys {list(mine)} instead of {list(theirs)}"]
        return [one for key in theirs for one in differences(mine[key], theirs[key], relative, f"{path}/{key}")]
    if isinstance(theirs, list) and isinstance(mine, list):
        if len(mine) != len(theirs):
            return [f"{at} has {len(mine)} items instead of {len(theirs)}: {mine} and {theirs}"]
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, relative, f"{path}/{i}")]
    if isinstance(mine, float) and isinstance(theirs, float):
        equal = (math.isnan(mine) and math.isnan(theirs)) or bool(np.isclose(mine, theirs, rtol=relative, atol=1e-9))
    else:
        equal = type(mine) is type(theirs) and mine == theirs
    return [] if equal else [f"{at} is {mine} instead of {theirs}"]


def without_weights(outcome: Any) -> Any:
    """Return an outcome without the hash of the weights."""
    return {key: value for key, value in outcome.items() if key != WEIGHTS}
