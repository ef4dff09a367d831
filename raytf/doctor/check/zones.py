"""The cost of gradients that travel from one zone to another."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.cluster.providers import fallback
from raytf.doctor.check.fallbacks import as_cloud
from raytf.doctor.document import Document
from raytf.doctor.node_types import most_workers, node_types

#: US dollars for a GB from one zone of a region to another, in and out together. Azure bills nothing for it.
USD_PER_GB = {"aws": 0.02, "gcp": 0.01}
#: The example that the estimate assumes: weights of ResNet-50, and steps a second on small GPUs.
WEIGHTS, STEPS = 25_000_000, 2


@dataclass(frozen=True)
class ZoneTraffic:
    """The possible cost of gradients between zones.

    Attributes:
        zones: in which workers with GPUs may be.
        workers: that many at most.
        usd: an hour, at most, for `WEIGHTS` and `STEPS`.
    """

    zones: int
    workers: int
    usd: float


def traffic(document: Document) -> ZoneTraffic | None:
    """Estimate the cost of traffic in a cluster whose GPUs may be in several zones, between which it is billed.

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
    # If each worker is in another zone than the next one of a ring: in a ring all-reduce each of n workers sends
    # 2 (n - 1) / n times the gradients in a step (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009).
    gigabytes = 2 * (workers - 1) * WEIGHTS * 4 / 1e9
    return ZoneTraffic(len(zones), workers, round(gigabytes * STEPS * 3600 * usd, 2))
