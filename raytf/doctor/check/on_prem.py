"""Mistakes of clusters of existing hosts."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, warning
from raytf.doctor.local_environment import Surroundings, is_host

#: In a command that starts the head, or in the shell of `ray up`: the older autoscaler.
_V1 = ("RAY_enable_autoscaler_v2=0", "RAY_enable_autoscaler_v2=false")


def check(document: Document, surroundings: Surroundings) -> Iterator[ConfigFinding]:
    """Find what `ray up` refuses or never finishes on given hosts."""
    provider = document.mapping("provider")
    for key in ("available_node_types", "head_node", "worker_nodes"):
        if document.get(key):
            yield error(
                "local-node-types",
                (key,),
                f"{key} cannot be used with provider local",
                "`ray up` ends: hosts that are there have no types.",
                "Leave it out; the hosts stand in provider.head_ip and provider.worker_ips.",
            )
    if "coordinator_address" in provider:
        if document.get("max_workers") is None:
            yield error(
                "local-hosts",
                ("provider", "coordinator_address"),
                "coordinator_address without max_workers",
                "`ray up` ends: it must know how many hosts to take.",
                "Add `max_workers: N` at the top.",
            )
        return
    for key in ("head_ip", "worker_ips"):
        if not provider.get(key) and not (key == "worker_ips" and provider.get(key) == []):
            yield error(
                "local-hosts",
                ("provider", key) if key in provider else ("provider",),
                f"provider.{key} is missing",
                "`ray up` ends.",
                "Give head_ip: ADDRESS and worker_ips: [ADDRESS, ...].",
            )
    yield from _hosts(document)
    yield from _numbers(document)
    yield from _autoscaler(document, surroundings)


def _hosts(document: Document) -> Iterator[ConfigFinding]:
    head = document.get("provider", "head_ip")
    workers = document.sequence("provider", "worker_ips")
    for i, host in enumerate(workers):
        if host == head:
            yield error(
                "local-hosts",
                ("provider", "worker_ips", i),
                f"{host} is the head and a worker",
                "Ray counts its hosts and ends with an assertion.",
                "Leave it out of worker_ips.",
            )
    for host, count in Counter(map(str, workers)).items():
        if count > 1:
            yield error(
                "local-hosts",
                ("provider", "worker_ips"),
                f"{host} is listed {count} times",
                "Ray counts its hosts and ends with an assertion.",
                "List each host once.",
            )
    for path, host in [(("provider", "head_ip"), head)] + [
        (("provider", "worker_ips", i), host) for i, host in enumerate(workers)
    ]:
        if not is_host(host):
            yield error(
                "local-hosts",
                path,
                f"{host!r} is neither an address nor the name of a host",
                "ssh and rsync take it for an option, or a shell for a command.",
                "Give letters, digits, dots and colons, beginning with a letter or a digit.",
            )
            continue
        ip = _ip(host) if isinstance(host, str) else None
        if isinstance(host, str) and ip is None and re.fullmatch(r"[\d.]+", host):  # else it is a name
            yield error(
                "local-hosts",
                path,
                f"{host} is not an address",
                "Nothing answers there: `ray up` or the autoscaler waits for it for minutes, again and again.",
                "Give the address or the name by which the hosts reach each other.",
            )
        if workers and (host in ("localhost", "0.0.0.0") or (ip is not None and ip.is_loopback)):
            yield error(
                "local-hosts",
                path,
                f"{host} is this machine only for itself",
                "Other hosts cannot reach the head there.",
                "Give the address by which the hosts reach each other.",
            )


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
            yield warning(
                "local-count",
                (key,),
                f"{key} is {value}, and there are {hosts} worker_ips",
                f"Ray takes {hosts}.",
                f"Set it to {hosts}, or list more hosts.",
            )
    if isinstance(most, int) and most < hosts:
        yield warning(
            "local-count",
            ("max_workers",),
            f"max_workers is {most}, and there are {hosts} worker_ips",
            f"{hosts - most} of the hosts are never used.",
            f"Set it to {hosts}, or leave it out.",
        )
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield error(
            "min-above-max",
            ("min_workers",),
            f"min_workers {least} is above max_workers {most}",
            "Ray refuses the file.",
            f"Set max_workers to {least}.",
        )


def _autoscaler(document: Document, surroundings: Surroundings) -> Iterator[ConfigFinding]:
    hosts = len(document.sequence("provider", "worker_ips"))
    commands = " ".join(str(c) for c in document.sequence("head_start_ray_commands"))
    if hosts < 2 or any(v1 in commands for v1 in _V1):
        return
    if surroundings.environ.get("RAY_UP_enable_autoscaler_v2") == "0":
        return
    yield error(
        "local-autoscaler",
        ("head_start_ray_commands",) if commands else ("provider", "type"),
        "provider local with the autoscaler v2 of Ray 2.60",
        "It starts one worker and then tries the same again and again; measured with two hosts.",
        "Write `RAY_enable_autoscaler_v2=0 ray start --head ...` in head_start_ray_commands.",
    )
