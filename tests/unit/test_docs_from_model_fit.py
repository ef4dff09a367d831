"""Each row of the table of differences in docs/guides/from-model-fit.md names what tests show."""

from __future__ import annotations

import itertools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "from-model-fit.md"
_ROWS = "ray/test_programs.py::test_rows_of_the_guides_table_of_differences"
_REFUSED = "ray/test_programs.py::test_a_program_that_cannot_be_trained_says_so"
#: The tests of a row, by the beginning of its first cell: a function, or a program that `test_programs.py` runs.
TESTS = {
    "`shuffle=False`": [_ROWS],
    "BatchNorm": [_ROWS, "tf/test_step.py::test_batch_norm_averages_over_shards_and_is_equal_on_all_ranks"],
    "A loss of the whole batch": ["tf/test_losses.py::test_a_loss_of_the_whole_batch_is_named"],
    "A metric of the whole batch": [
        "ray/programs/metrics_of_the_batch.py",
        "tf/test_batch_metrics.py::test_a_metric_whose_batch_is_too_large_is_named_and_left_out",
    ],
    "A NaN or infinite loss": [
        "ray/programs/not_a_number.py",
        "ray/test_bad_input.py::test_a_loss_that_is_not_finite",
    ],
    "`compile()` in a callback": ["ray/programs/compile_in_callback.py"],
    "`BackupAndRestore`": ["tf/test_callbacks.py::test_backup_and_restore_and_the_bar_do_nothing_and_a_line_says_so"],
    "A metric with several numbers": [_ROWS],
    "Layers that were built frozen": ["tf/test_live_objects.py::test_what_was_set_to_be_trained_later_is_trained"],
    "`run_eagerly=True`": ["ray/programs/run_eagerly.py"],
    "Stateful RNNs; ragged tensors": [
        "ray/programs/stateful_rnn.py",
        "ray/programs/ragged_inputs.py",
        "ray/programs/accumulating_step.py",
        _REFUSED,
    ],
    "A loss, layer or metric that changes": ["tf/test_program_variables.py::test_a_step_that_writes_one_is_refused"],
    "`tf.random.set_seed`": [_ROWS],
    "After an exception": [_ROWS],
    "Output of `fit`": [_ROWS],
}


def rows() -> list[str]:
    """The first cells of the table."""
    lines = PAGE.read_text().partition("## What differs from Keras")[2].splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| --- "))
    cells = []
    for line in lines[begin + 1 :]:
        if not line.startswith("|"):
            return cells
        cells.append(line.split("|")[1].strip())
    raise AssertionError("the table does not end")


def test_each_row_has_its_tests():
    found = rows()
    assert len(found) <= 15
    assert len(found) == len(TESTS)
    for cell, beginning in zip(found, TESTS, strict=True):
        assert cell.startswith(beginning)


def test_those_tests_exist():
    for test in itertools.chain(*TESTS.values()):
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not name or f"\ndef {name}(" in text, test
