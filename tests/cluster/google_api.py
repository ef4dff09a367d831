"""Google's control plane as far as Ray needs it: each request held against the discovery documents that Google gives
out.

The documents come with google-api-python-client. Paths, parameters and bodies are refused where they do not fit, with
the words that Google uses; this module's own answers are held against the documents too. On top are a few rules that
Google has in prose alone, each with the page that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.cluster.discovery import document, misfits, misplaced, routes
from tests.cluster.loopback import Answer, Request, Service

DISCOVERY = "$discovery"
_HOSTS = {
    "compute.v1": "compute.googleapis.com",
    "iam.v1": "iam.googleapis.com",
    "cloudresourcemanager.v1": "cloudresourcemanager.googleapis.com",
    "tpu.v2alpha1": "tpu.googleapis.com",
}


class Refused(Exception):
    """An answer of Google's that is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Google:
    """The control plane.

    Args:
        project: its id.
        region: where it is.
        accounts: addresses of the service accounts that exist.

    Attributes:
        empty: what has no capacity: (zone's letter, machine, whether on Spot).
        instances: machines by name, as instances.get shows them.
        tpus: TPU nodes by name.
        accounts: addresses of the service accounts that exist.
        policy: the project's IAM policy.
        metadata: the project's metadata.
        calls: ids of the methods called, such as compute.instances.insert, with the body.
    """

    def __init__(self, project: str, region: str, accounts: list[str]) -> None:
        self.project, self.region = project, region
        self.empty: set[tuple[str, str, bool]] = set()
        self._failed: dict[str, str] = {}
        self.instances: dict[str, dict[str, Any]] = {}
        self.tpus: dict[str, dict[str, Any]] = {}
        self.accounts = list(accounts)
        self.policy: dict[str, Any] = {"version": 1, "etag": "BwXhqDVVqXc=", "bindings": []}
        self.metadata: dict[str, Any] = {"kind": "compute#metadata", "fingerprint": "bm90LWEta2V5"}
        self.calls: list[tuple[str, Any]] = []
        self._routes = {host: routes(name) for name, host in _HOSTS.items()}

    def services(self) -> dict[str, Service]:
        """Host -> what answers for it."""
        return {**dict.fromkeys(_HOSTS.values(), self._serve), "oauth2.googleapis.com": self._token}

    def bodies(self, method: str) -> list[Any]:
        """The bodies of all calls of a method."""
        return [body for name, body in self.calls if name == method]

    def _token(self, request: Request) -> Answer:
        assert request.body["grant_type"] == "refresh_token", request.body
        return Answer({"access_token": "ya29.test", "expires_in": 3599, "token_type": "Bearer", "scope": "all"})

    def _serve(self, request: Request) -> Answer:
        if request.path == f"/{DISCOVERY}/rest":
            return Answer(document("tpu.v2alpha1"))
        for pattern, verb, method, schemas in self._routes[request.host]:
            found = pattern.fullmatch(request.path) if verb == request.method else None
            if found:
                return self._call(request, method, schemas, found.groupdict())
        return _error(404, f"no method of {request.host} is {request}")

    def _call(self, request: Request, method: dict[str, Any], schemas: dict[str, Any], names: dict[str, str]) -> Answer:
        given = list(misplaced(request, method))
        if "request" in method:
            given += misfits(request.body, method["request"], schemas)
        elif request.body is not None:
            given.append(f"{method['id']} takes no body")
        if given:
            return _error(400, f"Invalid JSON payload received. {'; '.join(given)}")
        self.calls.append((method["id"], request.body))
        try:
            answer = getattr(self, method["id"].replace(".", "_"))(request, **names)
        except Refused as refused:
            return _error(refused.status, str(refused))
        wrong = list(misfits(answer, method["response"], schemas))
        assert not wrong, f"this module's own answer to {method['id']} is none of Google's: {wrong}"
        return Answer(answer)

    # Resource Manager and IAM

    def cloudresourcemanager_projects_get(self, _: Request, projectId: str) -> dict[str, Any]:
        if projectId != self.project:
            raise Refused(403, "The caller does not have permission")
        return {"projectId": projectId, "projectNumber": "415104041262", "lifecycleState": "ACTIVE", "name": projectId}

    def cloudresourcemanager_projects_getIamPolicy(self, _: Request, resource: str) -> dict[str, Any]:
        return self.policy

    def cloudresourcemanager_projects_setIamPolicy(self, request: Request, resource: str) -> dict[str, Any]:
        self.policy = request.body["policy"]
        return self.policy

    def iam_projects_serviceAccounts_get(self, _: Request, projectsId: str, serviceAccountsId: str) -> dict[str, Any]:
        if serviceAccountsId not in self.accounts:
            raise Refused(404, f"Unknown service account: {serviceAccountsId}")
        return {"projectId": projectsId, "email": serviceAccountsId}

    def iam_projects_serviceAccounts_create(self, request: Request, projectsId: str) -> dict[str, Any]:
        email = f"{request.body['accountId']}@{projectsId}.iam.gserviceaccount.com"
        self.accounts.append(email)
        return {"projectId": projectsId, "email": email}

    # Compute Engine

    def compute_projects_get(self, _: Request, project: str) -> dict[str, Any]:
        return {"name": project, "commonInstanceMetadata": self.metadata}

    def compute_projects_setCommonInstanceMetadata(self, request: Request, project: str) -> dict[str, Any]:
        if request.body.get("fingerprint") != self.metadata["fingerprint"]:
            raise Refused(412, "Supplied fingerprint does not match current metadata fingerprint.")
        self.metadata = request.body
        return _operation("setMetadata")

    def compute_globalOperations_get(self, _: Request, project: str, operation: str) -> dict[str, Any]:
        return {"name": operation, "status": "DONE"}

    def compute_zoneOperations_get(self, _: Request, project: str, zone: str, operation: str) -> dict[str, Any]:
        done = {"name": operation, "status": "DONE"}
        if operation not in self._failed:
            return done
        code, text = "ZONE_RESOURCE_POOL_EXHAUSTED", self._failed[operation]
        message = f"The zone 'projects/{project}/zones/{zone}' does not have enough resources available: {text}"
        return {**done, "error": {"errors": [{"code": code, "message": message}]}, "httpErrorStatusCode": 503}

    def compute_subnetworks_list(self, _: Request, project: str, region: str) -> dict[str, Any]:
        if region != self.region:
            raise Refused(400, f"Invalid value for field 'region': '{region}'. Unknown region.")
        link = f"https://www.googleapis.com/compute/v1/projects/{project}/regions/{region}/subnetworks/default"
        return {"items": [{"name": "default", "selfLink": link, "ipCidrRange": "10.128.0.0/20"}]}

    def compute_instances_insert(self, request: Request, project: str, zone: str) -> dict[str, Any]:
        body = request.body
        self._zone(zone)
        for message in _prose(body, zone, self.accounts):
            raise Refused(400, message)
        if body["name"] in self.instances:
            raise Refused(409, f"The resource '{body['name']}' already exists")
        market = (zone[-1], body["machineType"].rsplit("/", 1)[-1], _is_spot(body))
        if market in self.empty:
            self._failed[f"operation-insert-{body['name']}"] = str(market)
            return _operation("insert", body["name"])
        number = len(self.instances) + 2
        interfaces = [{**card, "networkIP": f"10.128.0.{number}"} for card in body.get("networkInterfaces", [])]
        for card in interfaces:
            card["accessConfigs"] = [{**a, "natIP": f"203.0.113.{number}"} for a in card.get("accessConfigs", [])]
        self.instances[body["name"]] = {
            **body,
            "zone": f"https://www.googleapis.com/compute/v1/projects/{project}/zones/{zone}",
            "status": "RUNNING",
            "labelFingerprint": "42WmSpB8rSM=",
            "networkInterfaces": interfaces,
        }
        return _operation("insert", body["name"])

    def compute_instances_list(self, request: Request, project: str, zone: str) -> dict[str, Any]:
        self._zone(zone)
        wanted = request.query.get("filter", "")
        here = [i for i in self.instances.values() if i["zone"].endswith(f"/{zone}")]
        return {"items": [i for i in here if _passes(i, wanted)]}

    def compute_instances_get(self, _: Request, project: str, zone: str, instance: str) -> dict[str, Any]:
        return self._instance(zone, instance)

    def compute_instances_setLabels(self, request: Request, project: str, zone: str, instance: str) -> dict[str, Any]:
        self._instance(zone, instance)["labels"] = request.body["labels"]
        return _operation("setLabels")

    def compute_instances_delete(self, _: Request, project: str, zone: str, instance: str) -> dict[str, Any]:
        self._instance(zone, instance)
        del self.instances[instance]
        return _operation("delete")

    def _instance(self, zone: str, name: str) -> dict[str, Any]:
        if name not in self.instances or not self.instances[name]["zone"].endswith(f"/{zone}"):
            raise Refused(404, f"The resource '{name}' was not found")
        return self.instances[name]

    def _zone(self, zone: str) -> None:
        if not re.fullmatch(f"{self.region}-[abcf]", zone):
            raise Refused(400, f"Invalid value for field 'zone': '{zone}'. Unknown zone.")

    # Cloud TPU

    def tpu_projects_locations_nodes_list(self, _: Request, projectsId: str, locationsId: str) -> dict[str, Any]:
        here = f"projects/{projectsId}/locations/{locationsId}/"
        return {"nodes": [node for name, node in self.tpus.items() if name.startswith(here)]}

    def tpu_projects_locations_nodes_create(
        self, request: Request, projectsId: str, locationsId: str
    ) -> dict[str, Any]:
        self._zone(locationsId)
        if "runtimeVersion" not in request.body:
            raise Refused(400, "runtime_version is required")
        account = request.body.get("serviceAccount", {}).get("email")
        if account is not None and account not in self.accounts:
            raise Refused(400, f"The resource '{account}' of type 'serviceAccount' was not found.")
        name = f"projects/{projectsId}/locations/{locationsId}/nodes/{request.query['nodeId']}"
        number = len(self.tpus) + 100
        endpoint = {"ipAddress": f"10.128.0.{number}", "accessConfig": {"externalIp": f"203.0.113.{number}"}}
        self.tpus[name] = {**request.body, "name": name, "state": "READY", "networkEndpoints": [endpoint]}
        return self._long(name)

    def tpu_projects_locations_nodes_get(
        self, _: Request, projectsId: str, locationsId: str, nodesId: str
    ) -> dict[str, Any]:
        return self._tpu(projectsId, locationsId, nodesId)

    def tpu_projects_locations_nodes_patch(
        self, request: Request, projectsId: str, locationsId: str, nodesId: str
    ) -> dict[str, Any]:
        node = self._tpu(projectsId, locationsId, nodesId)
        assert request.query["updateMask"] == "labels", request.query
        node["labels"] = request.body["labels"]
        return self._long(node["name"])

    def tpu_projects_locations_nodes_delete(
        self, _: Request, projectsId: str, locationsId: str, nodesId: str
    ) -> dict[str, Any]:
        name = self._tpu(projectsId, locationsId, nodesId)["name"]
        del self.tpus[name]
        return self._long(name)

    def tpu_projects_locations_operations_get(
        self, _: Request, projectsId: str, locationsId: str, operationsId: str
    ) -> dict[str, Any]:
        name = f"projects/{projectsId}/locations/{locationsId}/operations/{operationsId}"
        return {"name": name, "done": True, "response": {}}

    def _tpu(self, *parts: str) -> dict[str, Any]:
        name = "projects/{}/locations/{}/nodes/{}".format(*parts)
        if name not in self.tpus:
            raise Refused(404, f"Resource '{name}' was not found")
        return self.tpus[name]

    def _long(self, node: str) -> dict[str, Any]:
        return {"name": f"{node.split('/nodes/')[0]}/operations/operation-{len(self.calls)}", "done": False}


