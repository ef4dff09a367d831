"""Checks a cluster against AWS: credentials, key pairs and rights, and runs the queries of the other AWS modules.

IAM's simulator evaluates rights from the policies of a user or role. It does not read the bucket's own policy, and not
all policies of an organization. An action that it allows may still be refused; one that it denies is always refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, account_of, code, right, trouble
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, listed, refuses_nodes, warning
from raytf.doctor.local_environment import Surroundings, tool_output
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe import aws_capacity, aws_network
from raytf.doctor.probe.queries import (
    ProbeResults,
    Query,
    all_nodes,
    bucket_parts,
    check_bucket,
    is_bucket,
    no_answer,
    no_credentials,
    no_right,
    refused,
    run,
)
from raytf.errors import one_line

_UNSEEN = "the image, the key pair, the network, quotas, spot offers, rights and the bucket"
_LOGIN = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE"
#: Subject of a query -> the service whose right it needs, if that is not EC2.
_SERVICES = {"quotas": "servicequotas", "rights": "iam", "bucket": "s3"}
#: Name of an operation -> its service, regardless of the query that calls it.
_OPERATIONS = {"GetParameter": "ssm", "GetRole": "iam", "GetCallerIdentity": "sts"}
#: An id that no resource has. The simulator only compares strings, so a policy for `volume/*` matches it.
_ANY = "00000000000000000"
_CALLER_SEES = ("DescribeInstances", "DescribeInstanceTypes", "DescribeSubnets", "DescribeSecurityGroups")
#: Denied actions, each with the resource.
_Lacks = list[tuple[str, str]]


def inspect(document: Document, here: Surroundings, need: JobNeeds | None) -> ProbeResults:
    """Check a cluster, and the storage of a job, against AWS."""
    seen = ProbeResults()
    region = document.get("provider", "region")
    if not isinstance(region, str):
        return seen  # the offline part reports it
    aws = account_of(document, region)
    if not aws.has_credentials():
        return ProbeResults([no_credentials("AWS", _UNSEEN, _LOGIN)])
    try:
        caller = aws.client("sts").get_caller_identity()
    except Exception as problem:
        return ProbeResults([_explain(Query("credentials", list), problem)])
    seen.notes.append(f"AWS account {caller['Account']} as {caller['Arn']}, region {region}")
    types = all_nodes(document)
    machines = aws_capacity.Machines(aws, types)
    queries = [
        Query("instance types", partial(aws_capacity.offers, aws, document, types, machines)),
        Query("spot prices", partial(aws_capacity.spot, aws, document, types, seen.spot)),
        Query("quotas", partial(aws_capacity.quotas, aws, document, types, machines)),
        Query("images", partial(aws_capacity.check_images, aws, document, types, machines)),
        Query("key pairs", partial(check_key_pair, aws, document, types, here)),
        Query("network", partial(aws_network.check, aws, document, types)),
        Query("rights", partial(_check_rights, aws, document, types, caller, need, seen.notes)),
        Query("spot role", partial(_spot_role, aws, types)),
    ]
    if need is not None and is_bucket(need.storage):
        queries.append(Query("bucket", partial(check_bucket, need.storage, aws)))
    seen.findings += run(queries, _explain)
    return seen


def _explain(query: Query, problem: Exception) -> ConfigFinding:
    kind = trouble(problem)
    if kind is AwsTrouble.DENIED:
        operation = getattr(problem, "operation_name", "")
        is_iam = any(word in operation for word in ("Policy", "Policies", "InstanceProfile"))
        service = "iam" if is_iam else _OPERATIONS.get(operation) or _SERVICES.get(query.what, "ec2")
        return no_right(query.what, right(problem, service))
    if kind is AwsTrouble.REFUSED:
        return refused("AWS", problem, f"{_LOGIN}; temporary keys expire after hours.")
    return no_answer(query.what, f"{type(problem).__name__}: {one_line(problem, 160)}")


def _spot_role(aws: AwsAccount, types: list[NodeType]) -> Iterator[ConfigFinding]:
    spot = [t for t in types if t.market == "spot"]
    if spot and aws.find("iam", "get_role", RoleName="AWSServiceRoleForEC2Spot") is None:
        path = (*spot[0].path, "node_config", "InstanceMarketOptions")
        what = "the account has no role AWSServiceRoleForEC2Spot"
        why = "The first spot request creates it. If the head lacks the right to do so, no spot node ever starts."
        fix = "Run `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com` once."
        yield warning("spot-role-missing", path, what, why, fix)


def check_key_pair(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], here: Surroundings
) -> Iterator[ConfigFinding]:
    """Find key pairs that EC2 does not have, and key files that belong to another key pair."""
    private = document.get("auth", "ssh_private_key")
    if not isinstance(private, str):
        return  # Ray then creates its own pair and makes sure that both halves exist
    own = tool_output(
        ["ssh-keygen", "-y", "-P", "", "-f", str(here.local(private))], here.environ
    )  # empty for a passphrase
    names: dict[str, NodeType] = {}
    for t in types:
        if isinstance(t.config.get("KeyName"), str):
            names.setdefault(t.config["KeyName"], t)
    for name, t in names.items():
        path = (*t.path, "node_config", "KeyName")
        answer = aws.find("ec2", "describe_key_pairs", KeyNames=[name], IncludePublicKey=True) or {}
        pair = next(iter(answer.get("KeyPairs", ())), None)
        if pair is None:
            what = f"there is no key pair {name!r} in {aws.region}, and key pairs belong to one region"
            command = f"aws ec2 import-key-pair --region {aws.region} --key-name {name}"
            fix = f"Run `{command} --public-key-material fileb://KEY.pub`, or name one that exists."
            yield refuses_nodes("EC2", "key-pair-missing", path, what, fix, "InvalidKeyPair.NotFound")
            continue
        theirs = str(pair.get("PublicKey", "")).split()[:2]
        if own and theirs and own.split()[:2] != theirs:
            what = f"{private} is not the key of key pair {name!r}"
            why = "The node starts and costs money, but nobody can log in, and `ray up` waits until it gives up."
            fix = "Name the key pair of this file, or set ssh_private_key to the file of this key pair."
            yield error("key-pair-differs", path, what, why, fix)


@dataclass(frozen=True)
class _Principal:
    """A user or role, whose rights in a cluster IAM's simulator evaluates.

    Attributes:
        arn: its ARN, which includes the partition.
        account: the number of the account.
    """

    aws: AwsAccount
    document: Document
    arn: str
    account: str

    def arn_of(self, service: str, rest: str) -> str:
        return f"arn:{self.arn.split(':')[1]}:{service}:{self.aws.region}:{rest}"

    def ec2(self, name: str) -> str:
        return self.arn_of("ec2", f"{self.account}:{name}")

    def lacks(
        self, actions: Sequence[str], resources: Sequence[str], context: Mapping[str, str] | None = None
    ) -> _Lacks:
        """Return the actions that are denied, each with the resource."""
        if not resources:
            return []
        entries = [
            {"ContextKeyName": key, "ContextKeyType": "string", "ContextKeyValues": [value]}
            for key, value in (context or {}).items()
        ]
        query = {"ActionNames": list(actions), "ResourceArns": list(resources), "ContextEntries": entries}
        pages = self.aws.client("iam").get_paginator("simulate_principal_policy")
        denied: _Lacks = []
        for page in pages.paginate(PolicySourceArn=self.arn, **query):
            for result in page["EvaluationResults"]:
                whole = {"EvalResourceName": result.get("EvalResourceName", "*")}
                whole["EvalResourceDecision"] = result["EvalDecision"]
                for part in result.get("ResourceSpecificResults") or [whole]:
                    if part["EvalResourceDecision"] != "allowed":
                        denied.append((result["EvalActionName"], part["EvalResourceName"]))
        return list(dict.fromkeys(denied))

    def lacks_to_start(self, types: Sequence[NodeType]) -> _Lacks:
        """Return the denied actions of those that start, tag and terminate nodes."""
        cluster = str(self.document.get("cluster_name", default="default"))
        instance = self.ec2(f"instance/i-{_ANY}")
        beside = [self.arn_of("ec2", f":image/ami-{_ANY}"), *map(self.ec2, _beside(types))]
        tag, own = {"aws:RequestTag/ray-cluster-name": cluster}, {"aws:ResourceTag/ray-cluster-name": cluster}
        images = {str(t.config.get("ImageId")) for t in types}
        names = sorted(name.removeprefix("resolve:ssm:") for name in images if name.startswith("resolve:ssm:"))
        owners = {name: "" if name.startswith("/aws/") else self.account for name in names}
        parameters = [self.arn_of("ssm", f"{owners[n]}:parameter/{n.lstrip('/')}") for n in names]
        return [
            *self.lacks(["ec2:RunInstances"], [instance], tag),
            *self.lacks(["ec2:RunInstances"], beside),
            *self.lacks(["ec2:CreateTags"], [instance], {"ec2:CreateAction": "RunInstances", **own, **tag}),
            *self.lacks(["ec2:TerminateInstances"], [instance], own),
            *self.lacks(["ssm:GetParameters"], parameters),
        ]

    def lacks_to_pass(self, roles: Sequence[str]) -> _Lacks:
        return self.lacks(["iam:PassRole"], roles, {"iam:PassedToService": "ec2.amazonaws.com"})

    def lacks_to_make(self, types: Sequence[NodeType]) -> _Lacks:
        """Return the denied actions of those with which `ray up` creates resources that the file does not name."""
        wanted = []
        if not self.document.get("auth", "ssh_private_key"):
            wanted.append(("ec2:CreateKeyPair", [f"key-pair/ray-autoscaler_{self.aws.region}"]))
        own = {"SecurityGroupIds", "NetworkInterfaces", "LaunchTemplate"}
        if any(not own & t.config.keys() for t in types):
            group = f"security-group/sg-{_ANY}"
            wanted.append(("ec2:CreateSecurityGroup", [group, f"vpc/vpc-{_ANY}"]))
            wanted.append(("ec2:AuthorizeSecurityGroupIngress", [group]))
        return [lack for action, names in wanted for lack in self.lacks([action], list(map(self.ec2, names)))]


def _check_rights(
    aws: AwsAccount,
    document: Document,
    types: Sequence[NodeType],
    who: dict[str, str],
    need: JobNeeds | None,
    notes: list[str],
) -> Iterator[ConfigFinding]:
    """Find instance profiles that do not exist, and rights that the caller, the head or the workers lack.

    Args:
        who: the caller, as reported by STS.
        need: the needs of a job, which name its bucket.
        notes: receives the policies of each role.
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
    arn = _caller(aws, who["Arn"])
    if arn is not None:
        caller = _Principal(aws, document, arn, who["Account"])
        lacks = [
            *caller.lacks([f"ec2:{name}" for name in _CALLER_SEES], ["*"]),
            *caller.lacks_to_start(types),
            *caller.lacks_to_pass([role["Arn"] for role in roles.values()]),
            *caller.lacks_to_make(types),
        ]
        yield from _missing("you", who["Arn"], lacks, (), "`ray up` exits, or leaves nodes behind.")
    head = next((t for t in types if t.is_head), None)
    head_role = roles.get(_profile(head) or "") if head is not None else None
    if head is not None and head_role is not None:
        workers = [t for t in types if not t.is_head]
        others = sorted({roles[n]["Arn"] for t in workers for n in [_profile(t) or ""] if n in roles})
        principal = _Principal(aws, document, head_role["Arn"], who["Account"])
        lacks = [
            *principal.lacks(["ec2:DescribeInstances"], ["*"]),
            *(principal.lacks_to_start(workers) if workers else ()),
            *principal.lacks_to_pass(others),
        ]
        path = (*head.path, "node_config", "IamInstanceProfile")
        why = "The head starts no worker, and only its monitor.log shows why."
        yield from _missing("the head", head_role["RoleName"], lacks, path, why)
    place = bucket_parts(need.storage) if need is not None else None
    if place is not None and place[0] == "s3":
        principals = {name: _Principal(aws, document, role["Arn"], who["Account"]) for name, role in roles.items()}
        yield from _bucket_rights(types, principals, place[1], place[2])


