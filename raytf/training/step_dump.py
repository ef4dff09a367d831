"""Dumps one step for people: its records with their losses, its gradients, and the weights before and after it.

step.json            step, epoch, loss, learning rate, norm of the gradient, digest
records.csv          number in the source (or place in a batch that a program made), loss and label of each record,
                     with the highest loss first
batch.npz            the same records in the same order: numbers, losses, and each array of the batch
images/001-R.png     the first records, if they are pictures, named by place in the list and record number
gradients.csv        norm of each weight's gradient, the largest first
before.npz after.npz all variables of the model
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.data import tree
from raytf.data.pipeline import CallBatch, Pipeline
from raytf.distributed import step_digest
from raytf.training.session import RankSession
from raytf.training.step.step import StepOutcome

#: The most pictures that are written.
_IMAGES = 64
#: Errors of a model with a custom train_step that cannot compute the loss of a single record.
_NO_LOSS = (TypeError, ValueError, NotImplementedError, tf.errors.OpError)


class StepDump:
    """Writes a step to a folder.

    Args:
        folder: folder on this machine, which is created.
    """

    def __init__(self, folder: str):
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def before(self, session: RankSession, call: CallBatch) -> None:
        """Write the weights and records before the step of a call; this rank has all shards of the step."""
        model = session.model
        self._weights("before.npz", model)
        numbers, batch = _records(session.pipeline, call)
        losses = _losses(model, batch)
        order = np.argsort(np.where(np.isnan(losses), np.inf, losses))[::-1]
        self._batch(numbers[order], losses[order], tree.map_leaves(lambda leaf: leaf[order], batch))

    def after(self, session: RankSession, call: CallBatch, outcome: StepOutcome) -> None:
        """Write the weights and gradients after the step, and its numbers."""
        self._weights("after.npz", session.model)
        gradients = session.step.named_gradients(outcome)
        norms = {path: float(np.linalg.norm(np.asarray(g, np.float64))) for path, g in gradients.items()}
        ranked = sorted(norms.items(), key=lambda each: -each[1] if each[1] == each[1] else -np.inf)
        self._csv("gradients.csv", ("weight", "norm"), ranked)
        digest = step_digest.number(outcome.digests[0].tobytes()) if outcome.digests.size else None
        about = {
            "step": call.stop,
            "epoch": session.job.epoch_of(call.start) + 1,
            "loss": float(outcome.losses[0]),
            "learning_rate": float(outcome.learning_rates[0]),
            "gradient_norm": float(outcome.norms[0]),
            "digest": None if digest is None else f"{digest:016x}",
        }
        with open(os.path.join(self._folder, "step.json"), "w") as file:
            json.dump(about, file, indent=1)

    def _batch(self, numbers: np.ndarray, losses: np.ndarray, batch: Any) -> None:
        x, y, weights = batch
        arrays: dict[str, Any] = {"numbers": numbers, "losses": losses}
        for name, part in (("x", x), ("y", y), ("weights", weights)):
            leaves = tree.flatten(part)
            arrays |= {"/".join([name, *map(str, path)]): leaf for path, leaf in leaves if leaf is not None}
        np.savez_compressed(os.path.join(self._folder, "batch.npz"), **arrays)
        labels = y if isinstance(y, np.ndarray) and y.size == len(numbers) else None
        flat = [""] * len(numbers) if labels is None else labels.reshape(-1).tolist()
        self._csv("records.csv", ("record", "loss", "label"), zip(numbers.tolist(), losses.tolist(), flat, strict=True))
        if isinstance(x, np.ndarray) and x.ndim == 4 and x.shape[-1] in (1, 3, 4):
            self._images(numbers[:_IMAGES], x[:_IMAGES])

    def _images(self, numbers: np.ndarray, pictures: np.ndarray) -> None:
        os.makedirs(os.path.join(self._folder, "images"), exist_ok=True)
        for place, (number, picture) in enumerate(zip(numbers.tolist(), pictures, strict=True), 1):
            data = tf.io.encode_png(_visible(picture)).numpy()
            with open(os.path.join(self._folder, "images", f"{place:03d}-{number}.png"), "wb") as file:
                file.write(data)

    def _weights(self, name: str, model: keras.Model) -> None:
        values: dict[str, Any] = {v.path: np.asarray(v) for v in model.variables}
        np.savez(os.path.join(self._folder, name), **values)

    def _csv(self, name: str, header: Sequence[str], rows: Any) -> None:
        with open(os.path.join(self._folder, name), "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(rows)


def _records(pipeline: Pipeline, call: CallBatch) -> tuple[np.ndarray, Any]:
    """Return the records of a call with one step: their numbers in the source [n], or their places in a batch that a
    program made, and the batch with leaves [n, ...]."""
    counts = np.asarray(call.counts).reshape(-1)
    numbers = pipeline.numbers(call.start)
    leaves = []
    for leaf in call.leaves:
        of_shards = np.asarray(leaf)[0]
        leaves.append(np.concatenate([shard[:count] for shard, count in zip(of_shards, counts, strict=True)]))
    batch = tree.unflatten(pipeline.template, leaves)
    return np.arange(len(leaves[0])) if numbers is None else numbers, batch


def _losses(model: keras.Model, batch: Any) -> np.ndarray:
    """Return the loss of each record, [n] float64, as validation computes it; NaN if the model has none."""
    count = len(tree.flatten(batch)[0][1])
    losses = np.full(count, np.nan)
    for i in range(count):
        one = slice(i, i + 1)
        x, y, weight = tree.map_leaves(lambda leaf, one=one: tf.convert_to_tensor(leaf[one]), batch)  # type: ignore[misc]
        try:
            predicted = model(x, training=False)
            losses[i] = float(model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=False))
        except _NO_LOSS:
            break
    return losses


def _visible(picture: np.ndarray) -> np.ndarray:
    """Return a picture as uint8, scaled from the range of its numbers."""
    if picture.dtype == np.uint8:
        return picture
    values = picture.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / (high - low or 1.0)
    return np.clip(np.rint(255 * scaled), 0, 255).astype(np.uint8)
