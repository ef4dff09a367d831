"""Finds the leftovers of a cluster on AWS, Azure and Google Cloud.

It searches by Ray's tags and labels, by the tags in the file, and by the names that Ray and its templates use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor import machines
from raytf.doctor.clouds import rest
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, account_of, right, trouble
from raytf.doctor.clouds.rest import AzureAccount, GoogleAccount, NoCredentials, RestError
from raytf.doctor.disks import ADDRESS_USD, disk_usd
from raytf.doctor.document import Document
from raytf.doctor.leftovers.resource import CLUSTER_TAG, Leftovers, LeftResource, Query, gather
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import node_types
from raytf.errors import ConfigError, one_line

_ALIVE = ["pending", "running", "stopping", "stopped", "shutting-down"]
_RESOURCES, _COMPUTE, _DISKS = "2021-04-01", "2024-07-01", "2023-10-02"
#: Resources of Azure that cost nothing by themselves.
_FREE = {
    "microsoft.network/networkinterfaces": "network interface",
    "microsoft.network/virtualnetworks": "network",
    "microsoft.network/networksecuritygroups": "security group",
    "microsoft.managedidentity/userassignedidentities": "identity",
}


def find_on_aws(document: Document, here: Surroundings) -> Leftovers:
    """Return everything that is left of the resources that `ray up` of this file created on AWS.

    Raises:
        ConfigError: there are no credentials.
    """
    region, name = document.get("provider", "region"), _cluster_name(document)
    if not isinstance(region, str):
        raise ConfigError("The file has no provider.region. Add the region that the cluster was in.")
    aws = account_of(document, region)
    if not aws.has_credentials():
        raise ConfigError("There are no credentials for AWS. Run `aws configure`, or set AWS_PROFILE.")
    search = _AwsSearch(aws, name, document)
    queries: list[Query] = [
        ("instances", search.instances),
        ("volumes", search.volumes),
        ("addresses", search.addresses),
        ("security groups", search.groups),
        ("spot requests", search.spot_requests),
        ("key pairs", search.key_pairs),
    ]
    return gather(f"AWS, {region}, clusters named {name}", queries, _explain)


def find_on_azure(document: Document, here: Surroundings) -> Leftovers:
    """Return everything that is left of the resources that `ray up` of this file created on Azure."""
    group, name = document.get("provider", "resource_group"), _cluster_name(document)
    if not isinstance(group, str):
        raise ConfigError("The file has no provider.resource_group. Add the cluster's resource group.")
    try:
        azure = rest.azure_account(document, here.environ)
    except NoCredentials as problem:
        raise ConfigError(f"There are no credentials for Azure. {problem}.") from None
    unique_id = str(document.get("provider", "unique_id") or "")
    query = partial(_azure_resources, azure, group, name, unique_id)
    return gather(f"Azure, resource group {group}, clusters named {name}", [("resources", query)])


def find_on_gcp(document: Document, here: Surroundings) -> Leftovers:
    """Return everything that is left of the resources that `ray up` of this file created on Google Cloud."""
    zone, name = document.get("provider", "availability_zone"), _cluster_name(document)
    if not isinstance(zone, str) or not isinstance(document.get("provider", "project_id"), str):
        raise ConfigError("The file has no provider.project_id or availability_zone. Add the cluster's.")
    try:
        google = rest.google_account(document, here.environ)
    except NoCredentials as problem:
        raise ConfigError(f"There are no credentials for Google Cloud. {problem}.") from None
    except RestError as problem:
        raise ConfigError(f"{one_line(problem, 200)}. Check the network and try again.") from None
    kinds = {"instances": _google_instances, "disks": _google_disks}
    if any("machineType" not in t.config for t in node_types(document)):
        kinds["TPUs"] = _google_tpus
    queries: list[Query] = [
        (f"{what} in {one}", partial(ask, google, one, name))
        for one in fallback.zones_of(document.mapping("provider"))
        for what, ask in kinds.items()
    ]
    return gather(f"Google Cloud, {google.project}, {zone}, clusters named {name}", queries)


def _cluster_name(document: Document) -> str:
    return str(document.get("cluster_name", default="default"))


def _usd(cloud: str, config: dict[str, Any]) -> float | None:
    machine = machines.machine(cloud, config)
    return machine.usd if machine else None


def _explain(problem: Exception) -> str:
    if trouble(problem) is AwsTrouble.DENIED:
        return f"these credentials lack {right(problem, 'ec2')}"
    return one_line(problem, 200)


class _AwsSearch:
    """A search on AWS, whose later queries use the answers to earlier ones."""

    def __init__(self, aws: AwsAccount, name: str, document: Document):
        self._aws, self._name, self._document = aws, name, document
        self._by_tag = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [name]}]
        self._instances: list[dict[str, Any]] = []
        self._group_ids: set[str] = set()

    def _all(self, operation: str, key: str, filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return self._aws.pages(operation, key, Filters=filters)

    def _command(self, words: str) -> str:
        return f"aws ec2 {words} --region {self._aws.region}"

    def _is_mine(self, resource: dict[str, Any]) -> bool:
        """Return whether a resource has the cluster's tag, or belongs to one of its instances."""
        mine = {i["InstanceId"] for i in self._instances}
        return _tags(resource).get(CLUSTER_TAG) == self._name or resource.get("InstanceId") in mine

    def instances(self) -> Iterator[LeftResource]:
        """Find instances of the cluster in any state but terminated."""
        states = [{"Name": "instance-state-name", "Values": _ALIVE}]
        for reservation in self._all("describe_instances", "Reservations", self._by_tag + states):
            self._instances += reservation["Instances"]
        for i in self._instances:
            state, usd = i["State"]["Name"], _usd("aws", {"InstanceType": i["InstanceType"]})
            about = f"{i['InstanceType']}, {_tags(i).get('ray-node-type', 'node')}"
            if i.get("InstanceLifecycle") == "spot":
                about += ", spot: at most this"
            if state == "stopped":  # its disks are listed separately, and are deleted with it
                usd, about = None, f"{about}; its disks cost money"
            elif state in ("stopping", "shutting-down"):
                usd, about = 0.0, f"{about}, shutting down"
            remove = self._command(f"terminate-instances --instance-ids {i['InstanceId']}")
            yield LeftResource("instance", i["InstanceId"], state, usd, remove, about)

    def volumes(self) -> Iterator[LeftResource]:
        """Find volumes of stopped instances, and unattached volumes with Ray's tag or the file's tags."""
        stopped = sorted(
            d["Ebs"]["VolumeId"]
            for i in self._instances
            if i["State"]["Name"] in ("stopped", "stopping")
            for d in i.get("BlockDeviceMappings", ())
            if "Ebs" in d
        )
        loose = {"Name": "status", "Values": ["available"]}
        searches = [([*self._by_tag, loose], "attached to nothing")]
        if stopped:
            searches.insert(0, ([{"Name": "volume-id", "Values": stopped}], "of a stopped instance"))
        for key, value in sorted(self._own_tags()):
            text = f"attached to nothing; tag {key}={value}, which other clusters may have too"
            searches.append(([{"Name": f"tag:{key}", "Values": [value]}, loose], text))
        volumes: dict[str, tuple[dict[str, Any], str]] = {}
        for filters, text in searches:
            for v in self._all("describe_volumes", "Volumes", filters):
                volumes.setdefault(v["VolumeId"], (v, text))
        for name, (v, text) in sorted(volumes.items()):
            usd = disk_usd(v.get("VolumeType", "gp2"), v["Size"])
            note, remove = f"{v['Size']} GiB {v.get('VolumeType', '')}, {text}", f"delete-volume --volume-id {name}"
            yield LeftResource("volume", name, v["State"], usd, self._command(remove), note)

    def _own_tags(self) -> set[tuple[str, str]]:
        return {
            (str(tag["Key"]), str(tag["Value"]))
            for t in node_types(self._document)
            for spec in _dicts(t.config.get("TagSpecifications"))
            if spec.get("ResourceType") == "volume"
            for tag in _dicts(spec.get("Tags"))
            if "Key" in tag and "Value" in tag
        }

    def addresses(self) -> Iterator[LeftResource]:
        """Find Elastic IPs that belong to the cluster's instances or have Ray's tag."""
        for a in filter(self._is_mine, self._aws.client("ec2").describe_addresses()["Addresses"]):
            name = a.get("AllocationId", a["PublicIp"])
            remove = self._command(f"release-address --allocation-id {name}")
            yield LeftResource("address", name, "allocated", ADDRESS_USD, remove, a["PublicIp"])

    def groups(self) -> Iterator[LeftResource]:
        """Find security groups that Ray created. They cost nothing, and the next `ray up` reuses them."""
        named = self._document.get("provider", "security_group", "GroupName")
        names = [f"ray-autoscaler-{self._name}", *([named] if isinstance(named, str) else [])]
        groups = {
            g["GroupId"]: g
            for filters in (self._by_tag, [{"Name": "group-name", "Values": names}])
            for g in self._all("describe_security_groups", "SecurityGroups", filters)
        }
        self._group_ids = set(groups)
        for name, g in sorted(groups.items()):
            remove = self._command(f"delete-security-group --group-id {name}")
            yield LeftResource("security group", name, "there", 0.0, remove, g["GroupName"])

    def spot_requests(self) -> Iterator[LeftResource]:
        """Find spot requests. An open one starts an instance when there is capacity again."""
        mine = {i["InstanceId"] for i in self._instances}
        filters = [{"Name": "state", "Values": ["open", "active"]}]
        for r in self._all("describe_spot_instance_requests", "SpotInstanceRequests", filters):
            launch = r.get("LaunchSpecification", {})
            groups = {g.get("GroupId") for g in launch.get("SecurityGroups", ())}
            if not (self._is_mine(r) or groups & self._group_ids):
                continue
            name, usd = r["SpotInstanceRequestId"], _usd("aws", {"InstanceType": launch.get("InstanceType")})
            if r["State"] == "open":
                note = "starts an instance as soon as there is capacity"
            elif r.get("InstanceId") in mine:
                usd, note = 0.0, "of an instance above"
            else:
                note = f"of instance {r.get('InstanceId')}, which has no tag of this cluster: terminate it too"
            remove = self._command(f"cancel-spot-instance-requests --spot-instance-request-ids {name}")
            yield LeftResource("spot request", name, r["State"], usd, remove, note)

    def key_pairs(self) -> Iterator[LeftResource]:
        """Find key pairs that Ray created in this region. All its clusters share them."""
        if self._document.get("auth", "ssh_private_key"):
            return
        for pair in self._aws.client("ec2").describe_key_pairs()["KeyPairs"]:
            name, note = pair["KeyName"], "shared by all clusters of Ray in this region"
            if name.startswith("ray-autoscaler_") and name.endswith(self._aws.region):
                remove = self._command(f"delete-key-pair --key-name {name}")
                yield LeftResource("key pair", name, "there", 0.0, remove, note)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _tags(resource: dict[str, Any]) -> dict[str, str]:
    return {t["Key"]: t["Value"] for t in resource.get("Tags", ())}