def _bucket_rights(
    types: Sequence[NodeType], principals: dict[str, _Principal], name: str, prefix: str
) -> Iterator[ConfigFinding]:
    checked: set[str] = set()
    for t in types:
        principal = principals.get(_profile(t) or "")
        if principal is None or principal.arn in checked:
            continue
        checked.add(principal.arn)
        base = f"arn:{principal.arn.split(':')[1]}:s3:::{name}"
        objects = "/".join(filter(None, (base, prefix, "raytf-check")))
        lacks = [
            *principal.lacks(["s3:ListBucket"], [base]),
            *principal.lacks(["s3:PutObject", "s3:GetObject", "s3:DeleteObject"], [objects]),
        ]
        path, role = (*t.path, "node_config", "IamInstanceProfile"), principal.arn.rpartition("/")[2]
        yield from _missing(f"nodes of {t.name!r}", role, lacks, path, "The first checkpoint fails.")


def _profile(t: NodeType | None) -> str | None:
    profile = t.config.get("IamInstanceProfile") if t is not None else None
    if not isinstance(profile, dict):
        return None
    name = profile.get("Name") or str(profile.get("Arn", "")).rpartition("/")[2]
    return name if isinstance(name, str) and name else None


def _role(aws: AwsAccount, name: str, path: Path) -> Generator[ConfigFinding, None, dict[str, Any] | None]:
    profile = aws.find("iam", "get_instance_profile", InstanceProfileName=name)
    if profile is None:
        what = f"there is no instance profile {name!r} in this account"
        fix = "Create it as in docs/clusters/aws.md: create-instance-profile and add-role-to-instance-profile."
        yield refuses_nodes("EC2", "instance-profile-missing", path, what, fix)
        return None
    roles: list[dict[str, Any]] = profile["InstanceProfile"]["Roles"]
    if not roles:
        what = f"instance profile {name!r} has no role"
        why = "Nodes start without rights: the head starts no worker, and workers cannot write to the bucket."
        fix = f"Run `aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE`."
        yield error("instance-profile-empty", path, what, why, fix)
        return None
    return roles[0]


