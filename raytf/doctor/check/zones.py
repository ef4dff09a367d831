"""What gradients cost that go from one zone to another."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.cluster.providers import fallback
from raytf.doctor.check.fallbacks import as_cloud
from raytf.doctor.document import Document
from raytf.doctor.node_types import most_workers, node_types

#: US dollars for a GB from one zone of a region to another, in and out together. Azure bills nothing for it.
USD_PER_GB = {"aws": 0.02, "gcp": 0.01}
#: What the traffic is told of: weights of ResNet-50, and steps a second on small GPUs.
WEIGHTS, STEPS = 25_000_000, 2


def usd_per_hour(workers: int, usd_per_gb: float, weights: int = WEIGHTS, steps: float = STEPS) -> float:
    """What gradients cost between workers of which each is in another zone than the next one of a ring.

    In a ring all-reduce each worker sends 2 (n - 1) / n times the gradients in each step (Patarasuk and Yuan, Bandwidth
    optimal all-reduce algorithms, 2009).

    Args:
        workers: n.
        weights: of 4 bytes.
        steps: a second.
    """
    gigabytes = 2 * (workers - 1) * weights * 4 / 1e9
    return gigabytes * steps * 3600 * usd_per_gb


@dataclass(frozen=True)
class ZoneTraffic:
    """What gradients between zones may cost.

    Attributes:
        zones: in which workers with GPUs may be.
        workers: that many at most.
        usd: an hour, at most, for `WEIGHTS` and `STEPS`.
    """

    zones: int
    workers: int
    usd: float


def traffic(document: Document) -> ZoneTraffic | None:
    """Of a cluster whose GPUs may be in several zones, between which traffic is billed.

    Args:
        document: as it was given, before `fallback.as_cloud`.

    Returns:
        None for any other.
    """
    provider = document.mapping("provider")
    is_together = str(provider.get("module")) in fallback.MODULES and not provider.get(fallback.SPREAD)
    zones, usd = fallback.zones_of(provider), USD_PER_GB.get(fallback.cloud_of(provider))
    gpus = [t.most for t in node_types(as_cloud(document)) if not t.is_head and t.has("GPU") > 0]
    workers = min(most_workers(document), sum(gpus))
    if usd is None or len(zones) < 2 or workers < 2 or is_together:
        return None
    return ZoneTraffic(len(zones), workers, round(usd_per_hour(workers, usd), 2))
