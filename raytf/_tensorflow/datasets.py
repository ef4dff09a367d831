"""TensorFlow data sets as graphs, passes over them with given seeds, and pickles of TensorFlow's values.

`DatasetToGraphV2` converts a data set to a graph, and `DatasetFromGraph` makes a data set with the same elements from
it. The graph includes lookup tables, and variables with their values at that moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from raytf._tensorflow import flat_element, operation

#: Operations that call a Python function of the program, which a graph cannot contain.
_CALLS_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless", "GeneratorDataset")
#: Operations that keep state between two elements, and prefixes of more of them. Their results depend on everything
#: that was read before.
_KEEPS = (*_CALLS_PYTHON, "RngReadAndSkip", "RngSkip")
_KEEPS_PREFIX = (
    "Assign",
    "Iterator",
    "LookupTableInsert",
    "LookupTableRemove",
    "Queue",
    "ResourceScatter",
    "StatefulRandom",
)
#: Data sets that draw, with their seeds as inputs.
_DRAWS = (
    "ShuffleDataset",
    "ShuffleAndRepeatDataset",
    "RandomDataset",
    "SamplingDataset",
    "AnonymousRandomSeedGenerator",
)
#: Maximum bytes of a data set that is pickled element by element.
_TRAVELS_BYTES = 256 << 20
#: TensorFlow's number for int64, the dtype of the state of a `keras.random.SeedGenerator`, which has shape [2].
_INT64 = 9
#: Data sets that call a function for several elements in parallel.
_SIDE_BY_SIDE = (
    "ParallelMapDataset",
    "ParallelInterleaveDataset",
    "MapAndBatchDataset",
    "LegacyParallelInterleaveDataset",
)


def is_dataset(data: Any) -> bool:
    """Return whether an object is a TensorFlow data set, without importing TensorFlow."""
    return any(
        kind.__name__ == "DatasetV2" and kind.__module__.startswith("tensorflow.") for kind in type(data).__mro__
    )


class DatasetGraph:
    """The graph of a TensorFlow data set."""

    def __init__(self, dataset: Any):
        import tensorflow as tf

        options = tf.data.Options()
        options.deterministic = True  # a fixed order, whichever element is ready first
        self._dataset = dataset.with_options(options)
        variant = tf.data.experimental.to_variant(self._dataset)
        text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1).numpy()
        self._graph = tf.compat.v1.GraphDef.FromString(text)

    @functools.cached_property
    def ordered(self) -> Any:
        """The data set in a fixed order. Functions that keep state are called for one element after another."""
        import tensorflow as tf

        return _with_calls_in_order(tf.data.experimental.to_variant(self._dataset), self._dataset.element_spec)

    def keeps(self) -> str:
        """Return an operation whose results depend on earlier elements, not only on seeds; empty if there is none."""
        outside = {node.op for node in self._graph.node} - {"AssignVariableOp"}  # it initializes variables
        nodes = (node for function in self._graph.library.function for node in function.node_def)
        has_seeds = self._has_seeds_alone()
        return keeping(outside | {node.op for node in nodes if not (has_seeds and _sets_seeds(node))})

    def _has_seeds_alone(self) -> bool:
        """Return whether all int64 variables have the shape of a seed generator's state."""
        variables = [node for node in self._graph.node if node.op == "VarHandleOp"]
        same_type = [node.attr["shape"].shape for node in variables if node.attr["dtype"].type == _INT64]
        return all([dim.size for dim in shape.dim] == [2] for shape in same_type)

    def calls_python(self) -> bool:
        """Return whether the data set calls Python functions, which exist only in the program's process."""
        return any(node.op in _CALLS_PYTHON for node in self._nodes())

    def serialized(self) -> bytes:
        """Return the serialized graph. `loaded` makes a data set of it in any process, unless it calls Python."""
        return self._graph.SerializeToString()

    def draws(self) -> str:
        """Return an operation that makes two passes differ, unless `drawn` seeds it; empty if there is none."""
        return next((node.op for node in self._nodes() if is_drawing(node)), "")

    def drawn(self, seeds: Callable[[int, int], tuple[int, int]], number: int, cache: str) -> Any:
        """Return the data set with the given seeds. Functions that draw are called for one element at a time.

        Args:
            seeds: (place of an operation in the graph, number of the pass) -> two seeds, each positive and below 2**31.
            number: the number of the pass. Operations that have to draw the same in each pass, such as those before a
                cache, always get pass 0.
            cache: a folder for data that the data set would cache in memory from one pass to the next.
        """
        import tensorflow as tf

        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(self._graph)
        drawing, cached = _drawing_functions(graph), _cached(graph)
        place = 0
        for function, nodes in _bodies(graph):
            for node in list(nodes):
                of_pass = 0 if (function, node.name) in cached or _is_the_same(node) else number
                _draw(node, nodes, seeds(place, of_pass), nodes is not graph.node)
                _one_by_one(node, nodes, drawing, nodes is not graph.node)
                place += 1
        _cache_in(cache, graph.node)
        return loaded(graph.SerializeToString(), self._dataset.element_spec)

    def _nodes(self) -> Iterator[Any]:
        yield from self._graph.node
        for function in self._graph.library.function:
            yield from function.node_def


