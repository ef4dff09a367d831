"""Checks the AWS subnets, routes and security groups that Ray will use."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor.clouds.aws import AwsAccount
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, listed, stops_ray_up, warning
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe.queries import RAY_PORTS, open_to_world, ssh_closed

_WORLD = ("0.0.0.0/0", "::/0")


def check(aws: AwsAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find networks in which a node does not start, cannot be reached, or is open to everyone."""
    inside = document.get("provider", "use_internal_ips") is True
    groups = yield from _named_groups(aws, types)
    subnets = list(aws.pages("describe_subnets", "Subnets"))
    vpc = next((g["VpcId"] for g in groups.values()), None)
    vpcs: set[str] = set()
    routes = list(aws.pages("describe_route_tables", "RouteTables"))
    routed: set[str] = set()
    for t in types:
        if "LaunchTemplate" in t.config and subnet_ids(t) is None:
            continue  # the template may name a network, which Ray then uses
        usable = yield from _subnets(document, t, subnets, vpc, inside)
        vpcs |= {s["VpcId"] for s in usable}
        for subnet in usable:
            if subnet["SubnetId"] not in routed:
                routed.add(subnet["SubnetId"])
                yield from _route(t, subnet, routes, inside)
    for t in types:
        ids = group_ids(t)
        yield from _group_rules([groups[i] for i in ids if i in groups], _key(t, "SecurityGroupIds"))
    yield from _between(types, groups)
    if any(not group_ids(t) and "LaunchTemplate" not in t.config for t in types):
        yield from _rays_group(aws, document, vpcs)


def group_ids(t: NodeType) -> list[str]:
    """Return the security groups that a type names, including those of its network interfaces."""
    inner = [i for interface in _interfaces(t) for i in _list(interface.get("Groups"))]
    return list(dict.fromkeys(map(str, [*_list(t.config.get("SecurityGroupIds")), *inner])))


def subnet_ids(t: NodeType) -> list[str] | None:
    """Return the subnets that a type names, or None if Ray picks them."""
    own = t.config.get("SubnetIds")
    inner = [str(i["SubnetId"]) for i in _interfaces(t) if "SubnetId" in i]
    return list(dict.fromkeys([*map(str, _list(own)), *inner])) if isinstance(own, list) or inner else None


