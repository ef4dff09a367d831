"""What there is to see of a step whose records are poisoned in ways that a picture or a loss cannot show."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.training.step_dump import StepDump
from tests.tf.ranks import Rank

NAN, INFINITE = 3, 5
X = np.random.default_rng(0).random((8, 6, 6, 1)).astype(np.float32)
Y = np.arange(8, dtype=np.int32) % 2
X[NAN], X[INFINITE, 0, 0] = np.nan, np.inf


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(2)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


class WithoutLoss(keras.Model):
    """Its loss wants several records."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(tf.reshape(x, [-1, 36]))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(y_pred)[0], 1)]):
            return tf.reduce_mean(y_pred)


def without_loss() -> keras.Model:
    made = WithoutLoss()
    made(X)
    made.compile("sgd")
    return made


def dumped(folder: Path, factory) -> list[dict[str, str]]:
    rank = Rank(factory, ArraySource(X, Y), StepPlan(8, 8, 2), range(2), None)
    call = rank._pipeline.submit(0, 1).result()
    session = SimpleNamespace(model=rank.model, pipeline=rank._pipeline)
    StepDump(str(folder)).before(session, call)
    return list(csv.DictReader((folder / "records.csv").open()))


def test_records_that_are_not_finite_come_first_and_have_pictures(tmp_path: Path):
    rows = dumped(tmp_path, model)
    assert {int(row["record"]) for row in rows[:2]} == {NAN, INFINITE}
    assert sorted(int(row["record"]) for row in rows) == list(range(8))
    pictures = {path.stem.partition("-")[2]: path for path in (tmp_path / "images").iterdir()}
    assert sorted(map(int, pictures)) == list(range(8))
    black = tf.io.decode_png(pictures[str(NAN)].read_bytes()).numpy()
    assert (black == 0).all()
    seen = tf.io.decode_png(pictures[str(INFINITE)].read_bytes()).numpy()
    assert seen[0, 0, 0] == seen.max() > seen.min()


def test_a_model_without_a_loss_of_one_record_has_none(tmp_path: Path):
    rows = dumped(tmp_path, without_loss)
    assert {row["loss"] for row in rows} == {"nan"}
    assert len(rows) == 8