def _azure_resources(azure: AzureAccount, group: str, name: str, unique_id: str) -> Iterator[LeftResource]:
    try:
        every = azure.pages(f"/resourceGroups/{group}/resources", _RESOURCES)
    except RestError as problem:
        if problem.is_missing:
            return  # the group was deleted with everything in it
        raise
    mine = [r for r in every if _is_of(r, name, unique_id)]
    for r in mine:
        yield _azure_resource(azure, group, r)
    if mine and len(mine) == len(every):
        remove, note = f"az group delete --name {group} --yes", "contains nothing else: this removes all of the above"
        yield LeftResource("resource group", group, "there", 0.0, remove, note)


def _is_of(resource: dict[str, Any], name: str, unique_id: str) -> bool:
    tags = resource.get("tags") or {}
    if CLUSTER_TAG in tags:
        return bool(tags[CLUSTER_TAG] == name)
    # The cluster `test` must not match `test-2`: Ray's id follows the name, by default four digits of a hash.
    unique = re.escape(unique_id) or "[0-9a-f]{4}"
    pattern = rf"ray-{re.escape(name)}-((head|worker)-{unique}|{unique}-(msi|nsg|ra|subnet|vnet)$)"
    return re.match(pattern, str(resource.get("name", "")), re.IGNORECASE) is not None


