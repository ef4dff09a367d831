"""Mistakes in `provider.autostop`, by which a cluster ends itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raytf.cluster.autostop import seconds_of
from raytf.cluster.providers import fallback
from raytf.doctor.check.fallbacks import as_cloud
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, stops_ray_up
from raytf.doctor.node_types import node_types
from raytf.errors import ConfigError

_ALL = "https://www.googleapis.com/auth/cloud-platform"
#: OAuth scopes with which a machine of Google Cloud can delete machines: "Authorization scopes" of instances.delete in
#: Google's reference of the Compute Engine API.
_SCOPES = {"https://www.googleapis.com/auth/compute", _ALL}


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find invalid periods, and heads that cannot end themselves, in clusters with raytf's own providers."""
    provider = document.mapping("provider")
    path: Path = ("provider", fallback.AUTOSTOP)
    if provider.get(fallback.AUTOSTOP) is None or str(provider.get("module")) not in fallback.MODULES:
        return
    try:
        seconds_of(provider[fallback.AUTOSTOP])
    except ConfigError as problem:
        what, _, fix = str(problem).partition(". ")
        yield stops_ray_up("autostop-period", path, what, fix)
    docker = document.mapping("docker")
    if docker.get("container_name") and (docker.get("image") or docker.get("head_image")):
        what = f"{fallback.AUTOSTOP} is set, and the nodes run in containers"
        fix = "Delete `docker` and install on the machine, or delete `autostop` and run `ray down` yourself."
        yield stops_ray_up("autostop-docker", path, what, fix, "an error: a container has no systemd for the timer")
    if fallback.cloud_of(provider) == "gcp":
        yield from _scopes(document)


def _scopes(document: Document) -> Iterator[ConfigFinding]:
    for t in node_types(as_cloud(document)):
        accounts = t.config.get("serviceAccounts") if t.is_head else None
        lists = [a.get("scopes") for a in _list(accounts) if isinstance(a, dict)]
        scopes = {str(scope) for listed in lists for scope in _list(listed)}
        if accounts and not scopes & _SCOPES:
            what = f"the scopes of the head are {', '.join(sorted(scopes)) or 'none'}"
            why = "Google refuses what the head asks for: it can neither start workers nor end itself, and is paid for."
            fix = f"Add the scope {_ALL}; the roles of the account then decide."
            yield error("autostop-scopes", (*t.path, "node_config", "serviceAccounts"), what, why, fix)


def _list(value: Any) -> list[Any]:
    """Return a list as it is, None as an empty list, and any other value as a list of one."""
    return value if isinstance(value, list) else [] if value is None else [value]
