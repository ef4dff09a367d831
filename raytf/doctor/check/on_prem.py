"""Mistakes in clusters of existing hosts (provider local)."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, stops_ray_up, warning
from raytf.doctor.local_environment import Surroundings, is_host

#: Settings that select the older autoscaler in a command that starts the head.
_V1 = ("RAY_enable_autoscaler_v2=0", "RAY_enable_autoscaler_v2=false")


def check(document: Document, surroundings: Surroundings) -> Iterator[ConfigFinding]:
    """Find mistakes with which `ray up` exits or never finishes on existing hosts."""
    provider = document.mapping("provider")
    for key in ("available_node_types", "head_node", "worker_nodes"):
        if document.get(key):
            what = f"{key} cannot be used with provider local, where hosts have no types"
            fix = "Delete it; list the hosts in provider.head_ip and provider.worker_ips."
            yield stops_ray_up("local-node-types", (key,), what, fix)
    if "coordinator_address" in provider:
        if document.get("max_workers") is None:
            what = "coordinator_address needs max_workers"
            fix = "Add `max_workers: N` at the top: how many hosts to use."
            yield stops_ray_up("local-hosts", ("provider", "coordinator_address"), what, fix)
        return
    for key in ("head_ip", "worker_ips"):
        if not provider.get(key) and not (key == "worker_ips" and provider.get(key) == []):
            path = ("provider", key) if key in provider else ("provider",)
            fix = "Add head_ip: ADDRESS and worker_ips: [ADDRESS, ...]."
            yield stops_ray_up("local-hosts", path, f"provider.{key} is missing", fix)
    yield from _hosts(document)
    yield from _numbers(document)
    yield from _autoscaler(document, surroundings)


def _hosts(document: Document) -> Iterator[ConfigFinding]:
    head = document.get("provider", "head_ip")
    workers = document.sequence("provider", "worker_ips")
    paths: list[Path] = [("provider", "worker_ips", i) for i in range(len(workers))]
    for path, host in zip(paths, workers, strict=True):
        if host == head:
            fix, how = "Delete it from worker_ips.", "an assertion about the number of hosts"
            yield stops_ray_up("local-hosts", path, f"{host} is the head and a worker", fix, how)
    for host, count in Counter(map(str, workers)).items():
        if count > 1:
            what, how = f"{host} is listed {count} times", "an assertion about the number of hosts"
            yield stops_ray_up("local-hosts", ("provider", "worker_ips"), what, "List each host once.", how)
    for path, host in zip([("provider", "head_ip"), *paths], [head, *workers], strict=True):
        yield from _host(path, host, bool(workers))


def _host(path: Path, host: object, has_workers: bool) -> Iterator[ConfigFinding]:
    if not is_host(host):
        what = f"{host!r} is neither an address nor the name of a host"
        why = "ssh and rsync read it as an option, or a shell reads it as a command."
        fix = "Use letters, digits, dots and colons; begin with a letter or a digit."
        yield error("local-hosts", path, what, why, fix)
        return
    fix = "Write the address or the name by which the hosts reach each other."
    ip = _ip(host) if isinstance(host, str) else None
    if isinstance(host, str) and ip is None and re.fullmatch(r"[\d.]+", host):  # otherwise it is a name
        why = "Nothing answers there: `ray up` or the autoscaler waits for it for minutes, again and again."
        yield error("local-hosts", path, f"{host} is not an address", why, fix)
    if has_workers and (host in ("localhost", "0.0.0.0") or (ip is not None and ip.is_loopback)):
        what, why = f"{host} means this machine only", "Other hosts cannot reach the head there."
        yield error("local-hosts", path, what, why, fix)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _numbers(document: Document) -> Iterator[ConfigFinding]:
    hosts = len(document.sequence("provider", "worker_ips"))
    least, most = document.get("min_workers"), document.get("max_workers")
    for key, value in (("min_workers", least), ("max_workers", most)):
        if isinstance(value, int) and value > hosts:
            what = f"{key} is {value}, but there are {hosts} worker_ips"
            yield warning("local-count", (key,), what, f"Ray uses {hosts}.", f"Set it to {hosts}, or list more hosts.")
    if isinstance(most, int) and most < hosts:
        what = f"max_workers is {most}, but there are {hosts} worker_ips"
        why = f"Ray never uses {hosts - most} of them."
        yield warning("local-count", ("max_workers",), what, why, f"Set it to {hosts}, or delete it.")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        what, fix = f"min_workers {least} is above max_workers {most}", f"Set max_workers to {least}."
        yield error("min-above-max", ("min_workers",), what, "Ray refuses the file.", fix)


def _autoscaler(document: Document, surroundings: Surroundings) -> Iterator[ConfigFinding]:
    commands = " ".join(str(c) for c in document.sequence("head_start_ray_commands"))
    is_v1 = surroundings.environ.get("RAY_UP_enable_autoscaler_v2") == "0" or any(v1 in commands for v1 in _V1)
    if len(document.sequence("provider", "worker_ips")) >= 2 and not is_v1:
        yield error(
            "local-autoscaler",
            ("head_start_ray_commands",) if commands else ("provider", "type"),
            "provider local with the autoscaler v2 of Ray 2.60",
            "It starts one worker and then tries to start the same one again and again (measured with two hosts).",
            "Write `RAY_enable_autoscaler_v2=0 ray start --head ...` in head_start_ray_commands.",
        )
