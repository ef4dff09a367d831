"""Chooses one kind of GPU for a group of workers, and so the nodes it can use. This module does not need Ray.

GPUs of different kinds round differently, so replicas that should be equal may diverge. The slowest sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

#: Ray's names for the kind of a node's GPUs: a prefix of a resource, and a label.
_RESOURCE, _LABEL = "accelerator_type:", "ray.io/accelerator-type"


def of_node(about: Mapping[str, Mapping[str, object]]) -> str:
    """Return the kind of GPUs in a node's entry of `ray.nodes()`, such as A10G; empty if Ray reports none."""
    kinds = (str(name).removeprefix(_RESOURCE) for name in about.get("Resources", {}) if name.startswith(_RESOURCE))
    return next(kinds, str(about.get("Labels", {}).get(_LABEL, "")))


def one_kind(
    kinds: Mapping[str, str], count: Callable[[set[str]], int], now: str | None = None, stays: bool = False
) -> str | None:
    """Return the kind of GPU on which the most workers can run; on a tie, the present kind `now`. None without nodes.
    If `stays`, return `now` in any case, unless it is None."""
    if stays and now is not None:
        return now
    room = {kind: count(nodes_of(kinds, kind)) for kind in sorted(set(kinds.values()))}
    return max(room, key=lambda kind: (room[kind], kind == now), default=None)


def nodes_of(kinds: Mapping[str, str], kind: str | None) -> set[str]:
    """Return the nodes of one kind."""
    return {node for node, other in kinds.items() if other == kind}


def left_out_text(left_out: Iterable[str], kinds: Mapping[str, str], chosen: str) -> str:
    """Return the line that tells the user which nodes are left out, and how to use them."""
    nodes = ", ".join(f"{node[:8]} ({kinds[node] or 'unknown kind'})" for node in sorted(left_out))
    return (
        f"left out: {nodes}. All workers of a group use one kind of GPU, and the most workers can run on "
        f"{chosen or 'those without a name'}; --mixed-gpus uses all nodes"
    )
