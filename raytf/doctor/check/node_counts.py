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
    yield from _head(document, [t.name for t in types])
    most = document.get("max_workers")
    for t in types:
        yield from _type(t, most)
    yield from _sums(types, most)
    yield from _times(document)


def _sums(types: list[NodeType], most: Any) -> Iterator[ConfigFinding]:
    workers = [t for t in types if not t.is_head]
    least = sum(t.least for t in workers)
    if _is_number(most) and least > most:
        what = f"min_workers of the types sum to {least}, and max_workers is {most}"
        why = "Ray refuses the file when it validates it."
        yield error("sum-of-minimums", ("max_workers",), what, why, f"Set max_workers to {least} or more.")
    reach = sum(t.most for t in workers if t.most_given)
    if most is None and reach > 2:
        what = f"max_workers is missing at the top: Ray takes 2, and the types allow {reach}"
        why = "The cluster stops growing at 2 workers without a warning; minimums above that are refused."
        fix = f"Add `max_workers: {reach}` at the top."
        yield error("default-max-workers", ("available_node_types",), what, why, fix)
    if not _is_number(most) or most <= 0:
        return
    if workers and all(t.most_given and t.most == 0 for t in workers):
        what, fix = f"max_workers is {most}, and each type has max_workers 0", "Set max_workers of a type above 0."
        yield error("no-workers", ("max_workers",), what, "No worker ever starts.", fix)
    if types and not workers and types[0].most == 0:
        what = f"max_workers is {most}, and there is only the head's type"
        why = "Ray sets max_workers of the head's type to 0: no worker ever starts."
        fix = "Add a type for workers, or max_workers to the head's type."
        yield error("no-workers", ("available_node_types",), what, why, fix)


def _head(document: Document, names: list[str]) -> Iterator[ConfigFinding]:
    head = document.get("head_node_type")
    if not names or (head is None and DEFAULT_HEADS.get(str(document.get("provider", "type"))) in names):
        return
    if head is None:
        what = "available_node_types needs head_node_type"
        why = "Ray takes the name from its defaults, which is none of these types, and refuses the file."
        fix = f"Add `head_node_type: {names[0]}`."
        yield error("head-node-type", ("available_node_types",), what, why, fix)
    elif head not in names:
        what = f"head_node_type {head!r} is none of the types{near(head, names)}"
        why = "Ray refuses the file when it validates it."
        yield error("head-node-type", ("head_node_type",), what, why, f"Name one of {', '.join(names)}.")


def _type(t: NodeType, most: Any) -> Iterator[ConfigFinding]:
    if t.most_given and t.least > t.most:
        what = f"min_workers {t.least} is above max_workers {t.most}"
        why = "Ray accepts it, but never starts more than max_workers: a job waits for nodes that do not come."
        fix = f"Set max_workers to {t.least}, or min_workers to {t.most}."
        yield error("min-above-max", (*t.path, "min_workers"), what, why, fix)
    for key, value in (("min_workers", t.least), ("max_workers", t.most)):
        if value < 0:
            why = "Ray accepts it, and starts none."
            yield error("negative-count", (*t.path, key), f"{key} is {value}", why, "Write 0 or more.")
    if _is_number(most) and t.most_given and not t.is_head and t.most > most and t.least <= most:
        what = f"max_workers {t.most} of the type is above max_workers {most} of the cluster"
        why = f"The cluster stops at {most} workers without a warning."
        fix = f"Set max_workers at the top to {t.most} or more."
        yield warning("above-cluster-max", (*t.path, "max_workers"), what, why, fix)
    if t.is_head and t.least > 0:
        what = f"min_workers {t.least} of the head's type: this many workers beside the head"
        why = "The head is not counted; each of these costs what the head costs."
        fix = "Delete min_workers from the head's type, unless you want them."
        yield warning("head-type-workers", (*t.path, "min_workers"), what, why, fix)


def _times(document: Document) -> Iterator[ConfigFinding]:
    idle, path = document.get("idle_timeout_minutes"), ("idle_timeout_minutes",)
    if _is_number(idle) and idle == 0:
        why = "A node goes as soon as nothing runs on it, also in the seconds between two worker groups of a run."
        yield warning("idle-timeout", path, "idle_timeout_minutes is 0", why, "Write 5 minutes or so.")
    elif _is_number(idle) and idle > 60:
        what = f"idle_timeout_minutes is {idle}: you pay for idle nodes for {idle / 60:.0f} hours"
        yield warning("idle-timeout", path, what, "Each node costs that much after its last job.", "Write 5 to 15.")
    if document.get("upscaling_speed") in (0, 0.0) and _is_number(document.get("upscaling_speed")):
        why = "Ray then starts at most 5 nodes at a time."
        yield warning("upscaling-speed", ("upscaling_speed",), "upscaling_speed is 0", why, "Write 1.0 or more.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
