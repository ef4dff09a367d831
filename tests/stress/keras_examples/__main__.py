"""Runs Keras programs by plain Keras and by `raytf run`, none of them changed, and compares.

    python -m tests.stress.keras_examples [--only NAME ...] [--markdown]

Each program in `programs/` has the shape of one on keras.io, which its first line names. With one logical shard the
loss of each of the first 20 steps must be plain Keras's; a program that says `# draws: ...` draws what Keras draws
otherwise, so its losses are not compared. With as many shards as are usual (four), one worker and two must end with the
same weights, to the bit, and the losses must be Keras's again. The exceptions are programs with BatchNormalization,
whose statistics are those of a shard; programs whose loss looks at the whole batch, of which raytf warns; and a `fit`
of arrays, whose batches have other records with other numbers of shards.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from raytf.runs.run_log import read_steps
from raytf.testing import Job, environment

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[3]
RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()", "run"]
#: Steps whose losses are compared, and by how much they may differ.
STEPS, RELATIVE = 20, 3e-5
_SECONDS = 300.0
#: What raytf says of a loss that cannot be cut into shards.
WHOLE_BATCH = "looks at the whole batch"


@dataclass(frozen=True)
class Arguments:
    """Run Keras programs on workers, and compare them with plain Keras."""

    only: tuple[str, ...] = ()
    """Names of programs; by default all."""
    markdown: bool = False
    """Print the table of the docs in the end."""


@dataclass(frozen=True)
class Row:
    """What was found of a program: its page and, where one of them is wrong, why."""

    name: str
    page: str
    draws: str
    difference: float | None
    cut: float | None
    fits: int
    problem: str


def main(arguments: Arguments) -> int:
    names = arguments.only or sorted(path.stem for path in PROGRAMS.glob("*.py"))
    rows = []
    for name in names:
        began = time.monotonic()
        rows.append(tried(PROGRAMS / f"{name}.py"))
        print(f"{line(rows[-1])}  {time.monotonic() - began:.0f} s", flush=True)
    wrong = [row.name for row in rows if row.problem]
    if arguments.markdown:
        print(*("| " + " | ".join(cells) + " |" for cells in table(rows)), sep="\n")
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} programs run as they are"
        + (f"; not {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


def tried(program: Path) -> Row:
    """Run one program in each way."""
    page, draws = described(program)
    difference, cut, fits = None, None, 0
    try:
        with tempfile.TemporaryDirectory(prefix="raytf-examples-") as folder:
            place = Path(folder)
            plain = plainly(program, place)
            losses, fits = [fit["losses"] for fit in plain], len(plain)
            run(program, place, "alone", 1, "--logical-shards", 1)
            if not draws:
                difference = max(compared(theirs, place / "alone" / str(n + 1)) for n, theirs in enumerate(losses))
            ends = [run(program, place, f"of-{workers}", workers) for workers in (1, 2)]
            is_whole = WHOLE_BATCH in (place / "of-1.log").read_text()
            if not (draws or is_whole or "BatchNormalization" in program.read_text()):
                alike = [n for n, fit in enumerate(plain) if fit["has_batches"]]
                cut = max((compared(losses[n], place / "of-1" / str(n + 1)) for n in alike), default=None)
    except ProgramError as error:
        return Row(program.stem, page, draws, difference, cut, fits, str(error))
    problem = "" if ends[0] == ends[1] else "1 and 2 workers end with other weights"
    for found, shards in ((difference, "one shard"), (cut, "four shards")):
        if found is not None and not found <= RELATIVE:
            problem = f"losses of {shards} differ by {found:.0e}"
    return Row(program.stem, page, draws, difference, cut, fits, problem)


class ProgramError(Exception):
    """A program did not run to its end."""


def described(program: Path) -> tuple[str, str]:
    """The page that a program stands for, and what it draws."""
    text = program.read_text()
    page = (ast.get_docstring(ast.parse(text)) or "").removeprefix("Stands for ").split(":")[0]
    draws = [line.removeprefix("# draws: ") for line in text.splitlines() if line.startswith("# draws: ")]
    return page, draws[0] if draws else ""


def plainly(program: Path, folder: Path) -> list[dict[str, Any]]:
    """For each `fit` in plain Keras the `losses` of its steps, and whether it got batches (`has_batches`)."""
    out = folder / "losses.json"
    command = [sys.executable, "-m", "tests.stress.keras_examples.plain", str(program), str(out)]
    finish(
        "plain Keras", Job(command, folder / "plain.log", environment(KERAS_BACKEND="tensorflow", PYTHONPATH=str(ROOT)))
    )
    return json.loads(out.read_text())


def run(program: Path, folder: Path, name: str, workers: int, *more: object) -> list[str]:
    """The hash of the weights after each `fit` on workers."""
    flags = ["--storage", folder, "--run", name, "--workers", workers, *more]
    command = [*RAYTF, *map(str, flags), str(program)]
    finish(f"{workers} workers", Job(command, folder / f"{name}.log", environment()))
    results = sorted((folder / name).glob("*/result.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text())["weights_sha256"] for path in results]


def finish(what: str, job: Job) -> None:
    with job:
        try:
            job.wait(_SECONDS)
        except AssertionError as error:
            said = [line for line in job.output.splitlines() if "rror" in line]
            raise ProgramError(f"{what}: {said[-1] if said else error}"[:300]) from error


def compared(theirs: list[float], run: Path) -> float:
    """The largest relative difference of the first losses."""
    mine, theirs = read_steps(str(run))["loss"][:STEPS], theirs[:STEPS]
    if len(mine) != len(theirs):
        raise ProgramError(f"{len(mine)} steps, and {len(theirs)} in plain Keras")
    return float(np.max(np.abs(mine - theirs) / np.maximum(np.abs(theirs), 1e-6)))


def line(row: Row) -> str:
    return f"{row.name:28} {row.fits} fit  {of_losses(row):40} {row.problem or 'ok'}"


def of_losses(row: Row) -> str:
    """What is said of the losses."""
    if row.draws:
        return f"draws {row.draws}"
    found = [("one shard", row.difference), ("four", row.cut)]
    return ", ".join(f"{shards} within {value:.1e}" for shards, value in found if value is not None)


def table(rows: list[Row]) -> list[list[str]]:
    """The table of the docs."""
    found = [["page", "`fit`s", "losses of steps", "1 and 2 workers"], ["---"] * 4]
    for row in rows:
        found.append([row.page, str(row.fits), of_losses(row), row.problem or "equal bits"])
    return found


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
