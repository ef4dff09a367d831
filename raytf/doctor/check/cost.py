"""Estimates a cluster's cost per hour from the dated prices in machines.py and disks.py, and that of traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raytf.cluster.providers import fallback
from raytf.doctor import disks
from raytf.doctor.check.fallbacks import as_cloud
from raytf.doctor.document import Document
from raytf.doctor.machines import PRICES_OF
from raytf.doctor.node_types import FallbackType, NodeType, most_workers, node_types

#: US dollars per GB between two zones of a region, in and out together. Azure does not bill this traffic.
USD_PER_GB = {"aws": 0.02, "gcp": 0.01}
#: The example behind the estimate: ResNet-50's number of weights, and its steps per second on small GPUs.
WEIGHTS, STEPS = 25_000_000, 2


class CostLine(NamedTuple):
    """A type, or another choice for its nodes, with the price of one node in US dollars per hour.

    Attributes:
        usd: the price of the machine, or None if it is unknown.
        least, most: the bounds for the number of nodes.
        disks: the price of the disks, or None if it is unknown.
        address: the price of the public address; 0 if there is none.
    """

    name: str
    machine: str
    usd: float | None
    market: str
    least: int
    most: int
    disks: float | None
    address: float

    @property
    def total(self) -> float:
        """Return the price of a node, without what is unknown."""
        return (self.usd or 0.0) + (self.disks or 0.0) + self.address


@dataclass(frozen=True)
class ZoneTraffic:
    """The possible cost of sending gradients between zones.

    Attributes:
        zones: the number of zones in which GPU workers may run.
        workers: the most GPU workers.
        usd: the highest cost per hour in US dollars, for `WEIGHTS` and `STEPS`.
    """

    zones: int
    workers: int
    usd: float


@dataclass(frozen=True)
class Cost:
    """The cost of a cluster in US dollars per hour.

    Attributes:
        least: the cost of the head and min_workers.
        most: the cost of the head and the most expensive max_workers.
        spot: whether some nodes are spot. They usually cost a third to two thirds of the price counted here.
        unknown: machines and disks without a known price. If there are any, the cluster costs more than `least`, and
            may cost more than `most`.
        prices_of: month of the prices.
        traffic: traffic between zones, if GPU workers may run in several; not part of `least` and `most`.
    """

    least: float
    most: float
    spot: bool
    unknown: tuple[str, ...]
    lines: tuple[CostLine, ...]
    prices_of: str = PRICES_OF
    traffic: ZoneTraffic | None = None

    @property
    def per_hour(self) -> str:
        """The bounds as text, such as `0.11 to 8.30 USD an hour`, with `and more` if a price is unknown."""
        bounds = dict.fromkeys(f"{usd:.2f}" for usd in (self.least, self.most))
        return f"{' to '.join(bounds)} USD an hour{' and more' if self.unknown else ''}"


def zone_traffic(document: Document) -> ZoneTraffic | None:
    """Return the estimated cost of traffic between zones, or None if GPU workers share a zone or it is not billed.
    Pass the document as it was read, before `fallbacks.as_cloud`."""
    provider = document.mapping("provider")
    is_together = str(provider.get("module")) in fallback.MODULES and not provider.get(fallback.SPREAD)
    zones, usd = fallback.zones_of(provider), USD_PER_GB.get(fallback.cloud_of(provider))
    gpus = [t.most for t in node_types(as_cloud(document)) if not t.is_head and t.has("GPU") > 0]
    workers = min(most_workers(document), sum(gpus))
    if usd is None or len(zones) < 2 or workers < 2 or is_together:
        return None
    # In the worst case all neighbors in the ring are in different zones. In a ring all-reduce each of n workers sends
    # 2 (n - 1) / n times the gradients per step (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
    gigabytes = 2 * (workers - 1) * WEIGHTS * 4 / 1e9
    return ZoneTraffic(len(zones), workers, round(gigabytes * STEPS * 3600 * usd, 2))


def estimate(document: Document, traffic: ZoneTraffic | None = None) -> Cost | None:
    """Return the estimated cost of a cluster on a cloud, or None if no machine is known."""
    types = node_types(document)
    if not any(t.machine for t in types):
        return None
    provider, limit = document.mapping("provider"), most_workers(document)
    lines = {t.name: tuple(_lines(t, provider, limit)) for t in types}
    workers = [t for t in types if t.most > 0 or t.least > 0]
    head = sum(lines[t.name][0].total for t in types if t.is_head)
    least = head + sum(min(t.least, t.most) * lines[t.name][0].total for t in workers)
    return Cost(
        round(least, 4),
        round(head + _most(workers, lines, limit), 4),
        any("spot" in (t.market, *(other.market for other in t.others)) for t in workers),
        tuple(sorted({text for t in types for text in _unknown(t.name, lines[t.name])})),
        tuple(line for t in types for line in lines[t.name]),
        traffic=traffic,
    )


def _lines(t: NodeType, provider: Mapping[str, Any], limit: int) -> Iterator[CostLine]:
    most = min(t.most, limit)
    yield _line(t.name, t, t.is_head, provider, t.least + t.is_head, most + t.is_head)
    for other in t.others:
        allowed = most if other.at_most is None else min(most, other.at_most)
        yield _line(f"{t.name} (or)", other, t.is_head, provider, 0, allowed)


def _line(
    name: str, choice: NodeType | FallbackType, is_head: bool, provider: Mapping[str, Any], least: int, most: int
) -> CostLine:
    machine, cloud = choice.machine, str(provider.get("type"))
    return CostLine(
        name,
        machine.name if machine else "?",
        machine.usd if machine else None,
        choice.market,
        least,
        most,
        disks.disks_usd(cloud, choice.config),
        disks.address_usd(cloud, provider, choice.config, is_head, choice.market == "spot"),
    )


def _unknown(name: str, lines: Sequence[CostLine]) -> Iterator[str]:
    """Yield the machines and disks of a type whose prices are unknown."""
    for line in lines:
        if line.most > 0 and line.usd is None:
            yield name if line.machine == "?" else line.machine
        if line.most > 0 and line.disks is None:
            yield f"disks of {name}"


def _most(workers: Sequence[NodeType], lines: Mapping[str, Sequence[CostLine]], limit: int) -> float:
    """Return the price of the most expensive workers that the cluster may have at the same time."""
    left, total = limit, 0.0
    of_type = {t.name: t.most for t in workers}
    choices = [(line.total, t.name, line.most) for t in workers for line in lines[t.name]]
    for usd, name, most in sorted(choices, key=lambda choice: -choice[0]):
        count = min(most, of_type[name], left)
        total += count * usd
        left -= count
        of_type[name] -= count
    return total
