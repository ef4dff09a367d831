"""What a cluster costs by the hour, from the dated table of catalog.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytf.cluster.check.catalog import PRICES_OF
from raytf.cluster.check.document import Document
from raytf.cluster.check.nodes import NodeType, node_types


@dataclass(frozen=True)
class Cost:
    """US dollars an hour.

    Attributes:
        least: the head and min_workers.
        most: the head and the dearest max_workers.
        spot: whether some of it is spot, which costs at most that, and as a rule a third to two thirds of it.
        unknown: machines that the table has no price for; they count as nothing.
        prices_of: month of the prices.
        lines: each type, its price and its bounds.
    """

    least: float
    most: float
    spot: bool
    unknown: tuple[str, ...]
    lines: tuple[tuple[str, str, float | None, str, int, int], ...]
    prices_of: str = PRICES_OF


def estimate(document: Document) -> Cost | None:
    """The cost of a cluster on a cloud; None where no node has a known machine."""
    types = node_types(document)
    if not any(t.machine for t in types):
        return None
    most_workers = document.get("max_workers")
    limit = most_workers if isinstance(most_workers, int) else 2
    workers = [t for t in types if t.most > 0 or t.least > 0]
    heads = [t for t in types if t.is_head]
    head = sum(_usd(t) for t in heads)
    least = head + sum(min(t.least, t.most) * _usd(t) for t in workers)
    return Cost(
        round(least, 4),
        round(head + _dearest(workers, limit), 4),
        any(t.market == "spot" for t in workers),
        tuple(
            sorted(
                {t.machine.name if t.machine else t.name for t in types if t.machine is None or t.machine.usd is None}
            )
        ),
        tuple(
            (
                t.name,
                t.machine.name if t.machine else "?",
                t.machine.usd if t.machine else None,
                t.market,
                t.least + t.is_head,
                min(t.most, limit) + t.is_head,
            )
            for t in types
        ),
    )


def _usd(t: NodeType) -> float:
    return (t.machine.usd or 0.0) if t.machine else 0.0


def _dearest(workers: Sequence[NodeType], limit: int) -> float:
    left, total = limit, 0.0
    for t in sorted(workers, key=_usd, reverse=True):
        count = min(t.most, left)
        total += count * _usd(t)
        left -= count
    return total