def _error(status: int, message: str) -> Answer:
    return Answer({"error": {"code": status, "message": message, "errors": [{"message": message}]}}, status)


def _operation(kind: str, of: str = "x") -> dict[str, Any]:
    return {"name": f"operation-{kind}-{of}", "operationType": kind, "status": "RUNNING"}


def _is_spot(body: dict[str, Any]) -> bool:
    scheduling = body.get("scheduling", {})
    return scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible") is True


def _passes(instance: dict[str, Any], wanted: str) -> bool:
    """Google's filter language, as much as Ray uses: brackets joined by AND, each with an AND or an OR inside."""

    def one(term: str) -> bool:
        if found := re.fullmatch(r"labels\.([\w-]+) = ([\w.-]+)", term):
            return bool(instance.get("labels", {}).get(found[1]) == found[2])
        if found := re.fullmatch(r"status = (\w+)", term):
            return bool(instance["status"] == found[1])
        if found := re.fullmatch(r"NOT labels\.([\w-]+):\*", term):
            return found[1] not in instance.get("labels", {})
        raise Refused(400, f"Invalid value for field 'filter': '{term}'. Invalid list filter expression.")

    terms = re.findall(r"\(([^()]+)\)", wanted)
    statuses = [one(t) for t in terms if t.startswith("status")]
    return all(one(t) for t in terms if not t.startswith("status")) and (not statuses or any(statuses))


