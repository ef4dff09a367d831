"""Build a model that has its own `train_step`, and refuse models and batches that no step can train on."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np

from raytf import _keras
from raytf.data import tree
from raytf.data.sources import Source
from raytf.errors import DataError, JobError, ModelError, WholeBatchError
from raytf.inference import own_run
from raytf.inference.own_run import overrides_step, overrides_test
from raytf.training import own_losses, remarks


def build(model: keras.Model, sample: tuple[Any, Any, Any], records: tuple[int, int], is_evaluated: bool) -> None:
    """Make the variables of a model with a step of its own.

    Args:
        model: compiled.
        sample: (x, y, sample_weight) of a few records.
        records: how many there are in a full shard, and in a full batch.
        is_evaluated: whether there is other data than that for training.

    Raises:
        ModelError: the model cannot be evaluated.
        WholeBatchError: its step takes a batch, and no shard of it.
        JobError: its step raised something.
    """
    if is_evaluated and not overrides_test(model) and type(model).call is keras.Model.call:
        raise ModelError(
            f"{type(model).__name__} has neither a test_step nor a call, so it cannot be evaluated. Write one of them, "
            "or leave out the validation and test data."
        )
    try:
        own_run.build(model, _batch(sample, records[0]))
    except JobError as error:
        if _takes(model, _batch(sample, records[1])):
            raise WholeBatchError(
                f"{error} It ran with {records[0]} records, a logical shard, and takes whole batches of {records[1]}. "
                "Have it ask for the size of its batch (keras.ops.shape(x)[0]), or use --logical-shards 1 --workers 1."
            ) from error
        raise
    if records[0] < records[1]:
        with contextlib.suppress(Exception):  # a step need not take another number of records: nothing can be compared
            warning = own_losses.check(model, sample)
            if warning:
                remarks.add(model, warning)


def check_stateless(model: keras.Model) -> None:
    """Refuse a stateful RNN: Keras does not list its state among the model's variables.

    Raises:
        ModelError: names the layer.
    """
    for layer in _keras.layers_within(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ModelError(
                f"{layer.name} is a stateful RNN (stateful=True), which keeps a state for each record of a batch from "
                "one step to the next. raytf does not support that, as it divides batches over workers. Leave out "
                "stateful=True, or train this model with plain Keras."
            )


def _batch(sample: tuple[Any, Any, Any], records: int) -> tuple[Any, Any, Any]:
    """A batch of so many records."""
    return tree.map_leaves(
        lambda leaf: keras.ops.convert_to_tensor(np.resize(leaf, (records, *np.shape(leaf)[1:]))), sample
    )


def _takes(model: keras.Model, batch: tuple[Any, Any, Any]) -> bool:
    """Whether a model's own step runs with a batch."""
    try:
        own_run.build(model, batch)
    except JobError:
        return False
    return True


def check_rows(model: keras.Model, source: Source) -> None:
    """Refuse batches whose parts have different numbers of rows where Keras's own step reads them.

    Raises:
        DataError: says which part has how many.
    """
    if not tree.has_rows(source.spec) or overrides_step(model) or overrides_test(model):
        return
    listed = ", ".join(f"{path} {spec.shape[0]}" for path, spec in tree.flatten(source.spec))
    raise DataError(
        f"{source.name} data: the parts of a batch differ in their number of records: {listed} to each other. Expected "
        "a batch with a row for each record, dataset.batch(32) makes one of records, or a model with a train_step that "
        "takes such parts."
    )
