"""Subnets, routes and security groups of AWS, as Ray picks them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, trouble
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, listed, warning
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe.queries import RAY_PORTS

_WORLD = ("0.0.0.0/0", "::/0")


def check(aws: AwsAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find networks in which a node does not come up, cannot be reached, or can be reached by everybody."""
    inside = document.get("provider", "use_internal_ips") is True
    groups = yield from _given_groups(aws, types)
    subnets = list(_pages(aws, "describe_subnets", "Subnets"))
    vpc = next((g["VpcId"] for g in groups.values()), None)
    vpcs: set[str] = set()
    routes = list(_pages(aws, "describe_route_tables", "RouteTables"))
    reported: set[tuple[str, str]] = set()
    for t in types:
        if "LaunchTemplate" in t.config and subnet_ids(t) is None:
            continue  # it may name a network, which Ray then takes
        usable = yield from _subnets(document, t, subnets, vpc, inside)
        vpcs |= {s["VpcId"] for s in usable}
        for subnet in usable:
            finding = _route(t, subnet, routes, inside)
            if finding and (finding.code, subnet["SubnetId"]) not in reported:
                reported.add((finding.code, subnet["SubnetId"]))
                yield finding
    for t in types:
        ids = group_ids(t)
        yield from _group_rules([groups[i] for i in ids if i in groups], _key(t, "SecurityGroupIds"))
    yield from _between(types, groups)
    if any(not group_ids(t) and "LaunchTemplate" not in t.config for t in types):
        yield from _named_group(aws, document, vpcs)


def _pages(aws: AwsAccount, operation: str, key: str, **wanted: Any) -> Iterator[dict[str, Any]]:
    for page in aws.client("ec2").get_paginator(operation).paginate(**wanted):
        yield from page[key]


def group_ids(t: NodeType) -> list[str]:
    """Return the security groups that a type names, its network interfaces included."""
    own = t.config.get("SecurityGroupIds")
    inner = [i for interface in _interfaces(t) for i in _list(interface.get("Groups"))]
    return list(dict.fromkeys(map(str, [*_list(own), *inner])))


def subnet_ids(t: NodeType) -> list[str] | None:
    """Return the subnets that a type names.

    Returns:
        None where Ray picks them.
    """
    own = t.config.get("SubnetIds")
    inner = [str(i["SubnetId"]) for i in _interfaces(t) if "SubnetId" in i]
    return list(dict.fromkeys([*map(str, _list(own)), *inner])) if isinstance(own, list) or inner else None


