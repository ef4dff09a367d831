"""Ray's AzureNodeProvider with fallbacks: `type: external`, `module: raytf.cluster.providers.azure.Provider`."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from typing import Any

from raytf._ray import autoscaler
from raytf.cluster.autostop import with_start_commands
from raytf.cluster.providers import capacity
from raytf.cluster.providers.base import FallbackProvider, named, refuse_malformed, with_defaults
from raytf.cluster.providers.capacity import CapacityOffer, NoCapacity, Shortage
from raytf.errors import one_line

AzureNodeProvider: Any = autoscaler.node_provider("azure").AzureNodeProvider
#: Tag on each machine that identifies its deployment.
TAG_LAUNCH = "raytf-launch"


class Provider(FallbackProvider, AzureNodeProvider):
    """Tries each machine of a node type. Azure chooses the zones, as it does without raytf."""

    cloud = "azure"

    def offers(self, node_config: Mapping[str, Any]) -> list[CapacityOffer]:
        zone = self.provider_config.get("availability_zone")
        return [
            CapacityOffer(machine, place(c.config, zone), c.config, c.at_most, kind_name(c.config))
            for machine, c in named(node_config, machine_name)
        ]

    def launch(self, offer: CapacityOffer, tags: dict[str, str], count: int) -> Mapping[str, Any]:
        """Start one deployment, of which only some machines may start; delete those that failed."""
        mark = uuid.uuid4().hex
        lack: tuple[Shortage, str] | None = None
        try:
            AzureNodeProvider.create_node(self, copy.deepcopy(dict(offer.config)), {**tags, TAG_LAUNCH: mark}, count)
        except Exception as error:
            shortage = capacity.azure_shortage(capacity.text_of(error))
            if shortage is None:
                raise
            lack = shortage, one_line(error, 200)
        if lack is None:
            # With cache_stopped_nodes, some may be restarted machines; the number is right in either case.
            return {f"{mark}-{i}": None for i in range(count)}
        machines = self.compute_client.virtual_machines.list(resource_group_name=self.provider_config["resource_group"])
        mine = [vm for vm in machines if (vm.tags or {}).get(TAG_LAUNCH) == mark]
        for vm in mine:
            if vm.provisioning_state == "Failed":
                self.terminate_node(vm.name)
        raise NoCapacity(*lack, {vm.name: None for vm in mine if vm.provisioning_state != "Failed"})

    def end_head(self, node: str) -> None:
        """Deallocate the head, on which this code may run.

        A process cannot delete its own machine and then the machine's disk and address. These stay, at a few US dollars
        a month, and `raytf down-check` lists them.
        """
        self.cache_stopped_nodes = True
        self.terminate_node(node)

    @staticmethod
    def fillout_available_node_types_resources(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Fill in Ray's defaults. Azure's machines are not looked up: the config must have their `resources`."""
        return with_defaults(cluster_config, "azure")

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        refuse_malformed(cluster_config)
        return with_start_commands(AzureNodeProvider.bootstrap_config(with_defaults(cluster_config, "azure")))


def kind_name(config: Mapping[str, Any]) -> str:
    """Return the size of a node_config."""
    return str((config.get("azure_arm_parameters") or {}).get("vmSize", "machine"))


def machine_name(config: Mapping[str, Any]) -> str:
    """Return the size and market of a node_config, for messages and tags."""
    spot = (config.get("azure_arm_parameters") or {}).get("priority") in ("Spot", "Low")
    return f"{kind_name(config)} {'spot' if spot else 'on-demand'}"


def place(config: Mapping[str, Any], zone: object) -> str:
    """Return the zones that a node_config or its provider names; empty if Azure chooses."""
    named = (config.get("azure_arm_parameters") or {}).get("availability_zone", zone)
    return "" if named in (None, "auto", "none", "None") else f"zone {named}"
