"""The private parts of TensorFlow that raytf uses. They may change with any version.

`SEEN` lists the attributes that imports do not name. `tests/unit/test_private_tensorflow.py` fails when one of them or
an imported name no longer exists, and `tests/unit/test_private_ray.py` when another module of raytf uses private parts.
TensorFlow is imported only when a function is called. This package depends on no other part of raytf.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

#: The latest version of TensorFlow in which all of these parts were verified to exist and to work as expected.
VERSION = "2.21.0"
#: Class or module -> names of its attributes that are used.
SEEN = {
    "tensorflow.python.distribute.cross_device_utils.CollectiveKeys": "get_group_key",
    "tensorflow.python.distribute.cross_device_utils.CollectiveReplicaLauncher": "all_reduce",
    "tensorflow.python.eager.backprop.GradientTape": "_watch_accessed_variables gradient jacobian watch",
    "tensorflow.python.eager.context.Context": (
        "configure_coordination_service disable_graph_collection enable_graph_collection export_run_metadata"
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function": "_autograph _clone _python_function",
    "tensorflow.python.framework.ops.Graph": "_get_function",
    "tensorflow.python.ops.gen_random_ops": (
        "multinomial random_gamma random_poisson_v2 random_shuffle random_standard_normal random_uniform "
        "random_uniform_int truncated_normal"
    ),
    "tensorflow.python.ops.lookup_ops.MutableHashTable": "_default_value",
    "tensorflow.python.ops.summary_ops_v2": "_summary_state",
    "tensorflow.python.ops.summary_ops_v2._ResourceSummaryWriter": "__init__",
}

#: Kinds of operations that write a variable.
WRITES = re.compile("^(Assign.*VariableOp|Resource(Apply|SparseApply|Scatter).*)$")

# -- settings of the process -------------------------------------------------------------------------------------------


def numpy_behavior() -> tuple[bool, str] | None:
    """Return whether NumPy behavior prefers float32, and its mode of dtype conversion; None if it is not enabled."""
    import tensorflow as tf
    from tensorflow.python.framework import ops
    from tensorflow.python.ops.numpy_ops import np_dtypes

    if not hasattr(tf.Tensor, "reshape"):  # NumPy behavior adds this method
        return None
    return np_dtypes.is_prefer_float32(), ops.get_dtype_conversion_mode().name.lower()


# -- data --------------------------------------------------------------------------------------------------------------


def flat_element(element_spec: Any) -> tuple[list[Any], list[Any]]:
    """Return the dtypes and the shapes of the tensors in an element of a data set."""
    from tensorflow.python.data.util import structure

    return structure.get_flat_tensor_types(element_spec), structure.get_flat_tensor_shapes(element_spec)


# -- operations and graphs ---------------------------------------------------------------------------------------------


def operation(kind: str) -> Any:
    """Return the definition (OpDef) of a kind of operation; None if TensorFlow has no such kind."""
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(kind)


def kernels(kind: str) -> list[Any]:
    """Return the kernels (KernelDef) for a kind of operation."""
    from tensorflow.python.framework import kernels

    return list(kernels.get_registered_kernels_for_op(kind).kernel)


def function_graph(graph: Any, name: str) -> Any:
    """Return the graph of the function that operations of `graph` call by this name."""
    from tensorflow.python.framework import function_def_to_graph

    function = graph._get_function(name)
    known = getattr(function, "graph", None)
    return function_def_to_graph.function_def_to_graph(function.cached_definition) if known is None else known


@contextlib.contextmanager
def ran_graphs() -> Iterator[list[Any]]:
    """Yield a list that receives the placed and optimized graphs (GraphDef) that TensorFlow runs in a `with` statement.
    It is filled when the statement ends without an error."""
    from tensorflow.python.eager import context

    graphs: list[Any] = []
    context.context().enable_graph_collection()
    try:
        yield graphs
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    graphs.extend(metadata.partition_graphs)


class TracedOp(NamedTuple):
    """An operation of a traced graph; `compiled` is whether XLA compiles it."""

    kind: str
    name: str
    compiled: bool


def ops_of(traced: Any) -> list[TracedOp]:
    """Return all operations of a concrete function and of the functions that it calls."""
    graph = traced.graph.as_graph_def()
    ops = [_op(node) for node in graph.node]
    for function in graph.library.function:
        compiled = function.attr["_XlaMustCompile"].b if "_XlaMustCompile" in function.attr else False
        ops += [_op(node, compiled) for node in function.node_def]
    return ops


def _op(node: Any, compiled: bool = False) -> TracedOp:
    compiled = compiled or ("_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b)
    return TracedOp(node.op, node.name, compiled)


# -- distribution ------------------------------------------------------------------------------------------------------


def watch_workers(workers: int, heartbeat_timeout_ms: int) -> None:
    """Configure the service with which workers detect a missing heartbeat, before a strategy configures it."""
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=heartbeat_timeout_ms,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )


def ring(key: int, size: int, device: str) -> Callable[[Any], Any]:
    """Return a function with which a group of ranks sums tensors on CPUs over gRPC.

    Args:
        key: the group's key, which is the same on all of its ranks.
        size: the number of ranks.
        device: the full name of this rank's CPU.
    """
    from tensorflow.python.distribute import collective_util, cross_device_utils

    keys = cross_device_utils.CollectiveKeys(key)
    options = collective_util.Options(implementation=collective_util.CommunicationImplementation.RING)
    group = keys.get_group_key([device])
    return cross_device_utils.CollectiveReplicaLauncher(group, size, keys, device, options).all_reduce


def per_replica(values: Sequence[Any]) -> Any:
    """Return the container in which a strategy holds values, one for each of its devices."""
    from tensorflow.python.distribute.values import PerReplica

    return PerReplica(values)


# -- summary writers ---------------------------------------------------------------------------------------------------

_SUMMARIES = "tensorflow.python.ops.summary_ops_v2"
#: The attribute of a writer that holds the arguments of its constructor.
_MADE_WITH = "_raytf_made_with"


@contextlib.contextmanager
def noted_writers() -> Iterator[None]:
    """Record the folder of each summary writer that is created while the `with` statement lasts."""
    from tensorflow.python.ops import summary_ops_v2

    kind = summary_ops_v2._ResourceSummaryWriter
    own = kind.__init__

    def init(self: Any, create_fn: Any, init_op_fn: Any, *args: Any, **kwargs: Any) -> None:
        own(self, create_fn, init_op_fn, *args, **kwargs)
        vars(self)[_MADE_WITH] = getattr(init_op_fn, "keywords", {})

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = own


def writer_folder(writer: Any) -> tuple[str | None, str]:
    """Return the folder of a summary writer, None if it was not recorded, and the suffix of its files."""
    noted = vars(writer).get(_MADE_WITH, {})
    folder, suffix = (noted.get(name) for name in ("logdir", "filename_suffix"))
    return (None if folder is None else _text(folder)), ("" if suffix is None else _text(suffix))


def default_writer() -> tuple[Any, Any]:
    """Return this thread's default summary writer and default step. The writer is None if the program has set none, or
    if the writer's folder was not recorded."""
    module = sys.modules.get(_SUMMARIES)
    if module is None:
        return None, None
    writer, step = module._summary_state.writer, module._summary_state.step
    is_known = writer is not None and _MADE_WITH in vars(writer)
    return (writer if is_known else None), step


def _text(value: Any) -> str:
    data = value.numpy() if hasattr(value, "numpy") else value
    return data.decode() if isinstance(data, bytes) else str(data)


# -- SavedModels -------------------------------------------------------------------------------------------------------


def empty_saved_model() -> Any:
    """Return an empty protocol buffer into which a SavedModel can be read."""
    from tensorflow.core.protobuf import saved_model_pb2

    return saved_model_pb2.SavedModel()


def make_signatures(functions: dict[str, Any]) -> None:
    """Create signatures of functions as `tf.saved_model.save` does, without writing a file.

    Raises:
        ValueError: a function cannot be a signature. TensorFlow raises other errors, too.
    """
    from tensorflow.python.saved_model.signature_serialization import canonicalize_signatures

    canonicalize_signatures(functions)
