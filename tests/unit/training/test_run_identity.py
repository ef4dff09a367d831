"""What is compared of runs: equal where nothing differs that counts, different where something does."""

import functools

import numpy as np
import pytest

from raytf.config import canonical_text
from raytf.data.sources import ArraySource, CsvSource
from raytf.training import run_identity

X = np.arange(400, dtype=np.float32).reshape(100, 4)
ALPHA = 0.3
CALLS = "def f(a):\n    return g(a)"


def test_arrays_are_told_apart_by_any_of_their_records():
    y = np.zeros(100, np.int64)
    same = run_identity.contents(ArraySource(X, y))
    assert run_identity.contents(ArraySource(X.copy(), y.copy())) == same
    other = y.copy()
    other[37] = 1  # none of the 16 records that a sample has
    assert run_identity.contents(ArraySource(X, other)) != same
    assert run_identity.contents(ArraySource(X.astype(np.float64), y)) != same
    assert run_identity.contents(ArraySource(X.reshape(100, 2, 2), y)) != same
    assert run_identity.contents(ArraySource(X[:99], y[:99])) != same
    assert run_identity.contents(ArraySource({"a": X}, y)) != same
    assert run_identity.contents(None) == "none"
    assert run_identity.contents(ArraySource(np.zeros((3, 0), np.float32))).startswith("3 records")


def test_large_arrays_are_read_in_parts():
    large = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (40_000, 1 << 20), (0, 0))
    assert run_identity.contents(ArraySource(large)).startswith("40000 records")  # 40 GB, of which no machine holds all


def test_files_that_were_moved_are_the_same_data(tmp_path):
    for name, last in {"a": 3, "b": 3, "c": 4}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.csv").write_text(f"x,label\n1,0\n2,1\n{last},0\n")
    prints = [run_identity.contents(CsvSource(str(tmp_path / name))) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


FULL = {
    "--seed": "0",
    "training data": "5 records, sample CRC-32 1",
    "model architecture": "1",
    "model structure": "1",
    "model optimizer": 'Adam {"learning_rate": 0.1, "name": "adam"}',
    "model loss": '["mse"]',
    "model loss weights": "null",
    "contents of the training data": "c",
    "model compiled metrics": '["mae"]',
    "validation data": "v",
    "test data": "t",
    "code of the model": "k",
    "arithmetic (a hash of the first gradients on this kind of machine)": "a",
}
OLD = {k: v for k, v in FULL.items() if k in ("--seed", "training data", "model architecture", "model loss")}


@pytest.mark.parametrize(
    ("before", "change", "goes_on", "answers"),
    [
        (FULL, {}, True, True),
        (FULL, {"model architecture": "2"}, True, True),  # Keras numbered its layers otherwise
        (FULL, {"model structure": "2"}, False, False),
        (FULL, {"model optimizer": 'Adam {"learning_rate": 0.1, "name": "adam_3"}'}, True, True),
        (FULL, {"model optimizer": 'Adam {"learning_rate": 0.2, "name": "adam"}'}, False, False),
        (FULL, {"model loss": '["mae"]'}, False, False),
        (FULL, {"model loss": '["<lambda> at 0x7f00"]'}, False, False),
        (FULL, {"model loss weights": "[1, 2]"}, False, False),
        (FULL, {"contents of the training data": "d"}, False, False),
        (FULL, {"training data": "5 records, sample CRC-32 2"}, False, False),
        (FULL, {"validation data": "w"}, True, False),
        (FULL, {"test data": "none"}, True, False),
        (FULL, {"model compiled metrics": '["mse"]'}, True, False),
        (FULL, {"code of the model": "l"}, True, False),
        (FULL, {"arithmetic (a hash of the first gradients on this kind of machine)": "b"}, False, True),
        (FULL, {"arithmetic (a hash of the first step on this kind of GPU)": "b"}, False, True),
        (FULL, {"TF32": "off"}, False, True),
        (FULL, {"cuDNN's workspace": "any MiB"}, False, True),
        (OLD, {}, True, True),
        (OLD, {"model architecture": "2"}, False, False),
        (OLD, {"model loss": '["mae"]'}, False, False),
    ],
)
def test_what_may_differ(before, change, goes_on, answers):
    now = {k: v for k, v in FULL.items() if k != "model optimizer" or k in before}
    now = {k: v for k, v in now.items() if k in before or not k.startswith("arithmetic")} | change
    assert (not run_identity.resume_mismatch(before, now)) == goes_on
    assert (not run_identity.result_mismatch(before, now)) == answers
    said = run_identity.result_mismatch(before, now)
    assert answers or all(key in said for key in change)


def test_an_address_is_no_difference():
    assert canonical_text.plainly("<f at 0x7f1>") == canonical_text.plainly("<f at 0x7f2>")


def layer(name, units):
    return {"class_name": "Dense", "config": {"name": name, "units": units, "activation": "relu"}}


def test_numbers_of_layers_do_not_count():
    def model(first, second, units):
        ends = {"output_layers": [[second, 0, 0]], "name": f"functional_{first}"}
        return {"layers": [layer(first, 3), layer(second, units)], **ends}

    one, other = (
        canonical_text.canonical(model(*names, 4)) for names in (("dense", "dense_1"), ("dense_7", "dense_8"))
    )
    assert one == other
    changed = canonical_text.canonical(model("dense", "dense_1", 5))
    assert one != changed
    assert canonical_text.first_difference(one, changed) == "model.layers[1].units: 4 in storage, 5 now"
    turned = model("dense", "dense_1", 4) | {"output_layers": [["dense", 0, 0]]}
    assert canonical_text.canonical(turned) != one


def made(text, **more):
    space = {"ALPHA": ALPHA, **more}
    exec(compile(text, "/anywhere/job.py", "exec"), space)
    return space["f"]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("def f(a):\n    return a + 1", "\n\n# said\ndef f(a):\n    # said\n    return a + 1", True),
        ("def f(a):\n    return a + 1", "def f(a):\n    return a + 2", False),
        ("def f(a):\n    return a.sin()", "def f(a):\n    return a.cos()", False),
        ("f = lambda a: a + 1", "f = lambda a: a * 1", False),
        ("def f(a):\n    return a in {1, 2, 'x', 'y'}", "def f(a):\n    return a in {'y', 'x', 2, 1}", True),
        (
            "def g(a):\n    return a\ndef f(a):\n    return g(a)",
            "def g(a):\n    return -a\ndef f(a):\n    return g(a)",
            False,
        ),
        ("def f(a):\n    return a * ALPHA", "ALPHA = 0.4\ndef f(a):\n    return a * ALPHA", False),
        ("def f(a, b=1):\n    return a", "def f(a, b=2):\n    return a", False),
        ("class f:\n    def call(self):\n        return 1", "class f:\n    def call(self):\n        return 2", False),
        ("class f:\n    x = property(lambda s: 1)", "class f:\n    x = property(lambda s: 2)", False),
    ],
)
def test_code(one, other, equal):
    first, second = made(one), made(other)
    assert (canonical_text.code_of([first]) == canonical_text.code_of([second])) == equal
    assert canonical_text.code_of([made(one)]) == canonical_text.code_of([first])
    assert canonical_text.code_of([functools.partial(first)]) == canonical_text.code_of([first]) or isinstance(
        first, type
    )


def test_code_of_libraries_does_not_count():
    assert canonical_text.code_of([np.ones, len, functools.partial(np.mean), {}, "relu", ArraySource]) == ""
