"""What is left of a cluster on Google Cloud: instances and TPUs by Ray's label, disks by the name of their instance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor import machines
from raytf.doctor.clouds import rest
from raytf.doctor.clouds.rest import GoogleAccount, NoCredentials, RestError
from raytf.doctor.document import Document
from raytf.doctor.leftovers.resource import CLUSTER_TAG, Leftovers, LeftResource, disk_usd, gather
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import node_types
from raytf.errors import ConfigError, one_line


def find(document: Document, here: Surroundings) -> Leftovers:
    """Find everything that `ray up` of this file has made."""
    name, zone = document.get("cluster_name", default="default"), document.get("provider", "availability_zone")
    if not isinstance(zone, str) or not isinstance(document.get("provider", "project_id"), str):
        raise ConfigError("the file has no provider.project_id and availability_zone. Expected those of the cluster.")
    try:
        google = rest.google_account(document, here.environ)
    except NoCredentials as problem:
        raise ConfigError(f"there are no credentials for Google Cloud. {problem}.") from None
    except RestError as problem:
        raise ConfigError(f"{one_line(problem, 200)}. Look at the network and try again.") from None
    left = Leftovers(place=f"Google Cloud, {google.project}, {zone}, clusters named {name}")
    has_tpus = any("machineType" not in t.config for t in node_types(document))
    questions = []
    for one in fallback.zones_of(document.mapping("provider")):
        asks = {"instances": _instances, "disks": _disks} | ({"TPUs": _tpus} if has_tpus else {})
        for what, ask in asks.items():
            questions.append((f"{what} in {one}", partial(ask, google, one, str(name))))
    return gather(left, questions)


def _where(google: GoogleAccount, zone: str) -> str:
    return f"--zone {zone} --project {google.project}"


def _instances(google: GoogleAccount, zone: str, name: str) -> Iterator[LeftResource]:
    path = f"/projects/{google.project}/zones/{zone}/instances"
    for i in google.api("compute").pages(path, "items", filter=f"labels.{CLUSTER_TAG} = {name}"):
        kind = str(i.get("machineType", "")).rpartition("/")[2]
        attached = [
            {"acceleratorType": a["acceleratorType"], "acceleratorCount": a["acceleratorCount"]}
            for a in i.get("guestAccelerators", ())
        ]
        machine = machines.machine("gcp", {"machineType": kind, "guestAccelerators": attached})
        state = i.get("status", "?")
        # TERMINATED is what Google calls a machine that is stopped: its disks stay.
        usd = None if state in ("TERMINATED", "STOPPED", "SUSPENDED") else machine.usd if machine else None
        note = f"{kind}, {i.get('labels', {}).get('ray-node-type', 'node')}"
        if i.get("scheduling", {}).get("provisioningModel") == "SPOT" or i.get("scheduling", {}).get("preemptible"):
            note += ", spot: at most this"
        if usd is None and state != "RUNNING":
            note += "; its disks are paid for"
        remove = f"gcloud compute instances delete {i['name']} {_where(google, zone)} --quiet"
        yield LeftResource("instance", i["name"], state, usd, remove, note)


def _disks(google: GoogleAccount, zone: str, name: str) -> Iterator[LeftResource]:
    path = f"/projects/{google.project}/zones/{zone}/disks"
    # Clusters `test` and `test-2` begin alike: what follows the name must be as in Ray's names of instances.
    names = re.compile(rf"ray-{re.escape(name)}-(head|worker)-[0-9a-f]{{8}}-(compute|tpu)")
    for d in google.api("compute").pages(path, "items"):
        mine = d.get("labels", {}).get(CLUSTER_TAG) == name or names.match(d["name"])
        users: list[Any] = d.get("users") or []
        if not mine or users:
            continue  # a disk in use goes with its instance
        kind, size = str(d.get("type", "")).rpartition("/")[2], float(d.get("sizeGb", 0))
        remove = f"gcloud compute disks delete {d['name']} {_where(google, zone)} --quiet"
        note = f"{size:g} GB {kind}, attached to nothing"
        yield LeftResource("disk", d["name"], d.get("status", "?"), disk_usd(kind, size), remove, note)


def _tpus(google: GoogleAccount, zone: str, name: str) -> Iterator[LeftResource]:
    for node in google.api("tpu").pages(f"/projects/{google.project}/locations/{zone}/nodes", "nodes"):
        if node.get("labels", {}).get(CLUSTER_TAG) != name:
            continue
        short, kind = node["name"].rpartition("/")[2], node.get("acceleratorType", "")
        machine = machines.machine("gcp", {"acceleratorType": kind})
        state = node.get("state", "?")
        usd = machine.usd if machine and state not in ("STOPPED", "PREEMPTED", "TERMINATED") else None
        remove = f"gcloud compute tpus tpu-vm delete {short} {_where(google, zone)} --quiet"
        yield LeftResource("TPU", short, state, usd, remove, kind)
