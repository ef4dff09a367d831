"""One kind of GPU for a group of workers: which nodes that leaves. No Ray here.

GPUs of different kinds round differently: replicas that should be equal may drift apart, and the slowest sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

#: How Ray names what it finds on a node: as a resource, and as a label.
_RESOURCE, _LABEL = "accelerator_type:", "ray.io/accelerator-type"


def of_node(about: Mapping[str, Mapping[str, object]]) -> str:
    """The kind of a node's GPUs, such as A10G; empty where Ray knows of none.

    Args:
        about: as `ray.nodes()` tells of it.
    """
    found = (str(name).removeprefix(_RESOURCE) for name in about.get("Resources", {}) if name.startswith(_RESOURCE))
    return next(found, str(about.get("Labels", {}).get(_LABEL, "")))


def one_kind(
    kinds: Mapping[str, str], count: Callable[[set[str]], int], now: str | None = None, stays: bool = False
) -> str | None:
    """The kind on which most workers can run; None without nodes.

    Args:
        kinds: of each node that there is.
        count: workers that some nodes can run.
        now: on which the run is; it stays where another one is no better.
        stays: it stays in any case.
    """
    if stays and now is not None:
        return now
    room = {kind: count(nodes_of(kinds, kind)) for kind in sorted(set(kinds.values()))}
    return max(room, key=lambda kind: (room[kind], kind == now), default=None)


def nodes_of(kinds: Mapping[str, str], kind: str | None) -> set[str]:
    """The nodes of one kind."""
    return {node for node, other in kinds.items() if other == kind}


def said(left_out: Iterable[str], kinds: Mapping[str, str], chosen: str) -> str:
    """For people: which nodes are left out, and what to do about it."""
    nodes = ", ".join(f"{node[:8]} ({kinds[node] or 'unknown kind'})" for node in sorted(left_out))
    return (
        f"left out: {nodes}. A group of workers is on GPUs of one kind, and most workers can run on "
        f"{chosen or 'those without a name'}; --mixed-gpus takes all"
    )