def loaded(graph: bytes, element_spec: Any) -> Any:
    """Return the data set of a serialized graph."""
    import tensorflow as tf

    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), element_spec)


def of_elements(elements: list[Any], element_spec: Any) -> Any:
    """Return a data set that yields the given elements."""
    import tensorflow as tf

    made = tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=element_spec)
    return made.apply(tf.data.experimental.assert_cardinality(len(elements)))


def reduced(dataset: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and arguments that pickle a data set, as its graph or, if it calls Python, as its elements.

    Raises:
        TypeError: the data set calls Python, and is infinite or too large.
    """
    graph = DatasetGraph(dataset)
    if not graph.calls_python():
        return loaded, (graph.serialized(), dataset.element_spec)
    if dataset.cardinality() == -1:
        raise TypeError("an infinite tf.data.Dataset that calls a Python function cannot be sent to another process")
    elements, size = [], 0
    for element in dataset:
        elements.append(element)
        size += _bytes(element)
        if size > _TRAVELS_BYTES:
            raise TypeError(
                f"a tf.data.Dataset that calls a Python function has more than {_TRAVELS_BYTES >> 20} MiB, too much "
                "to send to another process. Take only the elements that you need first: list(dataset.take(1))"
            )
    return of_elements, (elements, dataset.element_spec)


def _bytes(element: Any) -> int:
    """Return the bytes of the dense tensors in an element."""
    import tensorflow as tf

    dense = (leaf for leaf in tf.nest.flatten(element) if hasattr(leaf, "numpy"))
    return sum(getattr(leaf.numpy(), "nbytes", 0) for leaf in dense)


def _with_calls_in_order(variant: Any, element_spec: Any) -> Any:
    """Return a variant's data set with TensorFlow's `make_deterministic` optimization.
    Functions that draw or write a variable are then called for one element after another, even if the program requests
    parallel calls."""
    import tensorflow as tf

    types, shapes = flat_element(element_spec)
    made = tf.raw_ops.OptimizeDatasetV2(
        input_dataset=variant,
        optimizations_enabled=["make_deterministic"],
        optimizations_disabled=[],
        optimizations_default=[],
        output_types=types,
        output_shapes=shapes,
    )
    return tf.data.experimental.from_variant(made, element_spec)


def keeping(operations: Iterable[str]) -> str:
    """Return the first operation that keeps state between two elements; empty if none does."""
    return next((o for o in sorted(operations) if o in _KEEPS or o.startswith(_KEEPS_PREFIX)), "")


def is_drawing(node: Any) -> bool:
    """Return whether a node draws, or yields its elements as they become ready."""
    return _has_seeds(node) or _sets_seeds(node) or node.op.startswith(_DRAWS) or _is_unordered(node)


def _has_seeds(node: Any) -> bool:
    return "seed" in node.attr and "seed2" in node.attr and not node.op.startswith("Stateless")


def _sets_seeds(node: Any) -> bool:
    """Return whether a node writes a variable with the dtype of a seed generator's state."""
    return node.op == "AssignVariableOp" and node.attr["dtype"].type == _INT64


def _is_unordered(node: Any) -> bool:
    """Return whether a node yields its elements as they become ready."""
    return "deterministic" in node.attr and node.attr["deterministic"].s == b"false"


def _is_the_same(node: Any) -> bool:
    """Return whether a node makes the same draws in each pass, as a shuffle without `reshuffle_each_iteration` does."""
    return "reshuffle_each_iteration" in node.attr and not node.attr["reshuffle_each_iteration"].b


def _drawing_functions(graph: Any) -> set[str]:
    """Return the names of the functions that draw, or call one that does."""
    bodies = {f.signature.name: f.node_def for f in graph.library.function}
    drawing = {name for name, nodes in bodies.items() if any(_has_seeds(n) or _sets_seeds(n) for n in nodes)}
    while True:
        calling = {name for name, nodes in bodies.items() if any(_calls(n, drawing) for n in nodes)}
        if calling <= drawing:
            return drawing
        drawing |= calling


def _cached(graph: Any) -> set[tuple[str, str]]:
    """Return (function or, for the graph itself, ""; node) for all nodes whose results the first pass caches."""
    bodies = {"": {node.name: node for node in graph.node}}
    bodies |= {f.signature.name: {node.name: node for node in f.node_def} for f in graph.library.function}
    places: set[tuple[str, str]] = set()
    coming = [("", node.input[0]) for node in graph.node if node.op.startswith("CacheDataset")]
    while coming:
        function, name = place = coming.pop()
        node = bodies[function].get(name)
        if node is None or place in places:
            continue
        places.add(place)
        if not function:  # all nodes of a function are added with the node that calls it
            coming += [("", name) for name in node.input]
        called = [node.op, *(value.func.name for value in node.attr.values())]
        coming += [(inner, own) for inner in called if inner for own in bodies.get(inner, ())]
    return places


def _bodies(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of a graph ("") and of its functions, in the order of calls.
    The functions' names differ from one serialization to the next, so they give no order."""
    functions, seen = {f.signature.name: f.node_def for f in graph.library.function}, set()
    coming = [("", graph.node)]
    while coming:
        function, nodes = coming.pop(0)
        yield function, nodes
        for node in nodes:
            called = [node.op, *(node.attr[key].func.name for key in sorted(node.attr))]
            for name in called:
                if name in functions and name not in seen:
                    seen.add(name)
                    coming.append((name, functions[name]))


def _calls(node: Any, functions: set[str]) -> bool:
    return node.op in functions or any(value.func.name in functions for value in node.attr.values())


def _draw(node: Any, nodes: Any, seeds: tuple[int, int], in_function: bool) -> None:
    """Set the seeds of a node that draws, and fix the order of one that does not keep it."""
    if _is_unordered(node):
        node.attr["deterministic"].s = b"true"
    if _has_seeds(node):
        node.attr["seed"].i, node.attr["seed2"].i = seeds
    elif _sets_seeds(node) and not in_function:
        _set_input(node, nodes, "value", seeds, in_function)
    if not node.op.startswith(_DRAWS):
        return
    for name, value in zip(("seed", "seed2"), seeds, strict=True):
        _set_input(node, nodes, name, value, in_function)
    if not in_function and "seed_generator" in _inputs(node):  # the program's own advances with each pass
        own = nodes.add(name=f"{node.name}/raytf_generator", op="DummySeedGenerator")
        node.input[_place(node, "seed_generator")] = own.name


def _one_by_one(node: Any, nodes: Any, drawing: set[str], in_function: bool) -> None:
    """Make a node call functions that draw for one element after another, since parallel draws have no order."""
    if node.op.startswith(_SIDE_BY_SIDE) and _calls(node, drawing):
        _set_input(node, nodes, "num_parallel_calls", 1, in_function)
    elif node.op.startswith("ParallelInterleaveDataset"):
        # The graph has the program's number of calls, which may exceed a cycle that this machine has shortened.
        _set_input(node, nodes, "num_parallel_calls", -1, in_function)  # TensorFlow chooses the number


def _cache_in(folder: str, nodes: Any) -> None:
    """Replace caches in memory, which end with the data set, by files in a folder."""
    import tensorflow as tf

    names = {node.name: node for node in nodes}
    for node in [node for node in nodes if node.op.startswith("CacheDataset")]:
        source = names.get(node.input[1])
        if source is not None and not tf.make_ndarray(source.attr["value"].tensor).item():
            _set_input(node, nodes, "filename", f"{folder}/{node.name.replace('/', '-')}", False)


def _set_input(node: Any, nodes: Any, name: str, value: Any, in_function: bool) -> None:
    """Replace the input of a node that has this name, if there is one, by a constant."""
    import tensorflow as tf

    kind = _inputs(node).get(name)
    if kind is None:
        return
    kind = kind or node.attr["dtype"].type
    made = nodes.add(name=f"{node.name}/raytf_{name}", op="Const")
    made.attr["dtype"].type = kind
    made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.as_dtype(kind)))
    node.input[_place(node, name)] = f"{made.name}:output:0" if in_function else made.name


