"""The resources that a run requests from a cluster, and how many workers fit into free ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raytf.config.flags import ALL_DEVICES, ClusterSection, StrategySection

#: Ray counts resources in units of 1 / this number.
_UNITS = 10_000


def fitting(free: Mapping[str, float], worker: Mapping[str, float]) -> int:
    """Return how many workers fit into a node's free resources."""
    return min(_times(name, free.get(name, 0), amount) for name, amount in worker.items() if amount)


def _times(name: str, free: float, amount: float) -> int:
    """Return how many times an amount fits into a free amount, in Ray's units: 0.2 fits into 1 five times."""
    have, want = round(free * _UNITS), max(1, round(amount * _UNITS))
    if name != "GPU" or want >= _UNITS:
        return have // want
    # The fraction of a worker must be on one GPU; the rests of two GPUs cannot be combined.
    return have // _UNITS * (_UNITS // want) + have % _UNITS // want


def placed(
    free: Sequence[Mapping[str, float]], needs: Iterable[Mapping[str, float]]
) -> list[Mapping[str, float]] | None:
    """Return the free resources of nodes after processes are placed on them in order, or None if a process does not
    fit."""
    left = [dict(node) for node in free]
    for need in needs:
        # Use the fullest node that fits, and keep emptier nodes for larger processes.
        home = min((n for n in left if fitting(n, need) >= 1), key=lambda n: n.get("CPU", 0), default=None)
        if home is None:
            return None
        for name, amount in need.items():
            home[name] = home.get(name, 0) - amount
    return list(left)


def possible_workers(
    free: Sequence[Mapping[str, float]], worker: Mapping[str, float], helpers: Sequence[Mapping[str, float]], most: int
) -> int:
    """Return how many workers, at most `most`, fit into free resources beside the helpers; -1 if the helpers alone do
    not fit."""
    for workers in range(most, -1, -1):
        if placed(free, [worker] * workers + [*helpers]) is not None:
            return workers
    return -1


#: The resources of each parameter server and of the coordinator.
HELPER = {"CPU": 1.0}


def resources(
    strategy: StrategySection, cluster: ClusterSection, use_gpu: bool, nodes: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """Return the resources that each worker requests from Ray.

    Args:
        use_gpu: whether workers compute on GPUs.
        nodes: the resources of each living node.
    """
    worker = {"CPU": cluster.cpus * (strategy.logical_devices or 1)}
    if strategy.strategy == "tpu":
        return worker | {"TPU": _most("TPU", nodes)}
    if use_gpu:
        return worker | {"GPU": _most("GPU", nodes) if strategy.strategy in ALL_DEVICES else cluster.gpus_per_worker}
    return worker


def cpus(strategy: StrategySection, cluster: ClusterSection, workers: int) -> float:
    """Return the CPUs of a run with this many workers, helpers included."""
    return workers * resources(strategy, cluster, False, [])["CPU"] + strategy.helpers * HELPER["CPU"]


def _most(kind: str, nodes: Iterable[Mapping[str, float]]) -> float:
    """Return the maximum number of a resource on one node, at least 1."""
    return float(max([1, *(int(node.get(kind, 0)) for node in nodes)]))
