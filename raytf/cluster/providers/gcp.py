"""Ray's GCPNodeProvider with fallbacks and zones: `type: external`, `module: raytf.cluster.providers.gcp.Provider`."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from raytf._ray import autoscaler
from raytf.cluster.autostop import with_start_commands
from raytf.cluster.providers import capacity, fallback
from raytf.cluster.providers.base import FallbackProvider, named, refuse_malformed, with_defaults
from raytf.cluster.providers.capacity import CapacityOffer, NoCapacity
from raytf.errors import one_line

_ray = autoscaler.node_provider("gcp")
GCPNodeProvider: Any = _ray.GCPNodeProvider


class Provider(FallbackProvider, GCPNodeProvider):
    """Tries each machine of a node type in each zone of `availability_zone`; Ray's own provider uses one zone."""

    cloud = "gcp"

    def _clients(self) -> tuple[Any, Any]:
        """Return Google's clients for Compute Engine and, if a node type needs it, for Cloud TPU."""
        _, _, compute, tpu = _ray.construct_clients_from_provider_config(self.provider_config)
        return compute, tpu

    def _construct_clients(self) -> None:
        compute, tpu = self._clients()
        project = self.provider_config["project_id"]
        self._zones: dict[str, dict[Any, Any]] = {}
        for zone in fallback.zones_of(self.provider_config):
            self._zones[zone] = {_ray.GCPNodeType.COMPUTE: _ray.GCPCompute(compute, project, zone, self.cluster_name)}
            if tpu is not None:
                self._zones[zone][_ray.GCPNodeType.TPU] = _ray.GCPTPU(tpu, project, zone, self.cluster_name)
        self.resources = next(iter(self._zones.values()))

    @autoscaler.retry_of_google
    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self.lock:
            nodes = [
                node
                for resources in self._zones.values()
                for resource in resources.values()
                for node in resource.list_instances(dict(tag_filters))
            ]
            self.cached_nodes = {node["name"]: node for node in nodes}
            return [node["name"] for node in nodes]

    def _get_resource_depending_on_node_name(self, node_name: str) -> Any:
        with self.lock:
            if node_name not in self.cached_nodes:
                self.non_terminated_nodes({})
            known = self.cached_nodes.get(node_name)
            return known.resource if known is not None else super()._get_resource_depending_on_node_name(node_name)

    def end_workers(self, nodes: list[str]) -> None:
        """Start to delete all workers at once. Ray's provider would wait up to a minute for each."""
        errors = []
        for node in nodes:
            try:
                self._get_resource_depending_on_node_name(node).delete_instance(node_id=node, wait_for_operation=False)
            except Exception as error:  # delete the other workers anyway
                errors.append(error)
        if errors:
            raise errors[0]

    def offers(self, node_config: Mapping[str, Any]) -> list[CapacityOffer]:
        return [
            CapacityOffer(machine, zone, candidate.config, candidate.at_most, kind_name(candidate.config))
            for machine, candidate in named(node_config, machine_name)
            for zone in self._zones
        ]

    def launch(self, offer: CapacityOffer, tags: dict[str, str], count: int) -> Mapping[str, Any]:
        """Request all nodes, then wait for each one separately, because some may start and others fail."""
        config = _with_disks_of(offer.place, offer.config)
        resource = self._zones[offer.place][_ray.get_node_type(config)]
        nodes: dict[str, Any] = {}
        lack: NoCapacity | None = None
        started = []
        with self.lock:
            for _ in range(count):
                try:
                    started.append(resource.create_instance(copy.deepcopy(config), tags, wait_for_operation=False))
                except Exception as error:
                    lack = _lack(error)
                    break
        for operation, name in started:
            try:
                nodes[name] = resource.wait_for_operation(operation)
            except Exception as error:
                lack = _lack(error)
        if lack is not None:
            lack.nodes = nodes
            raise lack
        return nodes

    @staticmethod
    def fillout_available_node_types_resources(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return GCPNodeProvider.fillout_available_node_types_resources(with_defaults(cluster_config, "gcp"))

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        refuse_malformed(cluster_config)
        return with_start_commands(GCPNodeProvider.bootstrap_config(with_defaults(cluster_config, "gcp")))


def _with_disks_of(zone: str, node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the names of disk types, such as `pd-balanced`, with the zone, as Ray does for machine types."""
    config = copy.deepcopy(dict(node_config))
    for disk in config.get("disks", ()):
        first = disk.get("initializeParams", {})
        if "diskType" in first and "/" not in first["diskType"]:
            first["diskType"] = f"zones/{zone}/diskTypes/{first['diskType']}"
    return config


def _lack(error: Exception) -> NoCapacity:
    shortage = capacity.gcp_shortage(capacity.text_of(error))
    if shortage is None:
        raise error
    return NoCapacity(shortage, one_line(error, 200))


def kind_name(config: Mapping[str, Any]) -> str:
    """Return a name for a machine and its GPUs, for messages and labels."""
    machine = str(config.get("machineType") or config.get("acceleratorType") or "machine").rsplit("/", 1)[-1]
    attached = config.get("guestAccelerators") or ()
    return " ".join(
        [machine, *(f"with {a['acceleratorCount']} {re.sub('^.*/', '', a['acceleratorType'])}" for a in attached)]
    )


def machine_name(config: Mapping[str, Any]) -> str:
    """Return a name for a machine, its GPUs and its market, for messages and labels."""
    return f"{kind_name(config)} {'spot' if fallback.is_spot_of_gcp(config) else 'on-demand'}"