def _inputs(node: Any) -> dict[str, int]:
    """Return the types of a node's inputs by name."""
    return {argument.name: argument.type for argument in operation(node.op).input_arg}


def _place(node: Any, name: str) -> int:
    """Return the place of an input among a node's inputs, some of which can be lists."""
    place = 0
    for argument in operation(node.op).input_arg:
        if argument.name == name:
            break
        if argument.number_attr:
            place += node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            place += len(node.attr[argument.type_list_attr].list.type)
        else:
            place += 1
    return place


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
    except Exception:  # TensorFlow raises an error of its own for an uninitialized table
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
    # The clone has no traced graphs, which cannot be sent: the other process traces the function again.
    return function._clone(None).__reduce_ex__(2)


#: Dotted name of a class -> the function that pickles its objects and those of derived classes. Imports nothing.
REDUCERS: dict[str, Callable[[Any], Any]] = {
    "tensorflow.python.data.ops.dataset_ops.DatasetV2": reduced,
    "tensorflow.python.distribute.distribute_lib.StrategyBase": _reduced_strategy,
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function": _reduced_function,
    "tensorflow.python.framework.sparse_tensor.SparseTensor": _reduced_sparse,
    "tensorflow.python.framework.tensor.Tensor": _reduced_tensor,
    "tensorflow.python.ops.lookup_ops.MutableHashTable": _reduced_mutable_table,
    "tensorflow.python.ops.lookup_ops.StaticHashTable": _reduced_table,
    "tensorflow.python.ops.ragged.ragged_tensor.RaggedTensor": _reduced_ragged,
}
