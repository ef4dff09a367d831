"""Rights on AWS by policy simulation: of whoever calls `ray up`, of the head and of the workers.

IAM's simulator reads the policies of a user or role. It does not read the bucket's own policy, nor those of an
organisation in all cases: what it allows may still be refused, and what it denies is denied.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, code, trouble
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, listed, warning
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe.aws_network import group_ids, subnet_ids
from raytf.doctor.probe.bucket import parts

#: An id of nothing: the simulator compares texts, and a policy for `volume/*` lets this one through.
_ANY = "00000000000000000"
_CALLER_SEES = (
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeSubnets",
    "ec2:DescribeSecurityGroups",
)


def check(
    aws: AwsAccount,
    document: Document,
    types: Sequence[NodeType],
    who: dict[str, str],
    need: JobNeeds | None,
    notes: list[str],
) -> Iterator[ConfigFinding]:
    """Find instance profiles that are not there, and rights that the caller, the head or the workers lack.

    Args:
        aws, document, types: the account, the cluster YAML and its node types.
        who: the caller, as STS names it.
        need: the needs of a job, for its bucket.
        notes: filled in: which role has which policies.
    """
    roles: dict[str, dict[str, Any]] = {}
    for t in types:
        name, path = _profile(t), (*t.path, "node_config", "IamInstanceProfile")
        if name is None or name in roles:
            continue
        role = yield from _role(aws, name, path)
        if role is not None:
            roles[name] = role
            notes.append(f"role {role['RoleName']}: {_policies(aws, role['RoleName'])}")
    partition, account = who["Arn"].split(":")[1], who["Account"]
    passed = [role["Arn"] for role in roles.values()]
    caller = _caller(aws, who["Arn"])
    if caller is not None:
        lacks = [
            *_lacks(aws, caller, _CALLER_SEES, ["*"]),
            *_starts(aws, caller, document, types, partition, account),
            *_passes(aws, caller, passed),
            *_makes(aws, caller, document, types, partition, account),
        ]
        yield from _missing("you", who["Arn"], lacks, (), "`ray up` ends, or leaves nodes behind.")
    head = next((t for t in types if t.is_head), None)
    head_role = roles.get(_profile(head) or "") if head is not None else None
    if head is not None and head_role is not None:
        workers = [t for t in types if not t.is_head]
        others = sorted({roles[n]["Arn"] for t in workers for n in [_profile(t) or ""] if n in roles})
        lacks = [
            *_lacks(aws, head_role["Arn"], ["ec2:DescribeInstances"], ["*"]),
            *(_starts(aws, head_role["Arn"], document, workers, partition, account) if workers else ()),
            *_passes(aws, head_role["Arn"], others),
        ]
        path = (*head.path, "node_config", "IamInstanceProfile")
        why = "The head starts no worker, which only its monitor.log says."
        yield from _missing("the head", head_role["RoleName"], lacks, path, why)
    place = parts(need.storage) if need is not None else None
    if place is not None and place[0] == "s3":
        yield from _bucket_rights(aws, types, roles, partition, place[1], place[2])


def _profile(t: NodeType | None) -> str | None:
    profile = t.config.get("IamInstanceProfile") if t is not None else None
    if not isinstance(profile, dict):
        return None
    name = profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2]
    return name if isinstance(name, str) and name else None


def _role(aws: AwsAccount, name: str, path: Path) -> Generator[ConfigFinding, None, dict[str, Any] | None]:
    """Yield findings, and return the role."""
    try:
        profile = aws.client("iam").get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    except Exception as problem:
        if trouble(problem) is not AwsTrouble.MISSING:
            raise
        yield error(
            "instance-profile-missing",
            path,
            f"there is no instance profile {name!r} in this account",
            "EC2 refuses each node of this type; for the head, `ray up` ends.",
            "Make it as docs/clusters/aws.md says: create-instance-profile and add-role-to-instance-profile.",
        )
        return None
    if not profile["Roles"]:
        yield error(
            "instance-profile-empty",
            path,
            f"instance profile {name!r} has no role",
            "Nodes come up with no rights at all: the head starts no worker, workers cannot write to the bucket.",
            f"Run `aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE`.",
        )
        return None
    return profile["Roles"][0]


def _policies(aws: AwsAccount, role: str) -> str:
    iam = aws.client("iam")
    try:
        names = iam.list_role_policies(RoleName=role)["PolicyNames"]
        names += [p["PolicyName"] for p in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]]
    except Exception as problem:  # a note is not worth more than a note
        return f"policies not seen ({code(problem) or type(problem).__name__})"
    return listed(names) or "no policy"


def _caller(aws: AwsAccount, arn: str) -> str | None:
    """Return what can be simulated of a caller.

    Returns:
        None for the account itself, which may do all, and for guests.
    """
    kind, _, rest = arn.split(":", 5)[5].partition("/")
    if kind == "assumed-role":
        return str(aws.client("iam").get_role(RoleName=rest.partition("/")[0])["Role"]["Arn"])
    return arn if kind == "user" else None


def _lacks(
    aws: AwsAccount,
    principal: str,
    actions: Sequence[str],
    resources: Sequence[str],
    context: Mapping[str, str] | None = None,
) -> list[tuple[str, str]]:
    """Return the actions that are denied, each with the resource."""
    pages = aws.client("iam").get_paginator("simulate_principal_policy")
    denied: list[tuple[str, str]] = []
    entries = [
        {"ContextKeyName": key, "ContextKeyType": "string", "ContextKeyValues": [value]}
        for key, value in (context or {}).items()
    ]
    for page in pages.paginate(
        PolicySourceArn=principal, ActionNames=list(actions), ResourceArns=list(resources), ContextEntries=entries
    ):
        for result in page["EvaluationResults"]:
            specific = result.get("ResourceSpecificResults") or [
                {
                    "EvalResourceName": result.get("EvalResourceName", "*"),
                    "EvalResourceDecision": result["EvalDecision"],
                }
            ]
            denied += [
                (result["EvalActionName"], r["EvalResourceName"])
                for r in specific
                if r["EvalResourceDecision"] != "allowed"
            ]
    return list(dict.fromkeys(denied))


def _starts(
    aws: AwsAccount, who: str, document: Document, types: Sequence[NodeType], partition: str, account: str
) -> list[tuple[str, str]]:
    cluster = str(document.get("cluster_name", default="default"))
    base = f"arn:{partition}:ec2:{aws.region}:{account}"
    instance = f"{base}:instance/i-{_ANY}"
    beside = [f"arn:{partition}:ec2:{aws.region}::image/ami-{_ANY}", *_beside(base, types)]
    tag = {"aws:RequestTag/ray-cluster-name": cluster}
    own = {"aws:ResourceTag/ray-cluster-name": cluster}
    while_starting = {"ec2:CreateAction": "RunInstances"}
    denied = [
        *_lacks(aws, who, ["ec2:RunInstances"], [instance], tag),
        *_lacks(aws, who, ["ec2:RunInstances"], beside),
        *_lacks(aws, who, ["ec2:CreateTags"], [instance], {**while_starting, **own, **tag}),
        *_lacks(aws, who, ["ec2:TerminateInstances"], [instance], own),
    ]
    images = {str(t.config.get("ImageId")) for t in types}
    names = {name.removeprefix("resolve:ssm:") for name in images if name.startswith("resolve:ssm:")}
    owner = {name: "" if name.startswith("/aws/") else account for name in names}
    where = [f"arn:{partition}:ssm:{aws.region}:{owner[n]}:parameter/{n.lstrip('/')}" for n in sorted(names)]
    return denied + (_lacks(aws, who, ["ssm:GetParameters"], where) if where else [])


def _beside(base: str, types: Sequence[NodeType]) -> list[str]:
    """Return what starting a node touches besides the instance and its image, by the names that the file has."""
    named = [f"subnet/{i}" for t in types for i in subnet_ids(t) or [f"subnet-{_ANY}"]]
    named += [f"security-group/{i}" for t in types for i in group_ids(t) or [f"sg-{_ANY}"]]
    named += [f"network-interface/eni-{_ANY}", f"volume/vol-{_ANY}"]
    if any(t.market == "spot" for t in types):
        named.append(f"spot-instances-request/sir-{_ANY}")
    return [f"{base}:{name}" for name in dict.fromkeys(named)]


def _passes(aws: AwsAccount, who: str, roles: Sequence[str]) -> list[tuple[str, str]]:
    if not roles:
        return []
    return _lacks(aws, who, ["iam:PassRole"], roles, {"iam:PassedToService": "ec2.amazonaws.com"})


def _makes(
    aws: AwsAccount, who: str, document: Document, types: Sequence[NodeType], partition: str, account: str
) -> list[tuple[str, str]]:
    """Return the denied actions among those by which `ray up` makes what the config does not name."""
    base, actions = f"arn:{partition}:ec2:{aws.region}:{account}", []
    if not document.get("auth", "ssh_private_key"):
        actions.append(("ec2:CreateKeyPair", [f"{base}:key-pair/ray-autoscaler_{aws.region}"]))
    own = {"SecurityGroupIds", "NetworkInterfaces", "LaunchTemplate"}
    if any(not own & t.config.keys() for t in types):
        actions.append(("ec2:CreateSecurityGroup", [f"{base}:security-group/sg-{_ANY}", f"{base}:vpc/vpc-{_ANY}"]))
        actions.append(("ec2:AuthorizeSecurityGroupIngress", [f"{base}:security-group/sg-{_ANY}"]))
    return [lack for action, where in actions for lack in _lacks(aws, who, [action], where)]


def _bucket_rights(
    aws: AwsAccount,
    types: Sequence[NodeType],
    roles: dict[str, dict[str, Any]],
    partition: str,
    bucket: str,
    prefix: str,
) -> Iterator[ConfigFinding]:
    done: set[str] = set()
    objects = f"arn:{partition}:s3:::{bucket}/{prefix + '/' if prefix else ''}raytf-check"
    for t in types:
        role = roles.get(_profile(t) or "")
        if role is None or role["RoleName"] in done:
            continue
        done.add(role["RoleName"])
        lacks = [
            *_lacks(aws, role["Arn"], ["s3:ListBucket"], [f"arn:{partition}:s3:::{bucket}"]),
            *_lacks(aws, role["Arn"], ["s3:PutObject", "s3:GetObject", "s3:DeleteObject"], [objects]),
        ]
        path = (*t.path, "node_config", "IamInstanceProfile")
        yield from _missing(f"nodes of {t.name!r}", role["RoleName"], lacks, path, "The first checkpoint fails.")


def _missing(people: str, name: str, lacks: Sequence[tuple[str, str]], path: Path, why: str) -> Iterator[ConfigFinding]:
    for action in dict.fromkeys(action for action, _ in lacks):
        where = listed([resource for lacking, resource in lacks if lacking == action], 3)
        yield (warning if action.startswith("ec2:Describe") and people == "you" else error)(
            "right-missing",
            path,
            f"{people} ({name}) may not {action} on {where}",
            why,
            "Give the right; cluster-configs/iam/ has policies that suffice. A condition on tags wants the cluster's "
            "name: theirs is raytf-*.",
        )