def _interfaces(t: NodeType) -> list[dict[str, Any]]:
    return [i for i in _list(t.config.get("NetworkInterfaces")) if isinstance(i, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _key(t: NodeType, key: str) -> Path:
    """Return the path at which a type names its subnets or groups."""
    return (*t.path, "node_config", key if key in t.config or not _interfaces(t) else "NetworkInterfaces")


def _given_groups(
    aws: AwsAccount, types: Sequence[NodeType]
) -> Generator[ConfigFinding, None, dict[str, dict[str, Any]]]:
    """Yield findings, and return the groups by id."""
    groups: dict[str, dict[str, Any]] = {}
    for t in types:
        path = _key(t, "SecurityGroupIds")
        for i, name in enumerate(group_ids(t)):
            if name in groups:
                continue
            try:
                (groups[name],) = aws.client("ec2").describe_security_groups(GroupIds=[name])["SecurityGroups"]
            except Exception as problem:
                if trouble(problem) is not AwsTrouble.MISSING:
                    raise
                yield error(
                    "security-group-missing",
                    (*path, i) if path[-1] == "SecurityGroupIds" else path,
                    f"there is no security group {name} in {aws.region}",
                    "`ray up` ends, since it looks for the group's network.",
                    "Give the id of one that is there, or leave SecurityGroupIds out, and Ray makes one.",
                )
    return groups


def _subnets(
    document: Document, t: NodeType, subnets: Sequence[dict[str, Any]], vpc: str | None, inside: bool
) -> Generator[ConfigFinding, None, list[dict[str, Any]]]:
    """Yield findings, and return the subnets that Ray takes."""
    wanted, path = subnet_ids(t), _key(t, "SubnetIds")
    deep = path[-1] == "SubnetIds"
    there = {s["SubnetId"]: s for s in subnets}
    for i, name in enumerate(wanted or ()):
        if name not in there:
            yield error(
                "subnet-missing",
                (*path, i) if deep else path,
                f"there is no subnet {name} in this account and region",
                "`ray up` ends with an assertion.",
                "Give one that is there, or leave SubnetIds out, and Ray picks some.",
            )
    pool = [there[s] for s in wanted if s in there] if wanted is not None else list(subnets)
    if wanted is not None and not pool:
        return []
    places = fallback.zones_of(document.mapping("provider"))
    usable = []
    for s in pool:
        why = None
        if not inside and not s.get("MapPublicIpOnLaunch"):
            why = "gives its nodes no public address (MapPublicIpOnLaunch)"
        elif places and s["AvailabilityZone"] not in places:
            why = f"is in {s['AvailabilityZone']}, which is not among provider.availability_zone"
        elif vpc is not None and s["VpcId"] != vpc:
            why = f"is in {s['VpcId']}, and the security group in {vpc}"
        elif wanted is not None and s["VpcId"] != pool[0]["VpcId"]:
            why = f"is in {s['VpcId']}, and another one of the list in {pool[0]['VpcId']}"
        if why is None:
            usable.append(s)
        elif wanted is not None:
            yield error(
                "subnet-unusable",
                (*path, wanted.index(s["SubnetId"])) if deep else path,
                f"subnet {s['SubnetId']} {why}",
                "Ray takes all subnets of the list or none: `ray up` ends.",
                "Take it out of the list, or fix what is said of it"
                + ("; with a VPN, set provider.use_internal_ips: true." if "public" in why else "."),
            )
    if wanted is None:
        usable = _of_one_network(usable, places)
    if not usable and wanted is None:
        kind = "subnet" if inside else "subnet that gives public addresses"
        yield error(
            "no-subnet",
            ("provider", "availability_zone") if places else ("provider", "region"),
            f"there is no {kind} in {listed(places) or 'this region'}",
            "`ray up` ends: No usable subnets found.",
            "Run `aws ec2 create-default-subnet --availability-zone ZONE`, or give SubnetIds; "
            "with a VPN, set provider.use_internal_ips: true.",
        )
    elif wanted is None and t.is_head:
        empty = [zone for zone in places if zone not in {s["AvailabilityZone"] for s in usable}]
        if empty:
            yield warning(
                "no-subnet",
                ("provider", "availability_zone"),
                f"{listed(empty)} has no subnet that Ray can use",
                "Ray leaves the zone out without a word: its capacity is never asked for.",
                f"Run `aws ec2 create-default-subnet --availability-zone {empty[0]}`, or leave the zone out.",
            )
    return usable


def _of_one_network(subnets: Sequence[dict[str, Any]], places: Sequence[str]) -> list[dict[str, Any]]:
    """Return the subnets that Ray takes: all in the network of the first, in the order of the zones."""
    ordered = sorted(subnets, key=lambda s: str(s["AvailabilityZone"]), reverse=True)
    if places:
        ordered.sort(key=lambda s: places.index(s["AvailabilityZone"]))
    return [s for s in ordered if s["VpcId"] == ordered[0]["VpcId"]]


def _route(t: NodeType, subnet: dict[str, Any], tables: Sequence[dict[str, Any]], inside: bool) -> ConfigFinding | None:
    own = [a for a in tables if any(x.get("SubnetId") == subnet["SubnetId"] for x in a["Associations"])]
    main = [a for a in tables if a["VpcId"] == subnet["VpcId"] and any(x.get("Main") for x in a["Associations"])]
    ways = [
        route
        for table in (own or main)[:1]
        for route in table["Routes"]
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole"
    ]
    public = any(str(route.get("GatewayId", "")).startswith("igw-") for route in ways)
    if public or (inside and ways):
        return None
    path: Path = ("provider", "region") if subnet_ids(t) is None else _key(t, "SubnetIds")
    way = "to a NAT gateway" if inside else "to an internet gateway"
    return error(
        "no-internet-route",
        path,
        f"subnet {subnet['SubnetId']} has no route {way} for 0.0.0.0/0",
        "The set-up cannot fetch anything there"
        + (" (pip hangs)." if inside else ", and SSH from here never gets through: `ray up` waits until it gives up."),
        f"Add a default route {way} to its route table, or take another subnet.",
    )


def _ports(rule: dict[str, Any]) -> tuple[int, int] | None:
    """Return the lowest and highest TCP port of a rule.

    Returns:
        None where it is not about TCP.
    """
    if rule.get("IpProtocol") == "-1":
        return 0, 65535
    if rule.get("IpProtocol") not in ("tcp", "6"):
        return None
    return rule.get("FromPort", 0), rule.get("ToPort", 65535)


def _sources(rule: dict[str, Any]) -> list[str]:
    """Return all addresses that a rule lets in."""
    ranges = [r["CidrIp"] for r in rule.get("IpRanges", ())] + [r["CidrIpv6"] for r in rule.get("Ipv6Ranges", ())]
    return ranges + [p["PrefixListId"] for p in rule.get("PrefixListIds", ())]


def _group_rules(groups: Sequence[dict[str, Any]], path: Path) -> Iterator[ConfigFinding]:
    rules = [(g, rule) for g in groups for rule in g.get("IpPermissions", ())]
    for group, rule in rules:
        ports, world = _ports(rule), [s for s in _sources(rule) if s in _WORLD]
        if ports is None or not world or ports == (22, 22):
            continue
        behind = [f"{port} ({what})" for port, what in RAY_PORTS.items() if ports[0] <= port <= ports[1]]
        name = f"{group['GroupId']} ({group.get('GroupName', '')})"
        yield error(
            "open-to-world",
            path,
            f"security group {name} opens ports {ports[0]}-{ports[1]} to {world[0]}"
            + (f", among them {listed(behind)}" if behind else ""),
            "Whoever reaches the dashboard or the job server runs code with the cluster's rights.",
            "Revoke the rule, or give your own address /32; `ray dashboard CLUSTER.yaml` makes a tunnel.",
        )
    reached = [s for _, rule in rules for s in _sources(rule) if _has(rule, 22)]
    if groups and not reached:
        yield error(
            "ssh-closed",
            path,
            f"security group {listed(g['GroupId'] for g in groups)} lets SSH (port 22) in from no address",
            "The node comes up, and `ray up` waits for SSH until it gives up while it is paid for.",
            "Add a rule for TCP port 22 from your address.",
        )


def _has(rule: dict[str, Any], port: int) -> bool:
    ports = _ports(rule)
    return ports is not None and ports[0] <= port <= ports[1]


def _between(types: Sequence[NodeType], groups: dict[str, dict[str, Any]]) -> Iterator[ConfigFinding]:
    """Check that workers and head reach each other; Ray adds no rule to groups that the config names."""
    heads = [t for t in types if t.is_head]
    for t in types:
        if t.is_head or not heads or not group_ids(t) or not group_ids(heads[0]):
            continue
        for origin, target in ((t, heads[0]), (heads[0], t)):
            rules = [rule for i in group_ids(target) for rule in groups.get(i, {}).get("IpPermissions", ())]
            if not all(i in groups for i in group_ids(target)):
                continue  # one that is missing is said already
            pairs = {p.get("GroupId") for rule in rules if _has(rule, 6379) for p in rule.get("UserIdGroupPairs", ())}
            ranges = [s for rule in rules if _has(rule, 6379) for s in _sources(rule)]
            if not pairs & set(group_ids(origin)) and not ranges:
                yield error(
                    "nodes-cut-off",
                    _key(target, "SecurityGroupIds"),
                    f"the groups of {target.name!r} let nodes of {origin.name!r} in on no port of Ray",
                    "Ray adds no rule to groups that it is given: nodes start, never join, and are paid for.",
                    "Add a rule for all traffic from the group itself (and from the other one, if they differ).",
                )
                break


def _named_group(aws: AwsAccount, document: Document, vpcs: set[str]) -> Iterator[ConfigFinding]:
    """Check a group of the name that Ray looks for, to which Ray adds rules only if it has none."""
    name = document.get("provider", "security_group", "GroupName", default=None)
    name = name if isinstance(name, str) else f"ray-autoscaler-{document.get('cluster_name')}"
    groups = list(
        _pages(aws, "describe_security_groups", "SecurityGroups", Filters=[{"Name": "group-name", "Values": [name]}])
    )
    mine = [g for g in groups if g.get("VpcId") in vpcs and g.get("IpPermissions")]
    has_key = "security_group" in document.mapping("provider")
    yield from _group_rules(mine, ("provider", "security_group") if has_key else ("provider",))
