"""Pickles of TensorFlow's values: tensors, tables, strategies, functions and data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raytf._tensorflow import datasets


def _reduced_tensor(tensor: Any) -> Any:
    if not hasattr(tensor, "numpy"):
        raise TypeError(f"the tensor {tensor.name!r} is part of a graph, and has no value outside of it")
    return _tensor, (tensor.numpy(), tensor.dtype.name)


def _tensor(value: Any, dtype: str) -> Any:
    import tensorflow as tf

    return tf.constant(value, dtype)


def _reduced_ragged(ragged: Any) -> Any:
    return _ragged, (ragged.flat_values, list(ragged.nested_row_splits))


def _ragged(values: Any, splits: Sequence[Any]) -> Any:
    import tensorflow as tf

    return tf.RaggedTensor.from_nested_row_splits(values, splits)


def _reduced_sparse(sparse: Any) -> Any:
    return type(sparse), (sparse.indices, sparse.values, sparse.dense_shape)


def _reduced_strategy(strategy: Any) -> Any:
    return _strategy, ()


def _strategy() -> Any:
    """Return the strategy whose scope this process has entered."""
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _reduced_table(table: Any) -> Any:
    try:
        keys, values = (part.numpy() for part in table.export())
    except Exception:  # TensorFlow has an error of its own for one that nobody has filled
        keys = values = None
    kinds = table.key_dtype.name, table.value_dtype.name
    return _table, (keys, values, *kinds, table.default_value.numpy())


def _table(keys: Any, values: Any, key_dtype: str, value_dtype: str, default: Any) -> Any:
    import tensorflow as tf

    full = (
        tf.constant([] if keys is None else keys, key_dtype),
        tf.constant([] if values is None else values, value_dtype),
    )
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(*full), default)


def _reduced_mutable_table(table: Any) -> Any:
    keys, values = (part.numpy() for part in table.export())
    kinds = table.key_dtype.name, table.value_dtype.name
    return _mutable_table, (keys, values, *kinds, table._default_value.numpy())


def _mutable_table(keys: Any, values: Any, key_dtype: str, value_dtype: str, default: Any) -> Any:
    import tensorflow as tf

    table = tf.lookup.experimental.MutableHashTable(tf.as_dtype(key_dtype), tf.as_dtype(value_dtype), default)
    if len(keys):
        table.insert(tf.constant(keys, key_dtype), tf.constant(values, value_dtype))
    return table


def _reduced_function(function: Any) -> Any:
    # Without the graphs that it has traced: those stay, and are traced again where it is called.
    return function._clone(None).__reduce_ex__(2)


#: How to pickle values of a class and of those derived from it; nothing is imported for it.
REDUCERS: dict[str, Callable[[Any], Any]] = {
    "tensorflow.python.data.ops.dataset_ops.DatasetV2": datasets.reduced,
    "tensorflow.python.distribute.distribute_lib.StrategyBase": _reduced_strategy,
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function": _reduced_function,
    "tensorflow.python.framework.sparse_tensor.SparseTensor": _reduced_sparse,
    "tensorflow.python.framework.tensor.Tensor": _reduced_tensor,
    "tensorflow.python.ops.lookup_ops.MutableHashTable": _reduced_mutable_table,
    "tensorflow.python.ops.lookup_ops.StaticHashTable": _reduced_table,
    "tensorflow.python.ops.ragged.ragged_tensor.RaggedTensor": _reduced_ragged,
}
