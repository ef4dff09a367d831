"""Objects through which others reach port 8265: whoever does so without a login runs code on the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raytf.doctor.check import kuberay
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, warning

#: Kinds that lead requests from outside the cluster to a service's port.
_ROUTES = ("Ingress", "HTTPRoute", "TCPRoute", "VirtualService", "Route", "IngressRoute")
_PORT, _PORT_NAME = ("8265", 8265), "dashboard"
#: Names in a route or a service that belong to Ray: the head's service, and the operator's labels.
_OF_RAY = re.compile(r"-head-svc\b|\bray\.io/")
#: Annotations and fields that choose between an internal and an external load balancer.
_BALANCER = re.compile(r"load-?balancer|scheme|ingress\.?class", re.I)
_RUNS_CODE = "Anyone who reaches them can run code on the cluster, with its rights on the bucket."
_FORWARD = "use kubectl port-forward svc/NAME-head-svc 8265."


def check(manifests: Sequence[Document]) -> Iterator[ConfigFinding]:
    """Find routes and services that lead to the dashboard and the jobs API without a login, each with its line."""
    clusters = [(d, path) for d in manifests for path in _cluster_paths(d)]
    has_token = clusters and all(_has_token(d, path) for d, path in clusters)
    has_ray = any(kuberay.is_about_ray(d) for d in manifests)
    routes = [] if has_token else [(d, path) for d in manifests for path in _to_dashboard(d, has_ray)]
    for document, path in routes:
        yield _routed(document, path, f"this {document.get('kind')}", "it")
    for document, path in clusters:
        if not _has_token(document, path):
            yield from _head_service(document, path, bool(routes))
    for document in manifests:
        if not has_token and document.get("kind") == "Service":
            yield from _service(document, has_ray)


def _has_token(document: Document, cluster: Path) -> bool:
    return document.get(*cluster, "authOptions", "mode") == "token"


def _routed(document: Document, path: Path, route: str, key: str) -> ConfigFinding:
    what = f"{route} leads to port 8265, the dashboard and the jobs API, which ask for no login"
    fix = f"Add authOptions: {{mode: token}} to the cluster (Ray 2.52 or newer), or delete {key} and {_FORWARD}"
    return _at(warning("open-to-world", path, what, _RUNS_CODE, fix), document)


def _cluster_paths(document: Document) -> Iterator[Path]:
    paths: tuple[Path, ...] = (
        ("spec",),
        ("spec", "rayClusterSpec"),
        ("spec", "rayClusterConfig"),
        ("spec", "jobTemplate", "rayClusterSpec"),
    )
    return (path for path in paths if document.mapping(*path, "headGroupSpec"))


def _to_dashboard(document: Document, has_ray: bool) -> list[Path]:
    """Return the path of the first port of the dashboard in a route, if a request needs no login there."""
    if document.get("kind") not in _ROUTES or _is_protected(document):
        return []
    return list(_ports(document, "spec", has_ray=has_ray))[:1]


def _is_protected(document: Document) -> bool:
    """Return whether a route asks for a login, or accepts only requests from the inside."""
    annotations = document.mapping("metadata", "annotations")
    has_login = any("auth" in key and value != "none" for key, value in annotations.items())
    return has_login or _is_internal({**annotations, "ingressClassName": document.get("spec", "ingressClassName")})


def _is_internal(annotations: dict[str, Any]) -> bool:
    """Return whether annotations ask for a load balancer without a public address."""
    return any(
        _BALANCER.search(key) and "internal" in f"{key} {value}".casefold() and str(value).casefold() != "false"
        for key, value in annotations.items()
    )


def _ports(document: Document, *path: str, has_ray: bool) -> Iterator[Path]:
    """Yield the paths of ports of the dashboard: 8265, and ports of Ray that are named `dashboard`."""
    value = document.get(*path)
    ports = (*_PORT, _PORT_NAME) if has_ray or _OF_RAY.search(str(document.get("spec"))) else _PORT
    yield from _ports_in(value, path, ports)


def _ports_in(value: Any, path: Path, ports: Sequence[str | int]) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, inner in value.items():
            is_port = key in ("port", "number", "targetPort") or (key == "name" and path[-1:] == ("port",))
            if is_port and inner in ports:
                yield (*path, key)
            else:
                yield from _ports_in(inner, (*path, key), ports)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _ports_in(inner, (*path, i), ports)


def _service(document: Document, has_ray: bool) -> Iterator[ConfigFinding]:
    annotations = document.mapping("metadata", "annotations")
    if any(_ports(document, "spec", "ports", has_ray=has_ray)):
        yield from _opened(document, ("spec", "type"), annotations, "type")


def _head_service(document: Document, base: Path, is_routed: bool) -> Iterator[ConfigFinding]:
    ingress: Path = (*base, "headGroupSpec", "enableIngress")
    if document.get(*ingress) is True and not _is_protected(document):  # its Ingress gets the annotations of the object
        yield _routed(document, ingress, "the Ingress of enableIngress", "enableIngress")
        is_routed = True
    path: Path = (*base, "headGroupSpec", "serviceType")
    if document.get(*path) != "NodePort" or not is_routed:  # a route to a NodePort has its own finding
        yield from _opened(document, path, document.mapping(*base, "headServiceAnnotations"), "serviceType")


def _opened(document: Document, path: Path, annotations: dict[str, Any], key: str) -> Iterator[ConfigFinding]:
    kind, fix = document.get(*path), f"Write ClusterIP and {_FORWARD}"
    if kind == "LoadBalancer" and not _is_internal(annotations):
        what = f"{key} LoadBalancer opens the dashboard and the job server to the outside network"
        yield _at(error("open-to-world", path, what, _RUNS_CODE, fix), document)
    elif kind == "NodePort":
        what = f"{key} NodePort opens the dashboard and the job server to all who reach a node of Kubernetes"
        yield _at(warning("open-to-world", path, what, _RUNS_CODE, fix), document)


def _at(found: ConfigFinding, document: Document) -> ConfigFinding:
    return replace(found, line=document.line(found.path))
