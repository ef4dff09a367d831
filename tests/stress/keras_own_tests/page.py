"""The page of how Keras's own tests end when workers carry out `fit`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

_BITS = (
    "it compares the loss of the validation in `fit` with that of `evaluate` in the program to the last bit. The first "
    "is a sum over logical shards, which adds the same numbers in another order (relative difference 2e-7)."
)
_RAGGED = (
    "it trains on a RaggedTensor, whose records have no shape. raytf refuses it before training, and says to pad it "
    "and to mask the padding."
)
_RAGGED_TESTS = [
    "keras/src/layers/core/embedding_test.py::EmbeddingTest::test_ragged",
    *(
        f"keras/src/trainers/trainer_test.py::TestTrainer::test_trainer_with_raggeds_{kind}"
        for kind in ("functional", "layer", "model")
    ),
]
_RATE = "keras/src/optimizers/schedules/learning_rate_schedule_test.py::TestFitLRSchedulesFlow::test_fit_lr_correctness"
_SWAP = "keras/src/callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights"
#: Name of a test -> why it cannot pass, for a reason that a Keras developer would accept. At most ten.
EXCLUDED = {
    _SWAP: _BITS,
    f"{_SWAP}_with_loss_scale_optimizer": _BITS,
    _RATE: (
        "it has the losses of `shuffle=False` with batches of neighboring records. With several logical shards the "
        "records of a batch come from as many places; with `--logical-shards 1` the test passes."
    ),
    **dict.fromkeys(_RAGGED_TESTS, _RAGGED),
}

_HEAD = """# Keras's own tests

The wheel of Keras {version} contains Keras's tests. `python -m tests.stress.keras_own_tests --page {path}`
runs the tests that call `fit`, and workers do the training, as with `raytf run`: there are one process and one Ray, and
each `fit` is a separate run. This command wrote this page.

- First plain Keras runs all {files} files that call `fit`. {calling} tests called `keras.Model.fit` and passed.
{numbers}
- A test counts if its `fit` reached a worker, or if raytf refused the call before.
- `trainer_test.py` imports JAX, but uses it with the JAX backend alone, so an empty module replaces it. Its
  `ExampleModel` is a `Trainer` and not a `keras.Model`. Its `fit` is Keras's own and does not count.
"""


@dataclass(frozen=True)
class Summary:
    """What is known of all tests.

    Attributes:
        plain: name of a test -> how it ended with plain Keras.
        not_collected: name of a file -> why plain Keras could not collect its tests.
        tables: number of workers -> name of a test -> how it ended with them.
    """

    plain: dict[str, dict[str, Any]]
    not_collected: dict[str, str]
    tables: dict[int, dict[str, dict[str, Any]]]

    def counted(self, workers: int) -> dict[str, dict[str, Any]]:
        """The tests that plain Keras passes and whose `fit` reached a worker, or was refused."""
        table = self.tables[workers]
        passing = {name: end for name, end in table.items() if self.plain[name]["outcome"] == "passed"}
        return {name: end for name, end in passing.items() if end["reached"] or end["outcome"] != "passed"}

    def failed(self) -> list[tuple[int, str, str]]:
        """(workers, test, why) of all that have not passed and are not excluded."""
        return [
            (workers, name, end["why"])
            for workers in self.tables
            for name, end in self.counted(workers).items()
            if end["outcome"] != "passed" and name not in EXCLUDED
        ]

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield from (f"{workers} workers: {name}: {why}" for workers, name, why in self.failed())
        yield from (self._numbers(workers) for workers in self.tables)

    def _numbers(self, workers: int) -> str:
        every = self.counted(workers)
        counted = {name: end for name, end in every.items() if name not in EXCLUDED}
        passed = sum(end["outcome"] == "passed" for end in counted.values())
        share = 100 * passed / max(1, len(counted))
        count = "1 worker" if workers == 1 else f"{workers} workers"
        left_out = len(every) - len(counted)
        return f"With {count}, {passed} of {len(counted)} tests pass ({share:.1f} %); {left_out} are excluded."


def page(summary: Summary, path: Path) -> str:
    """The page, in Markdown.

    Args:
        summary: what it is about.
        path: its file, which it names.
    """
    calling = [name for name in summary.plain if summary.plain[name]["fits"]]
    passing = [name for name in calling if summary.plain[name]["outcome"] == "passed"]
    files = {name.partition("::")[0] for name in summary.plain} | summary.not_collected.keys()
    numbers = "\n".join(f"- {summary._numbers(workers)}" for workers in summary.tables)
    text = _HEAD.format(path=path, version=keras.__version__, files=len(files), calling=len(passing), numbers=numbers)
    text += "\n## Excluded\n\n" + ("".join(f"- `{name}`: {why}\n" for name, why in EXCLUDED.items()) or "None.\n")
    text += "\n## Not run\n\nPlain Keras cannot run these here, so they say nothing about raytf.\n\n"
    text += "".join(f"- `{name}`: {_cell(why)}\n" for name, why in sorted(summary.not_collected.items()))
    lacking = {name: end["why"] for name, end in summary.plain.items() if end["outcome"] == "failed"}
    text += "".join(f"- `{name}`: {_cell(why)}\n" for name, why in sorted(lacking.items()))
    text += "\n## Tests\n\n"
    heads = ["test", *("1 worker" if n == 1 else f"{n} workers" for n in summary.tables)]
    text += f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n"
    counted = {name for workers in summary.tables for name in summary.counted(workers)}
    for name in sorted(counted):
        ends = [_cell(_end(table[name])) for table in summary.tables.values()]
        text += f"| {name.removeprefix('keras/src/').replace('::', ' ')} | {' | '.join(ends)} |\n"
    return text


def _end(end: dict[str, Any]) -> str:
    return "passed" if end["outcome"] == "passed" else f"{end['outcome']}: {end['why']}"


def _cell(text: str) -> str:
    return textwrap.shorten(text, 200, placeholder=" ...").replace("|", "\\|")
