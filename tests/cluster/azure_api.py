"""Azure's control plane as far as Ray needs it: deployments are evaluated, resources held against Azure's models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.cluster import azure_models
from tests.cluster.arm_template import Deployment, InvalidTemplate, Scope
from tests.cluster.loopback import Answer, Request, Service

HOST = "management.azure.com"
#: Size -> the zones that have it, as the list of SKUs says.
_SIZES = {
    "Standard_D2s_v5": ["1", "2", "3"],
    "Standard_NC4as_T4_v3": ["2", "3"],
    "Standard_NC8as_T4_v3": ["1"],
}
_VM, _NIC = "microsoft.compute/virtualmachines", "microsoft.network/networkinterfaces"
_ADDRESS = "microsoft.network/publicipaddresses"


class Refused(Exception):
    """An answer of Azure's that is an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"({code}) {message}")
        self.status, self.code, self.message = status, code, message


class Azure:
    """The control plane.

    Attributes:
        group: the resource group; empty until it is made.
        resources: what there is, by id in small letters.
        deployed: names of the deployments.
        empty: size and priority -> the code with which Azure has no capacity for it.
    """

    def __init__(self, subscription: str) -> None:
        self.subscription = subscription
        self.group: dict[str, Any] = {}
        self.resources: dict[str, dict[str, Any]] = {}
        self.deployed: list[str] = []
        self.empty: dict[tuple[str, str], str] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}

    def services(self) -> dict[str, Service]:
        """Host -> what answers for it."""
        return {HOST: self._serve}

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Resources of a type."""
        return [r for r in self.resources.values() if r["type"].lower() == kind.lower()]

    def give_identity(self, group: str, name: str) -> str:
        """Make a managed identity in another resource group, as `az identity create` does; return its id."""
        kind = "Microsoft.ManagedIdentity/userAssignedIdentities"
        place = f"/subscriptions/{self.subscription}/resourceGroups/{group}/providers/{kind}/{name}"
        made = {"id": place, "name": name, "type": kind, "properties": {}}
        self._finish(made)
        self.resources[place.lower()] = made
        return place

    def _serve(self, request: Request) -> Answer:
        try:
            if "api-version" not in request.query:
                raise Refused(400, "MissingApiVersionParameter", "The api-version query parameter is required.")
            return self._route(request)
        except Refused as refused:
            return Answer({"error": {"code": refused.code, "message": refused.message}}, refused.status)

    def _route(self, request: Request) -> Answer:
        here = f"/subscriptions/{self.subscription}".lower()
        path = request.path.rstrip("/").lower()
        if not path.startswith(here):
            raise Refused(404, "SubscriptionNotFound", f"The subscription of {request.path} could not be found.")
        rest = path.removeprefix(here)
        if rest == "/providers/microsoft.compute/skus":
            return Answer({"value": list(_skus(self.group.get("location", "eastus")))})
        if rest == "/providers/microsoft.network":
            kinds = [{"resourceType": "virtualNetworks", "apiVersions": ["2024-10-01", "2025-01-01-preview"]}]
            return Answer({"namespace": "Microsoft.Network", "resourceTypes": kinds})
        found = re.fullmatch(r"/resourcegroups/([\w.()-]+)(/.*)?", rest)
        if found is None:
            raise Refused(404, "InvalidResourceType", str(request))
        if not found[2]:
            return self._make_group(request, found[1])
        if path not in self.resources and (not self.group or found[1] != self.group["name"].lower()):
            raise Refused(404, "ResourceGroupNotFound", f"Resource group '{found[1]}' could not be found.")
        if found[2] == "/resources":
            return Answer({"value": self._listed(request.query.get("$filter", ""))})
        if deployment := re.fullmatch(r"/providers/microsoft.resources/deployments/([^/]+)", found[2]):
            return self._deployment(request, deployment[1])
        if status := re.fullmatch(r"/providers/microsoft.resources/deployments/([^/]+)/operationstatuses/1", found[2]):
            outcome = self._outcomes[status[1]]
            return Answer({"status": outcome["properties"]["provisioningState"], "error": outcome.get("error")})
        return self._resource(request, path)

    def _make_group(self, request: Request, name: str) -> Answer:
        strange = request.body.keys() - {"location", "tags", "managedBy"}
        if strange:
            raise Refused(400, "InvalidRequestContent", f"Could not find member '{min(strange)}' on object")
        place = f"/subscriptions/{self.subscription}/resourceGroups/{name}"
        self.group = {"id": place, "name": name, "properties": {"provisioningState": "Succeeded"}, **request.body}
        return Answer(self.group)

    def _listed(self, wanted: str) -> list[dict[str, Any]]:
        kind = re.search(r"resourceType eq '([^']+)'", wanted)
        part = re.search(r"substringof\('([^']+)', name\)", wanted)
        return [
            {k: v for k, v in r.items() if k in ("id", "name", "type", "location", "tags")}
            for r in self.resources.values()
            if r["id"].startswith(f"{self.group['id']}/")
            and (not kind or r["type"].lower() == kind[1].lower())
            and (not part or part[1] in r["name"])
        ]

    # Deployments

    def _deployment(self, request: Request, name: str) -> Answer:
        if request.method == "GET":
            return Answer({k: v for k, v in self._outcomes[name].items() if k != "error"})
        assert request.method == "PUT", request
        outcome = self._outcomes[name] = self._deploy(name, request.body)
        self.deployed.append(name)
        # As Azure does it: accepted, and looked up until it is done.
        running = {**outcome, "properties": {"provisioningState": "Accepted"}}
        where = f"https://{HOST}{request.path}/operationStatuses/1?api-version={request.query['api-version']}"
        return Answer(running, 201, {"Azure-AsyncOperation": where, "retry-after-ms": "20"})

    def _deploy(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        given = body["properties"]
        assert given["mode"].lower() == "incremental", given["mode"]
        scope = Scope(self.subscription, self.group, self._properties)
        deployment = Deployment(given["template"], given["parameters"], scope)
        shown: dict[str, Any] = {
            "id": f"{self.group['id']}/providers/Microsoft.Resources/deployments/{name}",
            "name": name,
        }
        try:
            deployment.check()
            # Azure's preflight finds it (InvalidTemplateDeployment), so that nothing of the template is made.
            if self.empty and any(self._lack(resource) == "SkuNotAvailable" for resource in deployment.resources()):
                raise Refused(409, "SkuNotAvailable", "The requested size is currently not available in this location.")
            made = [self._make(resource) for resource in deployment.resources()]
        except InvalidTemplate as wrong:
            raise Refused(400, "InvalidTemplate", f"Deployment template validation failed: '{wrong}'") from None
        lacking = {code for r in made if (code := self._lack(r))}
        if lacking:
            (code,) = lacking
            error = {
                "code": "DeploymentFailed",
                "message": "At least one resource deployment operation failed. Please list deployment operations for "
                "details. Please see https://aka.ms/arm-deployment-operations for usage details.",
                "details": [{"code": code, "message": "Allocation failed. We do not have sufficient capacity."}],
            }
            return {**shown, "properties": {"provisioningState": "Failed"}, "error": error}
        return {**shown, "properties": {"provisioningState": "Succeeded", "outputs": deployment.outputs()}}

    def _lack(self, resource: dict[str, Any]) -> str | None:
        """The code with which Azure has no capacity for a machine; None for what it has."""
        if resource["type"].lower() != _VM:
            return None
        given = resource["properties"]
        return self.empty.get((given["hardwareProfile"]["vmSize"], given.get("priority", "Regular")))

    def _make(self, resource: dict[str, Any]) -> dict[str, Any]:
        wrong = [*azure_models.misfits(resource), *_prose(resource)]
        if wrong:
            raise Refused(400, "InvalidRequestContent", "; ".join(wrong))
        made = azure_models.tidy(resource)
        place = f"{self.group['id']}/providers/{resource['type']}/{resource['name']}"
        for other in _ids(made.get("properties", {})):
            if other.lower() not in self.resources and "/roledefinitions/" not in other.lower():
                raise Refused(400, "InvalidResourceReference", f"Resource {other} referenced by {place} was not found.")
        state = "Failed" if self._lack(resource) else "Succeeded"
        made["properties"] = {**made.get("properties", {}), "provisioningState": state}
        self._finish(made)
        self.resources[place.lower()] = {"id": place, **made}
        for subnet in made["properties"].get("subnets", []):
            inner = f"{place}/subnets/{subnet['name']}"
            subnet["id"] = inner
            kind = f"{resource['type']}/subnets"
            self.resources[inner.lower()] = {"id": inner, "type": kind, **subnet}
        return made

    def _finish(self, made: dict[str, Any]) -> None:
        """What Azure itself adds."""
        kind, number = made["type"].lower(), len(self.resources) + 4
        if kind == _ADDRESS:
            made["properties"]["ipAddress"] = f"203.0.113.{number}"
        elif kind == _NIC:
            made["properties"]["ipConfigurations"][0]["properties"]["privateIPAddress"] = f"10.7.0.{number}"
        elif kind == _VM:
            made["properties"]["storageProfile"]["osDisk"]["name"] = f"{made['name']}_OsDisk"
            disk = f"{self.group['id']}/providers/Microsoft.Compute/disks/{made['name']}_OsDisk"
            self.resources[disk.lower()] = {
                "id": disk,
                "name": f"{made['name']}_OsDisk",
                "type": "Microsoft.Compute/disks",
            }
        elif kind.endswith("userassignedidentities"):
            made["properties"]["principalId"] = "0c5c7f2b-2b1f-4c1f-9a0e-5d9f5f3a7c11"

    def _properties(self, name: str) -> Any:
        for place, resource in self.resources.items():
            if name.lower() == place or ("/" not in name and name.lower() == resource["name"].lower()):
                return resource["properties"]
        raise InvalidTemplate(f"The resource referenced in reference('{name}') is not defined.")

    # Single resources

    def _resource(self, request: Request, path: str) -> Answer:
        if request.method == "GET" and (kind := re.fullmatch(r".*/providers/([^/]+/[^/]+)", path)):
            return Answer({"value": self.of(kind[1])})
        if path.endswith("/instanceview"):
            self._get(path.removesuffix("/instanceview"))
            codes = ("ProvisioningState/succeeded", "PowerState/running")
            return Answer({"statuses": [{"code": code, "level": "Info"} for code in codes]})
        resource = self._get(path)
        if request.method == "GET":
            return Answer(resource)
        if request.method == "PATCH":
            assert request.body.keys() == {"tags"}, request.body
            resource["tags"] = request.body["tags"]
            return Answer(resource)
        assert request.method == "DELETE", request
        users = [r["id"] for r in self.resources.values() if path in {i.lower() for i in _ids(r.get("properties", {}))}]
        if users:
            raise Refused(409, "InUse", f"InUse: {resource['id']} is used by {users[0]}")
        for place in [p for p in self.resources if p == path or p.startswith(f"{path}/")]:
            del self.resources[place]
        for network in self.of("Microsoft.Network/virtualNetworks"):
            subnets = network["properties"]["subnets"]
            subnets[:] = [s for s in subnets if s["id"].lower() in self.resources]
        return Answer(None, 204)

    def _get(self, path: str) -> dict[str, Any]:
        if path not in self.resources:
            raise Refused(404, "ResourceNotFound", f"The Resource '{path}' was not found.")
        return self.resources[path]


def _ids(value: Any) -> Iterator[str]:
    """Ids of other resources that are named in a body."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.lower() == "id" and isinstance(inner, str) and "/subnets/" not in str(value.get("name", "")):
                yield inner
            elif key != "subnets":
                yield from _ids(inner)
            else:
                for subnet in inner:
                    yield from _ids(subnet.get("properties", {}))
    elif isinstance(value, list):
        for item in value:
            yield from _ids(item)


