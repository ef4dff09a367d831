"""The cost of a cluster by the hour, from the dated table of machines.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raytf.doctor.check.zones import ZoneTraffic
from raytf.doctor.document import Document
from raytf.doctor.machines import PRICES_OF, Machine
from raytf.doctor.node_types import NodeType, most_workers, node_types


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
        traffic: between zones, where workers with GPUs may be in several; not among the above.
    """

    least: float
    most: float
    spot: bool
    unknown: tuple[str, ...]
    lines: tuple[tuple[str, str, float | None, str, int, int], ...]
    prices_of: str = PRICES_OF
    traffic: ZoneTraffic | None = None


def estimate(document: Document, traffic: ZoneTraffic | None = None) -> Cost | None:
    """Estimate the cost of a cluster on a cloud.

    Returns:
        None where no node has a known machine.
    """
    types = node_types(document)
    if not any(t.machine for t in types):
        return None
    limit = most_workers(document)
    workers = [t for t in types if t.most > 0 or t.least > 0]
    heads = [t for t in types if t.is_head]
    head = sum(_usd(t) for t in heads)
    least = head + sum(min(t.least, t.most) * _usd(t) for t in workers)
    return Cost(
        round(least, 4),
        round(head + _dearest(workers, limit), 4),
        any("spot" in (t.market, *(other.market for other in t.others)) for t in workers),
        tuple(
            sorted(
                {
                    machine.name if machine else t.name
                    for t in types
                    for machine in (t.machine, *(other.machine for other in t.others))
                    if machine is None or machine.usd is None
                }
            )
        ),
        tuple(line for t in types for line in _lines(t, limit)),
        traffic=traffic,
    )


def _lines(t: NodeType, limit: int) -> Iterator[tuple[str, str, float | None, str, int, int]]:
    most = min(t.most, limit)
    yield _line(t.name, t.machine, t.market, t.least + t.is_head, most + t.is_head)
    for other in t.others:
        allowed = most if other.at_most is None else min(most, other.at_most)
        yield _line(f"{t.name} (or)", other.machine, other.market, 0, allowed)


def _line(
    name: str, machine: Machine | None, market: str, least: int, most: int
) -> tuple[str, str, float | None, str, int, int]:
    return name, machine.name if machine else "?", machine.usd if machine else None, market, least, most


def _usd(t: NodeType) -> float:
    return (t.machine.usd or 0.0) if t.machine else 0.0


def _dearest(workers: Sequence[NodeType], limit: int) -> float:
    """Return the price of the dearest nodes that there may be at the same time."""
    left, total = limit, 0.0
    of_type = {t.name: t.most for t in workers}
    choices = [(_usd(t), t, t.most) for t in workers]
    for t in workers:
        for other in t.others:
            usd = (other.machine.usd or 0.0) if other.machine else 0.0
            choices.append((usd, t, t.most if other.at_most is None else other.at_most))
    for usd, t, most in sorted(choices, key=lambda choice: -choice[0]):
        count = min(most, of_type[t.name], left)
        total += count * usd
        left -= count
        of_type[t.name] -= count
    return total
