"""The common part of raytf's node providers: fallbacks, Ray's own defaults, and common resources of machines."""

from __future__ import annotations

import copy
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from raytf._ray.autoscaler import (
    NODE_KIND_WORKER,
    TAG_RAY_NODE_KIND,
    TAG_RAY_USER_NODE_TYPE,
    NodeLaunchException,
    cli_logger,
    default_config,
)
from raytf.cluster.autostop import with_start_commands
from raytf.cluster.providers import fallback
from raytf.cluster.providers.capacity import CapacityOffer, EmptyPools, NoCapacity, obtain, slug, together
from raytf.errors import ConfigError

#: Tags on each node: its machine, so that `at_most` can be enforced; its place and kind, so that other nodes can be
#: launched next to it.
TAG_MACHINE, TAG_PLACE, TAG_KIND = "raytf-machine", "raytf-place", "raytf-kind"
#: Seconds within which a new node appears in the cloud's list.
_SEEN_SECONDS = 60.0
#: Keys of Ray's defaults that a provider of type external must not use, because they define the cluster itself.
_OWN = {"cluster_name", "provider", "auth", "available_node_types", "head_node_type", "max_workers"}

logger = logging.getLogger(__name__)


class FallbackProvider:
    """A base class to put before one of Ray's providers.

    Args:
        provider_config, cluster_name: arguments of Ray's providers.
        clock: returns monotonic seconds.
    """

    cloud: ClassVar[str]
    #: Set by Ray's providers.
    provider_config: dict[str, Any]

    def __init__(
        self, provider_config: dict[str, Any], cluster_name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(provider_config, cluster_name)  # type: ignore[call-arg]
        self._clock = clock
        self._empty = EmptyPools(float(provider_config.get(fallback.HOLD, fallback.HOLD_SECONDS)), clock)
        self._is_spread = bool(provider_config.get(fallback.SPREAD, False))
        #: Node -> its tags, and the time until which it may be missing in the cloud's list.
        self._recent: dict[str, tuple[dict[str, str], float]] = {}
        self._counting = threading.Lock()

    def offers(self, node_config: Mapping[str, Any]) -> Sequence[CapacityOffer]:
        """Return the offers to try, in order."""
        raise NotImplementedError

    def launch(self, offer: CapacityOffer, tags: dict[str, str], count: int) -> Mapping[str, Any]:
        """Have Ray's provider launch nodes, and return the launched nodes by id.

        Raises:
            NoCapacity: the cloud has no more capacity.
        """
        raise NotImplementedError

    def end_workers(self, nodes: list[str]) -> None:
        """Start to delete workers."""
        self.terminate_nodes(nodes)  # type: ignore[attr-defined]

    def end_head(self, node: str) -> None:
        """Delete the head, on which this code may run."""
        self.cache_stopped_nodes = False
        self.terminate_node(node)  # type: ignore[attr-defined]

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch nodes from the first offers with capacity. Both autoscalers call this, from several threads."""
        offers = self.offers(node_config)
        node_type = tags.get(TAG_RAY_USER_NODE_TYPE, "")
        is_spread = self._is_spread or tags.get(TAG_RAY_NODE_KIND) != NODE_KIND_WORKER
        is_counted = not is_spread or any(offer.at_most for offer in offers)

        def launch(offer: CapacityOffer, wanted: int) -> Mapping[str, Any]:
            own = {TAG_MACHINE: slug(offer.machine), TAG_PLACE: slug(offer.place), TAG_KIND: slug(offer.kind)}
            nodes = self.launch(offer, {**tags, **own}, wanted)
            for node in nodes if is_counted else ():  # if so, the lock is held
                self._recent[node] = ({**tags, **own}, self._clock() + _SEEN_SECONDS)
            return nodes

        # If nodes are counted, only one thread at a time may count and launch them.
        with self._counting if is_counted else nullcontext():
            where, room = "anywhere", partial(self._room, node_type)
            if not is_spread:
                beside = self._together(offers, node_type, room)
                where = "anywhere" if len(beside) == len(offers) else "beside the workers that run"
                offers = beside
            try:
                return obtain(offers, count, launch, self._empty, room, _say, is_spread, where)
            except NoCapacity as error:
                raise NodeLaunchException("NoCapacity", error.description, sys.exc_info()) from None

    def _together(
        self, offers: Sequence[CapacityOffer], node_type: str, room: Callable[[CapacityOffer], float]
    ) -> list[CapacityOffer]:
        workers = [tags for tags in self._tags().values() if tags.get(TAG_RAY_NODE_KIND) == NODE_KIND_WORKER]
        alike = [tags for tags in workers if tags.get(TAG_RAY_USER_NODE_TYPE) == node_type]
        places = (tags[TAG_PLACE] for tags in workers if TAG_PLACE in tags)
        return together(offers, places, (tags[TAG_KIND] for tags in alike if TAG_KIND in tags), self._empty, room)

    def _room(self, node_type: str, offer: CapacityOffer) -> float:
        if offer.at_most is None:
            return math.inf
        wanted = (node_type, slug(offer.machine))
        nodes = self._tags().values()
        return offer.at_most - sum((t.get(TAG_RAY_USER_NODE_TYPE), t.get(TAG_MACHINE)) == wanted for t in nodes)

    def _tags(self) -> dict[str, Mapping[str, str]]:
        """Return the tags of each node, including nodes launched within the last minute that the cloud does not list.

        One node too few for a while is better than one too many.
        """
        now = self._clock()
        self._recent = {node: entry for node, entry in self._recent.items() if entry[1] > now}
        there: dict[str, Mapping[str, str]] = {node: tags for node, (tags, _) in self._recent.items()}
        for node in self.non_terminated_nodes({}):  # type: ignore[attr-defined]
            there[node] = self.node_tags(node)  # type: ignore[attr-defined]
        return there


def named(
    node_config: Mapping[str, Any], name: Callable[[Mapping[str, Any]], str]
) -> Iterator[tuple[str, fallback.Candidate]]:
    """Yield the candidates of a node_config, each with a unique name."""
    seen: Counter[str] = Counter()
    for candidate in fallback.candidates(node_config):
        machine = name(candidate.config)
        seen[machine] += 1
        yield machine if seen[machine] == 1 else f"{machine} ({seen[machine]})", candidate


def with_defaults(config: Mapping[str, Any], cloud: str) -> dict[str, Any]:
    """Return a cluster's config with the defaults that Ray adds for the cloud's own type, but not for type external."""
    defaults = {key: value for key, value in default_config(cloud).items() if key not in _OWN}
    return copy.deepcopy({**defaults, **config})


def least(all_of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the resources that all of several machines have, with the smallest amounts."""
    common = set.intersection(*(set(one) for one in all_of)) if all_of else set()
    return {key: min(one[key] for one in all_of) for key in all_of[0] if key in common} if all_of else {}


def refuse_malformed(config: Mapping[str, Any]) -> None:
    """Exit with one line if a fallback or the period of autostop is malformed."""
    try:
        with_start_commands({"provider": config["provider"]})
    except ConfigError as error:
        refuse(f"provider.{error}")
    for name, node_type in config["available_node_types"].items():
        problem = fallback.malformed(node_type["node_config"])
        if problem is not None:
            refuse(f"available_node_types.{name}.node_config: {problem[1]}.")


def refuse(text: str) -> None:
    """Exit a command of Ray's with one line."""
    cli_logger.abort("{}", text)


def _say(line: str) -> None:
    # As a warning: `ray up` shows nothing below that level, and the autoscalers log everything.
    logger.warning("raytf: %s", line)