def _azure_resource(azure: AzureAccount, group: str, resource: dict[str, Any]) -> LeftResource:
    kind, name = str(resource["type"]).casefold(), resource["name"]
    own = f"--resource-group {group} --name {name}"
    if kind == "microsoft.compute/virtualmachines":
        return _azure_machine(azure, group, name, f"az vm delete {own} --yes")
    if kind == "microsoft.compute/disks":
        disk = azure.arm.get(resource["id"], **{"api-version": _DISKS})
        about = disk.get("properties", {})
        size, sku = about.get("diskSizeGB", 0), disk.get("sku", {}).get("name", "")
        remove, state = f"az disk delete {own} --yes", about.get("diskState", "?")
        return LeftResource("disk", name, state, disk_usd(sku, size), remove, f"{size} GB {sku}")
    if kind == "microsoft.network/publicipaddresses":
        return LeftResource("address", name, "there", ADDRESS_USD, f"az network public-ip delete {own}")
    usd, remove = 0.0 if kind in _FREE else None, f"az resource delete --ids {resource['id']}"
    return LeftResource(_FREE.get(kind, kind), name, "there", usd, remove)


def _azure_machine(azure: AzureAccount, group: str, name: str, remove: str) -> LeftResource:
    path = f"/resourceGroups/{group}/providers/Microsoft.Compute/virtualMachines/{name}"
    vm = azure.get(path, _COMPUTE, **{"$expand": "instanceView"})
    about = vm.get("properties", {})
    size = about.get("hardwareProfile", {}).get("vmSize", "")
    codes = [s.get("code", "") for s in about.get("instanceView", {}).get("statuses", ())]
    state = next((c.partition("/")[2] for c in codes if c.startswith("PowerState/")), "?")
    usd, note = _usd("azure", {"azure_arm_parameters": {"vmSize": size}}), size
    if about.get("priority") == "Spot":
        note += ", spot: at most this"
    if state == "deallocated":  # a stopped machine that is not deallocated costs the full price
        usd, note = None, f"{note}; its disks cost money"
    return LeftResource("instance", name, state, usd, remove, note)


