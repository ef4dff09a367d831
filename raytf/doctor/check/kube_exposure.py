"""Objects through which others reach port 8265: whoever does so without a login runs code on the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, warning

#: Kinds that lead requests from outside the cluster to a service's port.
_ROUTES = ("Ingress", "HTTPRoute", "TCPRoute", "VirtualService", "Route", "IngressRoute")
_PORT, _PORT_NAME = ("8265", 8265), "dashboard"
_RUNS_CODE = "Anyone who reaches them can run code on the cluster, with its rights on the bucket."
_FORWARD = "use kubectl port-forward svc/NAME-head-svc 8265."


def check(manifests: Sequence[Document]) -> Iterator[ConfigFinding]:
    """Find routes and services that lead to the dashboard and the jobs API without a login, each with its line."""
    clusters = [(d, path) for d in manifests for path in _cluster_paths(d)]
    has_token = clusters and all(d.get(*path, "authOptions", "mode") == "token" for d, path in clusters)
    routes = [] if has_token else [(d, path) for d in manifests for path in _to_dashboard(d)]
    for document, path in routes:
        kind = document.get("kind")
        what = f"this {kind} leads to port 8265, the dashboard and the jobs API, which ask for no login"
        fix = f"Add authOptions: {{mode: token}} to the cluster (Ray 2.52 or newer), or delete it and {_FORWARD}"
        yield _at(warning("open-to-world", path, what, _RUNS_CODE, fix), document)
    for document, path in clusters:
        yield from _head_service(document, path, bool(routes))
    for document in manifests:
        if not has_token and document.get("kind") == "Service":
            yield from _service(document)


def _cluster_paths(document: Document) -> Iterator[Path]:
    paths: tuple[Path, ...] = (
        ("spec",),
        ("spec", "rayClusterSpec"),
        ("spec", "rayClusterConfig"),
        ("spec", "jobTemplate", "rayClusterSpec"),
    )
    return (path for path in paths if document.mapping(*path, "headGroupSpec"))


def _to_dashboard(document: Document) -> list[Path]:
    """Return the path of the first port of the dashboard in a route, if a request needs no login there."""
    annotations = document.mapping("metadata", "annotations")
    has_login = any("auth" in key and value != "none" for key, value in annotations.items())
    if document.get("kind") not in _ROUTES or has_login:
        return []
    return list(_ports(document.get("spec"), ("spec",)))[:1]


def _ports(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, inner in value.items():
            is_port = key in ("port", "number", "targetPort") and inner in (*_PORT, _PORT_NAME)
            if is_port or (key == "name" and path[-1:] == ("port",) and inner == _PORT_NAME):
                yield (*path, key)
            else:
                yield from _ports(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _ports(inner, (*path, i))


def _service(document: Document) -> Iterator[ConfigFinding]:
    ports = list(_ports(document.get("spec", "ports"), ("spec", "ports")))
    annotations = document.mapping("metadata", "annotations")
    yield from _opened(document, ("spec", "type"), annotations, "type") if ports else ()


def _head_service(document: Document, base: Path, is_routed: bool) -> Iterator[ConfigFinding]:
    path: Path = (*base, "headGroupSpec", "serviceType")
    if document.get(*path) != "NodePort" or not is_routed:  # a route to a NodePort has its own finding
        yield from _opened(document, path, document.mapping(*base, "headServiceAnnotations"), "serviceType")


def _opened(document: Document, path: Path, annotations: dict[str, Any], key: str) -> Iterator[ConfigFinding]:
    kind, fix = document.get(*path), f"Write ClusterIP and {_FORWARD}"
    if kind == "LoadBalancer" and not any("internal" in key for key in annotations):
        what = f"{key} LoadBalancer opens the dashboard and the job server to the outside network"
        yield _at(error("open-to-world", path, what, _RUNS_CODE, fix), document)
    elif kind == "NodePort":
        what = f"{key} NodePort opens the dashboard and the job server to all who reach a node of Kubernetes"
        yield _at(warning("open-to-world", path, what, _RUNS_CODE, fix), document)


def _at(found: ConfigFinding, document: Document) -> ConfigFinding:
    return replace(found, line=document.line(found.path))