def _interfaces(t: NodeType) -> list[dict[str, Any]]:
    return [i for i in _list(t.config.get("NetworkInterfaces")) if isinstance(i, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _key(t: NodeType, key: str) -> Path:
    return (*t.path, "node_config", key if key in t.config or not _interfaces(t) else "NetworkInterfaces")


def _entry(path: Path, i: int) -> Path:
    """Return the path of an entry in the list at a path, or the path itself for network interfaces."""
    return path if path[-1] == "NetworkInterfaces" else (*path, i)


def _named_groups(
    aws: AwsAccount, types: Sequence[NodeType]
) -> Generator[ConfigFinding, None, dict[str, dict[str, Any]]]:
    groups: dict[str, dict[str, Any]] = {}
    for t in types:
        path = _key(t, "SecurityGroupIds")
        for i, name in enumerate(group_ids(t)):
            if name in groups:
                continue
            answer = aws.find("ec2", "describe_security_groups", GroupIds=[name])
            if answer is not None:
                (groups[name],) = answer["SecurityGroups"]
                continue
            what = f"there is no security group {name} in {aws.region}"
            fix = "Write the id of one that exists, or delete SecurityGroupIds to let Ray create one."
            yield stops_ray_up("security-group-missing", _entry(path, i), what, fix)
    return groups


def _subnets(
    document: Document, t: NodeType, subnets: Sequence[dict[str, Any]], vpc: str | None, inside: bool
) -> Generator[ConfigFinding, None, list[dict[str, Any]]]:
    """Yield findings, and return the subnets that Ray uses."""
    wanted, path = subnet_ids(t), _key(t, "SubnetIds")
    there = {s["SubnetId"]: s for s in subnets}
    places = fallback.zones_of(document.mapping("provider"))
    if wanted is None:
        usable = _of_one_network([s for s in subnets if not _unusable(s, inside, places, vpc, None)], places)
        yield from _none_or_few(t, usable, places, inside)
        return usable
    for i, name in enumerate(wanted):
        if name not in there:
            what = f"there is no subnet {name} in this account and region"
            fix = "Write one that exists, or delete SubnetIds to let Ray pick some."
            yield stops_ray_up("subnet-missing", _entry(path, i), what, fix, "an assertion")
    usable = []
    pool = [there[s] for s in wanted if s in there]
    for s in pool:
        why = _unusable(s, inside, places, vpc, pool[0]["VpcId"])
        if not why:
            usable.append(s)
            continue
        what = f"subnet {s['SubnetId']} {why}, and Ray uses all subnets of the list or none"
        vpn = "; with a VPN, set provider.use_internal_ips: true" if "public" in why else ""
        where = _entry(path, wanted.index(s["SubnetId"]))
        yield stops_ray_up("subnet-unusable", where, what, f"Delete it from the list, or correct it{vpn}.")
    return usable


def _unusable(subnet: dict[str, Any], inside: bool, places: Sequence[str], vpc: str | None, first: str | None) -> str:
    """Return why Ray cannot use a subnet, or an empty string if it can.

    Args:
        inside: whether nodes need no public address.
        places: the zones of the cluster.
        vpc: the network of the security groups.
        first: the network of the first subnet in the list.
    """
    if not inside and not subnet.get("MapPublicIpOnLaunch"):
        return "assigns no public address to its nodes (MapPublicIpOnLaunch)"
    if places and subnet["AvailabilityZone"] not in places:
        return f"is in {subnet['AvailabilityZone']}, which is not in provider.availability_zone"
    if vpc is not None and subnet["VpcId"] != vpc:
        return f"is in {subnet['VpcId']}, but the security group is in {vpc}"
    if first is not None and subnet["VpcId"] != first:
        return f"is in {subnet['VpcId']}, but the first one of the list is in {first}"
    return ""


def _none_or_few(
    t: NodeType, usable: Sequence[dict[str, Any]], places: Sequence[str], inside: bool
) -> Iterator[ConfigFinding]:
    """Find a region or zones in which Ray has no subnet that it can use."""
    path = ("provider", "availability_zone") if places else ("provider", "region")
    empty = [zone for zone in places if zone not in {s["AvailabilityZone"] for s in usable}]
    command = f"aws ec2 create-default-subnet --availability-zone {empty[0] if usable and empty else 'ZONE'}"
    if not usable:
        kind = "subnet" if inside else "subnet that assigns public addresses"
        what = f"there is no {kind} in {listed(places) or 'this region'}"
        fix = f"Run `{command}`, or add SubnetIds; with a VPN, set provider.use_internal_ips: true."
        yield stops_ray_up("no-subnet", path, what, fix, "`No usable subnets found`")
    elif t.is_head and empty:
        what, why = f"{listed(empty)} has no subnet that Ray can use", "Ray never uses the zone's capacity."
        yield warning("no-subnet", path, what, why, f"Run `{command}`, or delete the zone.")


def _of_one_network(subnets: Sequence[dict[str, Any]], places: Sequence[str]) -> list[dict[str, Any]]:
    """Return the subnets that Ray uses: those in the network of the first one, in the order of the zones."""
    ordered = sorted(subnets, key=lambda s: str(s["AvailabilityZone"]), reverse=True)
    if places:
        ordered.sort(key=lambda s: places.index(s["AvailabilityZone"]))
    return [s for s in ordered if s["VpcId"] == ordered[0]["VpcId"]]


def _route(
    t: NodeType, subnet: dict[str, Any], tables: Sequence[dict[str, Any]], inside: bool
) -> Iterator[ConfigFinding]:
    own = [a for a in tables if any(x.get("SubnetId") == subnet["SubnetId"] for x in a["Associations"])]
    main = [a for a in tables if a["VpcId"] == subnet["VpcId"] and any(x.get("Main") for x in a["Associations"])]
    ways = [
        route
        for table in (own or main)[:1]
        for route in table["Routes"]
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole"
    ]
    if (inside and ways) or any(str(route.get("GatewayId", "")).startswith("igw-") for route in ways):
        return
    path: Path = ("provider", "region") if subnet_ids(t) is None else _key(t, "SubnetIds")
    way = "to a NAT gateway" if inside else "to an internet gateway"
    what = f"subnet {subnet['SubnetId']} has no route {way} for 0.0.0.0/0"
    why = "The setup cannot download anything, and SSH cannot connect from here: `ray up` waits until it gives up."
    if inside:
        why = "The setup cannot download anything there (pip hangs)."
    fix = f"Add a default route {way} to its route table, or use another subnet."
    yield error("no-internet-route", path, what, why, fix)


def _ports(rule: dict[str, Any]) -> tuple[int, int] | None:
    """Return the lowest and highest TCP port of a rule, or None if the rule is not for TCP."""
    if rule.get("IpProtocol") == "-1":
        return 0, 65535
    if rule.get("IpProtocol") not in ("tcp", "6"):
        return None
    return rule.get("FromPort", 0), rule.get("ToPort", 65535)


def _sources(rule: dict[str, Any]) -> list[str]:
    """Return all addresses that a rule allows."""
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
        among = f", among them {listed(behind)}" if behind else ""
        what = f"security group {name} opens ports {ports[0]}-{ports[1]} to {world[0]}{among}"
        fix = "Revoke the rule, or use your own address with /32; `ray dashboard CLUSTER.yaml` opens a tunnel."
        yield open_to_world(path, what, fix)
    if groups and not any(_sources(rule) for _, rule in rules if _has(rule, 22)):
        names = listed(g["GroupId"] for g in groups)
        what = f"security group {names} allows SSH (port 22) from no address"
        yield ssh_closed(path, what, "Add a rule for TCP port 22 from your address.")


def _has(rule: dict[str, Any], port: int) -> bool:
    ports = _ports(rule)
    return ports is not None and ports[0] <= port <= ports[1]


def _between(types: Sequence[NodeType], groups: dict[str, dict[str, Any]]) -> Iterator[ConfigFinding]:
    """Check that the workers and the head can reach each other: Ray adds no rule to groups that the file names."""
    head = next((t for t in types if t.is_head and group_ids(t)), None)
    for t in types:
        if t.is_head or head is None or not group_ids(t):
            continue
        for origin, target in ((t, head), (head, t)):
            if not all(i in groups for i in group_ids(target)):
                continue  # a missing group already has a finding
            rules = [rule for i in group_ids(target) for rule in groups[i].get("IpPermissions", ()) if _has(rule, 6379)]
            pairs = {p.get("GroupId") for rule in rules for p in rule.get("UserIdGroupPairs", ())}
            if not pairs & set(group_ids(origin)) and not any(map(_sources, rules)):
                what = f"the groups of {target.name!r} open no port of Ray to nodes of {origin.name!r}"
                why = "Ray adds no rule to groups that the file names: nodes start and cost money, but never join."
                fix = "Add a rule for all traffic from the group itself (and from the other one, if they differ)."
                yield error("nodes-cut-off", _key(target, "SecurityGroupIds"), what, why, fix)
                break


def _rays_group(aws: AwsAccount, document: Document, vpcs: set[str]) -> Iterator[ConfigFinding]:
    """Check the existing group that Ray reuses by name. Ray adds rules to it only if it has none."""
    name = document.get("provider", "security_group", "GroupName")
    name = name if isinstance(name, str) else f"ray-autoscaler-{document.get('cluster_name')}"
    filters = [{"Name": "group-name", "Values": [name]}]
    groups = list(aws.pages("describe_security_groups", "SecurityGroups", Filters=filters))
    mine = [g for g in groups if g.get("VpcId") in vpcs and g.get("IpPermissions")]
    has_key = "security_group" in document.mapping("provider")
    yield from _group_rules(mine, ("provider", "security_group") if has_key else ("provider",))
