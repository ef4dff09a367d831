"""Numbers of nodes: those that can never come up, and those that never go away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, near, warning
from raytf.doctor.node_types import DEFAULT_HEADS, NodeType, node_types


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find counts that contradict each other."""
    if document.get("provider", "type") == "local":
        return
    types = node_types(document)
    most = document.get("max_workers")
    yield from _head(document, [t.name for t in types])
    workers = [t for t in types if not t.is_head]
    for t in types:
        yield from _type(t, most)
    least = sum(t.least for t in workers)
    if _is_number(most) and least > most:
        yield error(
            "sum-of-minimums",
            ("max_workers",),
            f"min_workers of the types sum to {least}, and max_workers is {most}",
            "Ray refuses the file when it validates it.",
            f"Set max_workers to {least} or more.",
        )
    if most is None and types and any(t.most_given for t in workers):
        reach = sum(t.most for t in workers if t.most_given)
        if reach > 2:
            yield error(
                "default-max-workers",
                ("available_node_types",),
                f"max_workers is not given at the top: Ray takes 2, and the types allow {reach}",
                "The cluster stops growing at 2 workers without a word; minimums above that are refused.",
                f"Add `max_workers: {reach}` at the top.",
            )
    if _is_number(most) and most > 0 and workers and all(t.most_given and t.most == 0 for t in workers):
        yield error(
            "no-workers",
            ("max_workers",),
            f"max_workers is {most}, and each type has max_workers 0",
            "No worker ever starts.",
            "Give a type a max_workers above 0.",
        )
    if types and not workers and _is_number(most) and most > 0 and types[0].most == 0:
        yield error(
            "no-workers",
            ("available_node_types",),
            f"max_workers is {most}, and there is only the head's type",
            "Ray sets max_workers of the head's type to 0: no worker ever starts.",
            "Add a type for workers, or give the head's type a max_workers.",
        )
    yield from _times(document)


def _head(document: Document, names: list[str]) -> Iterator[ConfigFinding]:
    head = document.get("head_node_type")
    if not names or (head is None and DEFAULT_HEADS.get(str(document.get("provider", "type"))) in names):
        return
    if head is None:
        yield error(
            "head-node-type",
            ("available_node_types",),
            "available_node_types is given, and head_node_type is not",
            "Ray takes the name from its defaults, which is none of these types, and refuses the file.",
            f"Add `head_node_type: {names[0]}`.",
        )
    elif head not in names:
        yield error(
            "head-node-type",
            ("head_node_type",),
            f"head_node_type {head!r} is none of the types{near(head, names)}",
            "Ray refuses the file when it validates it.",
            f"Name one of {', '.join(names)}.",
        )


def _type(t: NodeType, most: Any) -> Iterator[ConfigFinding]:
    path = ("available_node_types", t.name)
    if t.most_given and t.least > t.most:
        yield error(
            "min-above-max",
            (*path, "min_workers"),
            f"min_workers {t.least} is above max_workers {t.most}",
            "Ray accepts it, and never starts more than max_workers: a job waits for nodes that do not come.",
            f"Set max_workers to {t.least}, or min_workers to {t.most}.",
        )
    for key, value in (("min_workers", t.least), ("max_workers", t.most)):
        if value < 0:
            yield error(
                "negative-count",
                (*path, key),
                f"{key} is {value}",
                "Ray accepts it, and starts none.",
                "Give 0 or more.",
            )
    if _is_number(most) and t.most_given and not t.is_head and t.most > most and t.least <= most:
        yield warning(
            "above-cluster-max",
            (*path, "max_workers"),
            f"max_workers {t.most} of the type is above max_workers {most} of the cluster",
            f"The cluster stops at {most} workers without a word.",
            f"Set max_workers at the top to {t.most} or more.",
        )
    if t.is_head and t.least > 0:
        yield warning(
            "head-type-workers",
            (*path, "min_workers"),
            f"min_workers {t.least} of the head's type: this many workers beside the head",
            "The head is not counted; each of these costs what the head costs.",
            "Leave min_workers out of the head's type, unless you want them.",
        )


def _times(document: Document) -> Iterator[ConfigFinding]:
    idle, speed = document.get("idle_timeout_minutes"), document.get("upscaling_speed")
    if _is_number(idle) and idle == 0:
        yield warning(
            "idle-timeout",
            ("idle_timeout_minutes",),
            "idle_timeout_minutes is 0",
            "A node goes as soon as nothing runs on it, also in the seconds between two worker groups of a run.",
            "Give 5 minutes or so.",
        )
    elif _is_number(idle) and idle > 60:
        yield warning(
            "idle-timeout",
            ("idle_timeout_minutes",),
            f"idle_timeout_minutes is {idle}: idle nodes are paid for {idle / 60:.0f} hours",
            "Each node costs that much after its last job.",
            "Give 5 to 15 minutes.",
        )
    if _is_number(speed) and speed == 0:
        yield warning(
            "upscaling-speed",
            ("upscaling_speed",),
            "upscaling_speed is 0",
            "Ray then starts at most 5 nodes at a time.",
            "Give 1.0 or more.",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
