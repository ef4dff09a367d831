"""The operations of a traced function, and of the functions that it calls."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

#: Kinds of operations that write a variable.
WRITES = re.compile("^(Assign.*VariableOp|Resource(Apply|SparseApply|Scatter).*)$")


class TracedOp(NamedTuple):
    """An operation of a traced graph."""

    kind: str
    name: str
    compiled: bool


def ops_of(traced: Any) -> list[TracedOp]:
    """List all operations of a concrete function and of the functions that it calls."""
    graph = traced.graph.as_graph_def()
    ops = [_op(node) for node in graph.node]
    for function in graph.library.function:
        compiled = function.attr["_XlaMustCompile"].b if "_XlaMustCompile" in function.attr else False
        ops += [_op(node, compiled) for node in function.node_def]
    return ops


def _op(node: Any, compiled: bool = False) -> TracedOp:
    compiled = compiled or ("_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b)
    return TracedOp(node.op, node.name, compiled)
