"""Ray's AWSNodeProvider with fallbacks: `type: external`, `module: raytf.cluster.providers.aws.Provider`."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from raytf._ray import autoscaler
from raytf.cluster.autostop import with_start_commands
from raytf.cluster.providers import capacity, fallback
from raytf.cluster.providers.base import FallbackProvider, least, named, refuse, refuse_malformed, with_defaults
from raytf.cluster.providers.capacity import CapacityOffer, NoCapacity
from raytf.errors import one_line

_ray = autoscaler.node_provider("aws")
AWSNodeProvider: Any = _ray.AWSNodeProvider
#: Key that raytf adds to the provider's config: subnet -> its zone, which the head has no permission to look up.
_ZONES = "_zones"


class Provider(FallbackProvider, AWSNodeProvider):
    """Tries each machine of a node type in each zone, and otherwise works like Ray's provider for AWS."""

    cloud = "aws"
    ec2_fail_fast: Any

    def __init__(self, provider_config: dict[str, Any], cluster_name: str, **more: Any) -> None:
        super().__init__(provider_config, cluster_name, **more)
        self.ec2_fail_fast = _Ec2(self.ec2_fail_fast)

    def offers(self, node_config: Mapping[str, Any]) -> list[CapacityOffer]:
        """Return an offer for each machine in each of its subnets; Ray itself would try all subnets five times."""
        return list(self._offers(node_config))

    def _offers(self, node_config: Mapping[str, Any]) -> Iterator[CapacityOffer]:
        zones = self.provider_config.get(_ZONES, {})
        for machine, candidate in named(node_config, machine_name):
            config = candidate.config
            kind = str(config.get("InstanceType"))
            # NetworkInterfaces set the subnet themselves.
            subnets = () if "NetworkInterfaces" in config else dict.fromkeys(config.get("SubnetIds", ()))
            for subnet in subnets:
                own = {**config, "SubnetIds": [subnet]}
                yield CapacityOffer(machine, zones.get(subnet, subnet), own, candidate.at_most, kind)
            if not subnets:
                yield CapacityOffer(machine, "", config, candidate.at_most, kind)

    def launch(self, offer: CapacityOffer, tags: dict[str, str], count: int) -> Mapping[str, Any]:
        """Call RunInstances once; if Ray repeats the call after an error, AWS recognizes it by its token."""
        config = {**copy.deepcopy(dict(offer.config)), "ClientToken": uuid.uuid4().hex}
        if fallback.AUTOSTOP in self.provider_config:  # a machine that shuts down would otherwise be kept
            config.setdefault("InstanceInitiatedShutdownBehavior", "terminate")
        return AWSNodeProvider.create_node(self, config, tags, count)

    @staticmethod
    def fillout_available_node_types_resources(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Set the resources of each node type to those that all of its machines have."""
        config = with_defaults(cluster_config, "aws")
        types = config["available_node_types"]
        apart = {
            f"{name}\n{i}": {"resources": {}, "node_config": candidate.config}
            for name, node_type in types.items()
            if fallback.malformed(node_type["node_config"]) is None
            for i, candidate in enumerate(fallback.candidates(node_type["node_config"]))
        }
        head = f"{config['head_node_type']}\n0"
        asked = {**config, "available_node_types": apart, "head_node_type": head}
        filled = AWSNodeProvider.fillout_available_node_types_resources(asked)["available_node_types"]
        for name, node_type in types.items():
            machines = [entry["resources"] for key, entry in filled.items() if key.partition("\n")[0] == name]
            node_type["resources"] = {**least(machines), **node_type.get("resources", {})}
        return config

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Do what Ray does for AWS, after checking that fallbacks have the resources of their node types."""
        refuse_malformed(cluster_config)
        config = with_defaults(cluster_config, "aws")
        _refuse_other_machines(config)
        config = AWSNodeProvider.bootstrap_config(config)
        subnets = {s for t in config["available_node_types"].values() for s in t["node_config"].get("SubnetIds", ())}
        known = _ec2(config).subnets.filter(SubnetIds=sorted(subnets)) if subnets else ()
        config["provider"][_ZONES] = {subnet.id: subnet.availability_zone for subnet in known}
        return with_start_commands(config)


class _Ec2:
    """EC2 whose RunInstances raises NoCapacity, which Ray's provider does not catch, so that it does not retry."""

    def __init__(self, ec2: Any):
        self._ec2 = ec2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ec2, name)

    def create_instances(self, **config: Any) -> Any:
        try:
            return self._ec2.create_instances(**config)
        except Exception as error:
            response = getattr(error, "response", None)
            shortage = capacity.aws_shortage(response["Error"]["Code"]) if isinstance(response, dict) else None
            if shortage is None:
                raise
            raise NoCapacity(shortage, one_line(error, 200)) from None


def machine_name(config: Mapping[str, Any]) -> str:
    """Return the type and market of a node_config, for messages and tags."""
    options = config.get("InstanceMarketOptions")
    market = options.get("MarketType", "on-demand") if isinstance(options, Mapping) else "on-demand"
    return f"{config.get('InstanceType', 'machine')} {market}"


def _refuse_other_machines(config: dict[str, Any]) -> None:
    """Exit if a fallback has another number of GPUs, or fewer CPUs, than the resources of its node type."""
    machines = {
        name: [str(c.config.get("InstanceType")) for c in fallback.candidates(node_type["node_config"])]
        for name, node_type in config["available_node_types"].items()
        if node_type["node_config"].get(fallback.KEY)
    }
    names = sorted({machine for several in machines.values() for machine in several})
    if not names:
        return
    answer = _ec2(config).meta.client.describe_instance_types(InstanceTypes=names)
    facts = {entry["InstanceType"]: entry for entry in answer["InstanceTypes"]}
    for name, several in machines.items():
        resources = config["available_node_types"][name].get("resources", {})
        for machine in several:
            entry = facts.get(machine)
            if entry is None:
                refuse(f"available_node_types.{name}: region {config['provider']['region']} has no {machine!r}.")
                continue
            gpus = sum(gpu["Count"] for gpu in entry.get("GpuInfo", {}).get("Gpus", ()))
            wrong = fallback.wrong(resources, entry["VCpuInfo"]["DefaultVCpus"], gpus)
            if wrong:
                refuse(
                    f"available_node_types.{name}: {machine} has {wrong}. "
                    "Each entry of fallback must have the type's `resources`, by which Ray places jobs."
                )


def _ec2(config: Mapping[str, Any]) -> Any:
    provider = config["provider"]
    return _ray.make_ec2_resource(provider["region"], _ray.BOTO_MAX_RETRIES, provider.get("aws_credentials"))