_LABEL_KEY, _LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")

_BALANCED, _SSD, _STANDARD, _HYPER = "pd-balanced", "pd-ssd", "pd-standard", "hyperdisk-balanced"
#: Family of machines -> the boot disks that it takes, the first of them where a disk names no type. For G2 that is one
#: it refuses. The rows: cloud.google.com/compute/docs/disks/persistent-disks and .../hyperdisks. What a disk without a
#: type is: diskType in the discovery document.
BOOT_DISKS = {
    "a2": (_STANDARD, _BALANCED, _SSD),
    "a3": (_HYPER, _BALANCED, _SSD),
    "a4": (_HYPER,),
    "c3": (_BALANCED, _SSD, _HYPER),
    "c4": (_HYPER,),
    "e2": (_STANDARD, _BALANCED, _SSD),
    "g2": (_BALANCED, _SSD),
    "g4": (_HYPER,),
    "h3": (_HYPER, _BALANCED),
    "n1": (_STANDARD, _BALANCED, _SSD),
    "n2": (_STANDARD, _BALANCED, _SSD, "pd-extreme"),
    "n4": (_HYPER,),
}


def _prose(body: dict[str, Any], zone: str, accounts: list[str]) -> Iterator[str]:
    """Rules of Compute Engine that are no part of the discovery document."""
    # cloud.google.com/compute/docs/labeling-resources
    for key, value in body.get("labels", {}).items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            yield f"Invalid value for field 'resource.labels': '{key}: {value}'."
    machine = re.fullmatch(r"(?:.*/)?zones/([a-z0-9-]+)/machineTypes/([a-z0-9-]+)", body.get("machineType", ""))
    if machine is None or machine[1] != zone:
        yield f"Invalid value for field 'resource.machineType': '{body.get('machineType')}'."
        return
    # cloud.google.com/compute/docs/instances/spot, cloud.google.com/compute/docs/gpus/gpu-host-maintenance
    scheduling, spot = body.get("scheduling", {}), _is_spot(body)
    gpus = bool(body.get("guestAccelerators")) or machine[2].startswith(("a2-", "a3-", "g2-"))
    if spot and scheduling.get("automaticRestart") is True:
        yield "Automatic restart and preemptible cannot both be true."
    if (spot or gpus) and scheduling.get("onHostMaintenance") == "MIGRATE":
        yield "Instances with guest accelerators do not support live migration."
    if gpus and not spot and scheduling.get("onHostMaintenance") != "TERMINATE":
        yield "Instances with guest accelerators do not support live migration."
    if "instanceTerminationAction" in scheduling and scheduling.get("provisioningModel") != "SPOT":
        yield "You cannot specify a termination action for a VM instance that has the standard provisioning model."
    # cloud.google.com/compute/docs/gpus
    if body.get("guestAccelerators") and not machine[2].startswith("n1-"):
        yield f"[{machine[2]}, nvidia-tesla-t4] features are not compatible for creating instance."
    if not any(disk.get("boot") for disk in body.get("disks", [])):
        yield "Invalid value for field 'resource.disks': ''. A boot disk must be specified."
    for disk in body.get("disks", []):
        yield from boot_disk(disk, machine[2], zone)
    for account in body.get("serviceAccounts", []):
        if account["email"] not in accounts:
            yield f"The resource '{account['email']}' of type 'serviceAccount' was not found."


def boot_disk(disk: dict[str, Any], machine: str, zone: str) -> Iterator[str]:
    """Why a machine does not start from a disk."""
    accepted = BOOT_DISKS[machine.partition("-")[0]]
    default = _STANDARD if machine.startswith("g2-") else accepted[0]
    kind = disk.get("initializeParams", {}).get("diskType", f"zones/{zone}/diskTypes/{default}")
    if not kind.startswith(f"zones/{zone}/diskTypes/"):
        yield f"Invalid value for field 'resource.disks[0].initializeParams.diskType': '{kind}'."
    elif disk.get("boot") and kind.rpartition("/")[2] not in accepted:
        yield f"[{kind.rpartition('/')[2]}, {machine}] features are not compatible for creating instance."
