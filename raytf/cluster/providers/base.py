"""What raytf adds to each of Ray's node providers: fallbacks, Ray's own defaults, and resources that stay true."""

from __future__ import annotations

import copy
import logging
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

from ray.autoscaler._private.cli_logger import cli_logger
from ray.autoscaler._private.providers import _get_default_config
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

from raytf.cluster import fallback
from raytf.cluster.providers.capacity import Empty, NoCapacity, Offer, obtain

#: On each node, which machine it is, so that `at_most` can be kept.
TAG_MACHINE = "raytf-machine"
#: Within which a new node is in the cloud's list.
_SEEN_SECONDS = 60.0
#: Of Ray's defaults, what a provider of type external is to have as well: all but what says which cluster it is.
_OWN = {"cluster_name", "provider", "auth", "available_node_types", "head_node_type", "max_workers"}

logger = logging.getLogger(__name__)


class Falling:
    """Goes before one of Ray's providers in the bases of a class.

    Args:
        provider_config, cluster_name: as for Ray's providers.
        clock: seconds, of any clock that only goes forward.
    """

    cloud: ClassVar[str]
    #: Set by Ray's providers.
    provider_config: dict[str, Any]

    def __init__(
        self, provider_config: dict[str, Any], cluster_name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(provider_config, cluster_name)  # type: ignore[call-arg]
        self._clock = clock
        self._empty = Empty(float(provider_config.get(fallback.HOLD, fallback.HOLD_SECONDS)), clock)
        #: Node -> its type, its machine, and until when it may be missing in the cloud's list.
        self._recent: dict[str, tuple[str, str, float]] = {}
        self._bounded = threading.Lock()

    def offers(self, node_config: Mapping[str, Any]) -> Sequence[Offer]:
        """What the cloud may be asked for, in order."""
        raise NotImplementedError

    def launch(self, offer: Offer, tags: dict[str, str], count: int) -> Mapping[str, Any]:
        """Have Ray's provider launch nodes; those that came up, by id.

        Raises:
            NoCapacity: the cloud has no more.
        """
        raise NotImplementedError

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch nodes, from the first offers that have any; called by both autoscalers, from several threads."""
        offers = self.offers(node_config)
        node_type = tags.get(TAG_RAY_USER_NODE_TYPE, "")

        def launch(offer: Offer, wanted: int) -> Mapping[str, Any]:
            machine = slug(offer.machine)
            nodes = self.launch(offer, {**tags, TAG_MACHINE: machine}, wanted)
            for node in nodes if offer.at_most is not None else ():  # then nobody else is here
                self._recent[node] = (node_type, machine, self._clock() + _SEEN_SECONDS)
            return nodes

        # Only one at a time counts and adds, where nodes are counted.
        with self._bounded if any(offer.at_most for offer in offers) else nullcontext():
            try:
                return obtain(offers, count, launch, self._empty, lambda offer: self._room(offer, node_type), _say)
            except NoCapacity as error:
                raise NodeLaunchException("NoCapacity", error.description, sys.exc_info()) from None

    def _room(self, offer: Offer, node_type: str) -> float:
        if offer.at_most is None:
            return math.inf
        wanted, now = (node_type, slug(offer.machine)), self._clock()
        self._recent = {node: entry for node, entry in self._recent.items() if entry[2] > now}
        # A node that went within the minute still counts: rather one too few for a while than one too many.
        there = {node for node, (*kind, _) in self._recent.items() if tuple(kind) == wanted}
        for node in self.non_terminated_nodes({}):  # type: ignore[attr-defined]
            tags = self.node_tags(node)  # type: ignore[attr-defined]
            if (tags.get(TAG_RAY_USER_NODE_TYPE), tags.get(TAG_MACHINE)) == wanted:
                there.add(node)
        return offer.at_most - len(there)


def named(
    node_config: Mapping[str, Any], name: Callable[[Mapping[str, Any]], str]
) -> Iterator[tuple[str, fallback.Candidate]]:
    """The candidates of a node_config, each with a name of its own: two may differ in what the name leaves out."""
    seen: Counter[str] = Counter()
    for candidate in fallback.candidates(node_config):
        machine = name(candidate.config)
        seen[machine] += 1
        yield machine if seen[machine] == 1 else f"{machine} ({seen[machine]})", candidate


def slug(machine: str) -> str:
    """A machine's name as a label of any cloud."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")[:60]


def with_defaults(config: Mapping[str, Any], cloud: str) -> dict[str, Any]:
    """A cluster's config with what Ray adds for the cloud's own type, and for type external does not."""
    defaults = {key: value for key, value in _get_default_config({"type": cloud}).items() if key not in _OWN}
    return copy.deepcopy({**defaults, **config})


def least(all_of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The resources that each of several machines has."""
    common = set.intersection(*(set(one) for one in all_of)) if all_of else set()
    return {key: min(one[key] for one in all_of) for key in all_of[0] if key in common} if all_of else {}


def refuse_malformed(config: Mapping[str, Any]) -> None:
    """End with one line where a fallback is none."""
    for name, node_type in config["available_node_types"].items():
        found = fallback.malformed(node_type["node_config"])
        if found is not None:
            refuse(f"available_node_types.{name}.node_config: {found[1]}.")


def refuse(text: str) -> None:
    """End a command of Ray's with one line."""
    cli_logger.abort("{}", text)


def _say(line: str) -> None:
    # A warning: `ray up` shows nothing below, and the autoscalers log all of it.
    logger.warning("raytf: %s", line)
