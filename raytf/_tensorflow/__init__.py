"""All that raytf takes of TensorFlow's insides, which may change with any version.

`SEEN` says what that is and in which version it was last seen to be there and to do what is meant;
`tests/unit/test_private_tensorflow.py` fails when something has gone, and `tests/unit/test_private_ray.py` when another
module of raytf takes something private. TensorFlow is imported when a function is called. Knows nothing of raytf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_CONTEXT = "tensorflow.python.eager.context.Context"
_LAUNCHER = "tensorflow.python.distribute.cross_device_utils.CollectiveReplicaLauncher"
SEEN = {
    "tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2.CoordinatedJob": "2.21.0",
    "tensorflow.python.data.util.structure.get_flat_tensor_shapes": "2.21.0",
    "tensorflow.python.data.util.structure.get_flat_tensor_types": "2.21.0",
    "tensorflow.core.protobuf.saved_model_pb2.SavedModel": "2.21.0",
    "tensorflow.python.distribute.collective_util.CommunicationImplementation.RING": "2.21.0",
    "tensorflow.python.distribute.collective_util.Options": "2.21.0",
    "tensorflow.python.distribute.cross_device_utils.CollectiveKeys.get_group_key": "2.21.0",
    f"{_LAUNCHER}.all_reduce": "2.21.0",
    "tensorflow.python.distribute.values.PerReplica": "2.21.0",
    f"{_CONTEXT}.configure_coordination_service": "2.21.0",
    f"{_CONTEXT}.disable_graph_collection": "2.21.0",
    f"{_CONTEXT}.enable_graph_collection": "2.21.0",
    f"{_CONTEXT}.export_run_metadata": "2.21.0",
    "tensorflow.python.eager.context.context": "2.21.0",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function._clone": "2.21.0",
    "tensorflow.python.framework.function_def_to_graph.function_def_to_graph": "2.21.0",
    "tensorflow.python.framework.kernels.get_registered_kernels_for_op": "2.21.0",
    "tensorflow.python.framework.op_def_registry.get": "2.21.0",
    "tensorflow.python.framework.ops.Graph._get_function": "2.21.0",
    "tensorflow.python.framework.ops.get_dtype_conversion_mode": "2.21.0",
    "tensorflow.python.ops.lookup_ops.MutableHashTable._default_value": "2.21.0",
    "tensorflow.python.ops.numpy_ops.np_dtypes.is_prefer_float32": "2.21.0",
    "tensorflow.python.saved_model.signature_serialization.canonicalize_signatures": "2.21.0",
}

# -- what is set in a process ------------------------------------------------------------------------------------------


def numpy_behavior() -> tuple[bool, str] | None:
    """Return how NumPy behavior is enabled: whether floats are float32, and the mode of dtype conversion.

    Returns:
        None where it is not enabled.
    """
    import tensorflow as tf
    from tensorflow.python.framework import ops
    from tensorflow.python.ops.numpy_ops import np_dtypes

    if not hasattr(tf.Tensor, "reshape"):  # one of the methods that tensors get with it
        return None
    return np_dtypes.is_prefer_float32(), ops.get_dtype_conversion_mode().name.lower()


# -- data --------------------------------------------------------------------------------------------------------------


def flat_element(element_spec: Any) -> tuple[list[Any], list[Any]]:
    """Return the dtypes and the shapes of the tensors that an element of a data set consists of."""
    from tensorflow.python.data.util import structure

    return structure.get_flat_tensor_types(element_spec), structure.get_flat_tensor_shapes(element_spec)


# -- operations and graphs ---------------------------------------------------------------------------------------------


def operation(kind: str) -> Any:
    """The definition (OpDef) of a kind of operation.

    Returns:
        None where TensorFlow knows none.
    """
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(kind)


def kernels(kind: str) -> list[Any]:
    """The kernels (KernelDef) for a kind of operation."""
    from tensorflow.python.framework import kernels

    return list(kernels.get_registered_kernels_for_op(kind).kernel)


def function_graph(graph: Any, name: str) -> Any:
    """The graph of a function that operations of another graph call by name."""
    from tensorflow.python.framework import function_def_to_graph

    found = graph._get_function(name)
    known = getattr(found, "graph", None)
    return function_def_to_graph.function_def_to_graph(found.cached_definition) if known is None else known


@contextlib.contextmanager
def ran_graphs() -> Iterator[list[Any]]:
    """A list that has the graphs (GraphDef) which TensorFlow ran in the `with` statement, placed and optimized, once
    that has ended without an error."""
    from tensorflow.python.eager import context

    found: list[Any] = []
    context.context().enable_graph_collection()
    try:
        yield found
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    found.extend(metadata.partition_graphs)


# -- distribution ------------------------------------------------------------------------------------------------------


def watch_workers(workers: int, heartbeat_timeout_ms: int) -> None:
    """Configure the service by which workers of a cluster miss each other, before a strategy does.

    Args:
        workers: how many they are.
        heartbeat_timeout_ms: without a sign of life, after which one is taken for dead.
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=heartbeat_timeout_ms,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )


def ring(key: int, size: int, device: str) -> Callable[[Any], Any]:
    """How CPU devices of some ranks add tensors over gRPC.

    Args:
        key: of the group, the same in all of them.
        size: how many they are.
        device: full name of this rank's CPU.
    """
    from tensorflow.python.distribute import collective_util, cross_device_utils

    keys = cross_device_utils.CollectiveKeys(key)
    options = collective_util.Options(implementation=collective_util.CommunicationImplementation.RING)
    group = keys.get_group_key([device])
    return cross_device_utils.CollectiveReplicaLauncher(group, size, keys, device, options).all_reduce


def per_replica(values: Sequence[Any]) -> Any:
    """Values as a strategy has them, one on each of its devices."""
    from tensorflow.python.distribute.values import PerReplica

    return PerReplica(values)


# -- SavedModels -------------------------------------------------------------------------------------------------------


def empty_saved_model() -> Any:
    """The protocol buffer of a SavedModel, to read one into."""
    from tensorflow.core.protobuf import saved_model_pb2

    return saved_model_pb2.SavedModel()


def make_signatures(functions: dict[str, Any]) -> None:
    """Make signatures of functions as `tf.saved_model.save` does, without writing any file.

    Raises:
        ValueError: or others, where one of them cannot be a signature.
    """
    from tensorflow.python.saved_model.signature_serialization import canonicalize_signatures

    canonicalize_signatures(functions)
