"""The cost of a cluster by the hour, from the dated table of machines.py, and of gradients that cross zones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raytf.cluster.providers import fallback
from raytf.doctor.check.fallbacks import as_cloud
from raytf.doctor.document import Document
from raytf.doctor.machines import PRICES_OF, Machine
from raytf.doctor.node_types import NodeType, most_workers, node_types

#: US dollars for a GB from one zone of a region to another, in and out together. Azure bills nothing for it.
USD_PER_GB = {"aws": 0.02, "gcp": 0.01}
#: The example that the estimate assumes: weights of ResNet-50, and steps a second on small GPUs.
WEIGHTS, STEPS = 25_000_000, 2
#: A type, its machine, price and market, and the bounds for its number of nodes.
CostLine = tuple[str, str, float | None, str, int, int]


@dataclass(frozen=True)
class ZoneTraffic:
    """The possible cost of gradients between zones.

    Attributes:
        zones: in which workers with GPUs may be.
        workers: the most of them.
        usd: an hour, at most, for `WEIGHTS` and `STEPS`.
    """

    zones: int
    workers: int
    usd: float


@dataclass(frozen=True)
class Cost:
    """US dollars an hour.

    Attributes:
        least: the head and min_workers.
        most: the head and the most expensive max_workers.
        spot: whether some of it is spot, which costs at most that, and as a rule a third to two thirds of it.
        unknown: machines without a known price; they count as 0.
        prices_of: month of the prices.
        traffic: between zones, if workers with GPUs may be in several; not part of `least` and `most`.
    """

    least: float
    most: float
    spot: bool
    unknown: tuple[str, ...]
    lines: tuple[CostLine, ...]
    prices_of: str = PRICES_OF
    traffic: ZoneTraffic | None = None


def zone_traffic(document: Document) -> ZoneTraffic | None:
    """Estimate the cost of traffic if GPUs may be in several zones, between which it is billed; otherwise return None.
    The document is as it was read, before `fallbacks.as_cloud`."""
    provider = document.mapping("provider")
    is_together = str(provider.get("module")) in fallback.MODULES and not provider.get(fallback.SPREAD)
    zones, usd = fallback.zones_of(provider), USD_PER_GB.get(fallback.cloud_of(provider))
    gpus = [t.most for t in node_types(as_cloud(document)) if not t.is_head and t.has("GPU") > 0]
    workers = min(most_workers(document), sum(gpus))
    if usd is None or len(zones) < 2 or workers < 2 or is_together:
        return None
    # If each worker is in another zone than the next one of a ring: in a ring all-reduce each of n workers sends
    # 2 (n - 1) / n times the gradients in a step (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
    gigabytes = 2 * (workers - 1) * WEIGHTS * 4 / 1e9
    return ZoneTraffic(len(zones), workers, round(gigabytes * STEPS * 3600 * usd, 2))


def estimate(document: Document, traffic: ZoneTraffic | None = None) -> Cost | None:
    """Estimate the cost of a cluster on a cloud, or return None if no machine is known."""
    types = node_types(document)
    if not any(t.machine for t in types):
        return None
    limit = most_workers(document)
    workers = [t for t in types if t.most > 0 or t.least > 0]
    head = sum(_usd(t.machine) for t in types if t.is_head)
    least = head + sum(min(t.least, t.most) * _usd(t.machine) for t in workers)
    choices = [(t.name, machine) for t in types for machine in (t.machine, *(other.machine for other in t.others))]
    unknown = {machine.name if machine else name for name, machine in choices if machine is None or machine.usd is None}
    return Cost(
        round(least, 4),
        round(head + _most(workers, limit), 4),
        any("spot" in (t.market, *(other.market for other in t.others)) for t in workers),
        tuple(sorted(unknown)),
        tuple(line for t in types for line in _lines(t, limit)),
        traffic=traffic,
    )


def _lines(t: NodeType, limit: int) -> Iterator[CostLine]:
    most = min(t.most, limit)
    yield _line(t.name, t.machine, t.market, t.least + t.is_head, most + t.is_head)
    for other in t.others:
        allowed = most if other.at_most is None else min(most, other.at_most)
        yield _line(f"{t.name} (or)", other.machine, other.market, 0, allowed)


def _line(name: str, machine: Machine | None, market: str, least: int, most: int) -> CostLine:
    return name, machine.name if machine else "?", machine.usd if machine else None, market, least, most


def _usd(machine: Machine | None) -> float:
    return machine.usd or 0.0 if machine else 0.0


def _most(workers: Sequence[NodeType], limit: int) -> float:
    """Return the price of the most expensive nodes that there may be at the same time."""
    left, total = limit, 0.0
    of_type = {t.name: t.most for t in workers}
    choices = [(_usd(t.machine), t.name, t.most) for t in workers]
    for t in workers:
        choices += [
            (_usd(other.machine), t.name, t.most if other.at_most is None else other.at_most) for other in t.others
        ]
    for usd, name, most in sorted(choices, key=lambda choice: -choice[0]):
        count = min(most, of_type[name], left)
        total += count * usd
        left -= count
        of_type[name] -= count
    return total