def _policies(aws: AwsAccount, role: str) -> str:
    iam = aws.client("iam")
    try:
        names = iam.list_role_policies(RoleName=role)["PolicyNames"]
        names += [p["PolicyName"] for p in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]]
    except Exception as problem:  # it is only a note
        return f"policies not seen ({code(problem) or type(problem).__name__})"
    return listed(names) or "no policy"


def _caller(aws: AwsAccount, arn: str) -> str | None:
    """Return a caller's user or role, or None for the account itself, which has all rights, and federated users."""
    kind, _, rest = arn.split(":", 5)[5].partition("/")
    if kind == "assumed-role":
        return str(aws.client("iam").get_role(RoleName=rest.partition("/")[0])["Role"]["Arn"])
    return arn if kind == "user" else None


def _beside(types: Sequence[NodeType]) -> list[str]:
    """Return the resources, besides the instance and its image, that starting a node needs, by their names."""
    named = [f"subnet/{i}" for t in types for i in aws_network.subnet_ids(t) or [f"subnet-{_ANY}"]]
    named += [f"security-group/{i}" for t in types for i in aws_network.group_ids(t) or [f"sg-{_ANY}"]]
    named += [f"network-interface/eni-{_ANY}", f"volume/vol-{_ANY}"]
    if any(t.market == "spot" for t in types):
        named.append(f"spot-instances-request/sir-{_ANY}")
    return list(dict.fromkeys(named))


def _missing(people: str, name: str, lacks: _Lacks, path: Path, why: str) -> Iterator[ConfigFinding]:
    fix = "Add the right; the policies in cluster-configs/iam/ suffice if the cluster's name is raytf-*."
    for action in dict.fromkeys(action for action, _ in lacks):
        where = listed([resource for lacking, resource in lacks if lacking == action], 3)
        what = f"{people} ({name}) may not {action} on {where}"
        kind = warning if action.startswith("ec2:Describe") and people == "you" else error
        yield kind("right-missing", path, what, why, fix)
