"""Find out without a GPU what one would do with a traced graph: what it keeps in host memory, and what it cannot run.

TensorFlow's wheel for Linux holds the kernels of GPUs, and its registry tells on any machine, for an operation with its
types, whether a GPU has a kernel and which of its tensors that kernel keeps in the host's memory. Most kernels of int32
keep all of theirs there. So a tensor that is as large as a gradient, and goes through one of them, is copied over the
bus and back in each step.

    from benchmarks.gpu_placement import findings

    assert not findings(step.get_concrete_function(), at_least=256)

What it sees is the graph as it was traced, with all functions that it calls, loops and branches; not what TensorFlow's
optimizers make of it, nor what a library chooses while it runs. Nor does it see data that Python moves between calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from raytf import _tensorflow

#: Operations that call functions, and those that TensorFlow runs in their place, through which all arguments go.
_CALLS = {
    "While": ("Enter", "Merge", "Switch", "NextIteration", "Exit"),
    "StatelessWhile": ("Enter", "Merge", "Switch", "NextIteration", "Exit"),
    "If": ("Switch", "Merge"),
    "StatelessIf": ("Switch", "Merge"),
    "Case": ("_SwitchN", "Merge"),
    "StatelessCase": ("_SwitchN", "Merge"),
    "PartitionedCall": ("_Arg", "_Retval"),
    "StatefulPartitionedCall": ("_Arg", "_Retval"),
}
#: A function's arguments: its callers are inspected too, and those of the outermost come from the host in any case.
_ARGUMENTS = {"Placeholder", "_Arg", "_Retval"}
#: Arguments that hold dimensions, or a number for each: never large, though a graph may not know how many.
_OF_SHAPES = {"BroadcastGradientArgs": {"s0", "s1", "r0", "r1"}, "Sum": {"reduction_indices"}}
#: Types that TensorFlow refuses to add over GPUs (BaseCollectiveExecutor, tensorflow#56184).
_REFUSED = {tf.int32, tf.bfloat16}


class PlacementFinding(NamedTuple):
    """Something in a graph that a GPU would not do on the device.

    Attributes:
        problem: `no GPU kernel`, `host memory` or `refused`.
        kind, name: of the operation.
        within: the functions that lead to it, from the outside.
        tensor: dtype and shape of the largest tensor concerned; empty for an operation without tensors.
    """

    problem: str
    kind: str
    name: str
    within: str
    tensor: str


def findings(function: Any, at_least: int, unknown: int | None = None) -> list[PlacementFinding]:
    """Return which tensors of this size a GPU would keep in host memory, and all operations that it has no kernel for.

    Args:
        function: a concrete function.
        at_least: numbers in a tensor, from which on it counts.
        unknown: for how long a dimension is taken that the graph does not know; by default a tensor counts that has
            one, and one of unknown rank always does.
    """
    result = []
    for op, within in operations(function.graph):
        for problem, tensors in _problems(op, lambda tensor: _size(tensor, unknown) >= at_least):
            largest = max(tensors, key=lambda t: _size(t, unknown), default=None)
            described = "" if largest is None else f"{largest.dtype.name} {largest.shape}"
            result.append(PlacementFinding(problem, op.type, op.name, within, described))
    return result


def operations(graph: Any) -> Iterator[tuple[tf.Operation, str]]:
    """Yield all operations of a graph, each with the functions that lead to it. A function that is called twice counts
    once."""
    seen: set[str] = set()

    def walk(graph: Any, within: str) -> Iterator[tuple[tf.Operation, str]]:
        for op in graph.get_operations():
            yield op, within
            for attribute, name in _called(op):
                if name not in seen:
                    seen.add(name)
                    yield from walk(_graph_of(graph, name), f"{within}/{op.type}.{attribute}")

    return walk(graph, "")


def _called(op: tf.Operation) -> Iterator[tuple[str, str]]:
    if "_XlaMustCompile" in op.node_def.attr and op.get_attr("_XlaMustCompile"):
        return  # XLA makes kernels of its own for what is inside
    for attribute, value in op.node_def.attr.items():
        if value.HasField("func"):
            yield attribute, value.func.name
        for function in value.list.func:
            yield attribute, function.name


def _graph_of(graph: Any, name: str) -> Any:
    return _tensorflow.function_graph(graph, name)


def _problems(op: tf.Operation, is_large: Callable[[tf.Tensor], bool]) -> Iterator[tuple[str, list[tf.Tensor]]]:
    tensors = [*op.inputs, *op.outputs]
    if op.type in _ARGUMENTS or (op.type == "Const" and tensors[0].dtype == tf.string):
        return  # texts of errors stay on the host, and nothing is copied
    if op.type.startswith("CollectiveReduce") and tensors[0].dtype in _REFUSED:
        yield "refused", tensors[:1]
    if op.type in _CALLS:
        kept = [t for t in tensors if not all(_carries(kind, t.dtype) for kind in _CALLS[op.type])]
    else:
        kernel = _kernel(op)
        if kernel is None:
            yield "no GPU kernel", tensors
            return
        on_host = kernel.on_host - _OF_SHAPES.get(op.type, set())
        kept = [t for name, t in _arguments(op) if name in on_host]
    large = [t for t in kept if is_large(t)]
    if large:
        yield "host memory", large


class _Kernel(NamedTuple):
    """A kernel that a GPU can use: its own, or one of any device; for which types, and what it keeps on the host."""

    is_own: bool
    priority: int
    allowed: dict[str, frozenset[tf.DType]]
    on_host: frozenset[str]


def _kernel(op: tf.Operation) -> _Kernel | None:
    names = sorted({name for kernel in _registered(op.type) for name in kernel.allowed})
    return _fitting(op.type, tuple((name, _types(op.get_attr(name))) for name in names))


def _types(value: Any) -> frozenset[tf.DType]:
    return frozenset(tf.as_dtype(v) for v in (value if isinstance(value, list | tuple) else [value]))


@functools.cache
def _fitting(kind: str, types: tuple[tuple[str, frozenset[tf.DType]], ...]) -> _Kernel | None:
    """Choose a kernel as TensorFlow does: one of GPUs, otherwise one of any device."""
    kernels = [k for k in _registered(kind) if all(own <= k.allowed.get(name, own) for name, own in types)]
    return max(kernels, key=lambda k: (k.is_own, k.priority), default=None)


@functools.cache
def _registered(kind: str) -> list[_Kernel]:
    return [
        _Kernel(
            kernel.device_type == "GPU",
            kernel.priority,
            {c.name: _types(list(c.allowed_values.list.type)) for c in kernel.constraint},
            frozenset(kernel.host_memory_arg),
        )
        for kernel in _tensorflow.kernels(kind)
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label
    ]


@functools.cache
def _carries(kind: str, dtype: tf.DType) -> bool:
    """Return whether the operations of a loop, a branch or a call leave a tensor of a dtype on the device."""
    kernel, definition = _fitting(kind, (("T", frozenset([dtype.base_dtype])),)), _tensorflow.operation(kind)
    arguments = [*definition.input_arg, *definition.output_arg]
    return kernel is not None and not {a.name for a in arguments if a.type_attr == "T"} & kernel.on_host


def _arguments(op: tf.Operation) -> Iterator[tuple[str, tf.Tensor]]:
    definition = _tensorflow.operation(op.type)
    for arguments, tensors in ((definition.input_arg, op.inputs), (definition.output_arg, op.outputs)):
        rest = iter(tensors)
        for argument in arguments:
            count = 1
            if argument.number_attr:
                count = op.get_attr(argument.number_attr)
            elif argument.type_list_attr:
                count = len(op.get_attr(argument.type_list_attr))
            for _ in range(count):
                yield argument.name, next(rest)


def _size(tensor: tf.Tensor, unknown: int | None) -> float:
    if tensor.shape.rank is None:
        return math.inf
    return math.prod((math.inf if unknown is None else unknown) if n is None else n for n in tensor.shape)