def _where(google: GoogleAccount, zone: str) -> str:
    return f"--zone {zone} --project {google.project}"


def _google_instances(google: GoogleAccount, zone: str, name: str) -> Iterator[LeftResource]:
    path = f"/projects/{google.project}/zones/{zone}/instances"
    for i in google.api("compute").pages(path, "items", filter=f"labels.{CLUSTER_TAG} = {name}"):
        kind, state = str(i.get("machineType", "")).rpartition("/")[2], i.get("status", "?")
        attached = [
            {"acceleratorType": a["acceleratorType"], "acceleratorCount": a["acceleratorCount"]}
            for a in i.get("guestAccelerators", ())
        ]
        usd = _usd("gcp", {"machineType": kind, "guestAccelerators": attached})
        note = f"{kind}, {i.get('labels', {}).get('ray-node-type', 'node')}"
        if i.get("scheduling", {}).get("provisioningModel") == "SPOT" or i.get("scheduling", {}).get("preemptible"):
            note += ", spot: at most this"
        if state in ("TERMINATED", "STOPPED", "SUSPENDED"):  # it is stopped, but its disks stay
            usd = None
        if usd is None and state != "RUNNING":
            note += "; its disks cost money"
        remove = f"gcloud compute instances delete {i['name']} {_where(google, zone)} --quiet"
        yield LeftResource("instance", i["name"], state, usd, remove, note)


def _google_disks(google: GoogleAccount, zone: str, name: str) -> Iterator[LeftResource]:
    path = f"/projects/{google.project}/zones/{zone}/disks"
    # The cluster `test` must not match `test-2`: match the complete pattern of Ray's instance names.
    names = re.compile(rf"ray-{re.escape(name)}-(head|worker)-[0-9a-f]{{8}}-(compute|tpu)")
    for d in google.api("compute").pages(path, "items"):
        is_mine = d.get("labels", {}).get(CLUSTER_TAG) == name or names.match(d["name"])
        if not is_mine or d.get("users"):
            continue  # a disk in use is deleted with its instance
        kind, size = str(d.get("type", "")).rpartition("/")[2], float(d.get("sizeGb", 0))
        remove = f"gcloud compute disks delete {d['name']} {_where(google, zone)} --quiet"
        note = f"{size:g} GB {kind}, attached to nothing"
        yield LeftResource("disk", d["name"], d.get("status", "?"), disk_usd(kind, size), remove, note)


def _google_tpus(google: GoogleAccount, zone: str, name: str) -> Iterator[LeftResource]:
    for node in google.api("tpu").pages(f"/projects/{google.project}/locations/{zone}/nodes", "nodes"):
        if node.get("labels", {}).get(CLUSTER_TAG) != name:
            continue
        short, state = node["name"].rpartition("/")[2], node.get("state", "?")
        usd = None if state in ("STOPPED", "PREEMPTED", "TERMINATED") else _usd("gcp", node)
        remove = f"gcloud compute tpus tpu-vm delete {short} {_where(google, zone)} --quiet"
        yield LeftResource("TPU", short, state, usd, remove, machines.accelerator_type(node) or "")