def _skus(location: str) -> Iterator[dict[str, Any]]:
    for size, zones in _SIZES.items():
        places = [{"location": location, "zones": zones}]
        yield {"resourceType": "virtualMachines", "name": size, "locations": [location], "locationInfo": places}


def _prose(resource: dict[str, Any]) -> Iterator[str]:
    """Rules of virtual machines that are no part of the models."""
    if resource["type"].lower() != _VM:
        return
    properties = resource["properties"]
    # learn.microsoft.com/azure/virtual-machines/spot-vms
    spot = properties.get("priority", "Regular") in ("Spot", "Low")
    if properties.get("evictionPolicy") and not spot:
        yield "Eviction policy can be set only on Azure Spot Virtual Machines."
    price = properties.get("billingProfile", {}).get("maxPrice")
    if price is not None and not spot:
        yield "The maxPrice can be set only on Azure Spot Virtual Machines."
    if price is not None and price != -1 and price <= 0:
        yield f"The billing profile's maxPrice {price} must be -1 or above 0."
    size = properties["hardwareProfile"]["vmSize"]
    if size not in _SIZES:
        yield f"The value {size} provided for the VM size is not valid."
    elif not set(resource.get("zones", [])) <= set(_SIZES[size]):
        yield f"The requested VM size {size} is not available in zone {resource['zones']}."
    image = properties["storageProfile"]["imageReference"]
    if "id" not in image and not all(image.get(key) for key in ("publisher", "offer", "sku", "version")):
        yield f"The platform image '{image}' is not available."
    if len(properties["osProfile"]["computerName"]) > 64:
        yield "Linux host name cannot exceed 64 characters in length."
    if len(resource.get("tags", {})) > 50 or any(len(str(v)) > 256 for v in resource.get("tags", {}).values()):
        yield "A resource can have 50 tags at most, of 256 characters each."
