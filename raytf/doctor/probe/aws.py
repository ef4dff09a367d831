"""Checks a cluster against AWS: the credentials, and all questions of the other modules at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, account_of, right, trouble
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, warning
from raytf.doctor.local_environment import Surroundings, tool_output
from raytf.doctor.node_types import NodeType
from raytf.doctor.probe import aws_capacity, aws_network, aws_permissions, bucket
from raytf.doctor.probe.queries import ProbeResults, Query, all_nodes, no_answer, no_credentials, no_right, refused, run
from raytf.errors import one_line

_UNSEEN = "the image, the key pair, the network, quotas, spot offers, rights and the bucket"
_MEND = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE"
#: First part of a question's name -> the service whose right it needs, where that is not EC2.
_SERVICES = {"quotas": "servicequotas", "rights": "iam", "profiles": "iam", "image parameters": "ssm", "bucket": "s3"}


def inspect(document: Document, here: Surroundings, need: JobNeeds | None) -> ProbeResults:
    """Ask AWS everything that concerns a cluster.

    Args:
        document: the cluster YAML.
        here: this machine.
        need: what a job wants, for its storage.
    """
    seen = ProbeResults()
    region = document.get("provider", "region")
    if not isinstance(region, str):
        return seen  # the offline part has said so
    aws = account_of(document, region)
    if not aws.has_credentials():
        return ProbeResults([no_credentials("AWS", _UNSEEN, _MEND)])
    try:
        who = aws.client("sts").get_caller_identity()
    except Exception as problem:
        return ProbeResults([_explain(Query("credentials", list), problem)])
    seen.notes.append(f"AWS account {who['Account']} as {who['Arn']}, region {region}")
    types = all_nodes(document)
    machines = aws_capacity.Machines(aws, types)
    queries = [
        Query("instance types", partial(aws_capacity.offers, aws, document, types, machines)),
        Query("spot prices", partial(aws_capacity.spot, aws, document, types, seen.spot)),
        Query("quotas", partial(aws_capacity.quotas, aws, document, types, machines)),
        Query("images", partial(aws_capacity.check_images, aws, document, types, machines)),
        Query("key pairs", partial(check_key_pair, aws, document, types, here)),
        Query("network", partial(aws_network.check, aws, document, types)),
        Query("rights", partial(aws_permissions.check, aws, document, types, who, need, seen.notes)),
        Query("spot role", partial(_spot_role, aws, types)),
    ]
    if need is not None and bucket.is_bucket(need.storage):
        queries.append(Query("bucket", partial(bucket.check, need.storage, aws)))
    seen.findings += run(queries, _explain)
    return seen


def _spot_role(aws: AwsAccount, types: list[NodeType]) -> Iterator[ConfigFinding]:
    spot = [t for t in types if t.market == "spot"]
    if not spot:
        return
    try:
        aws.client("iam").get_role(RoleName="AWSServiceRoleForEC2Spot")
    except Exception as problem:
        if trouble(problem) is not AwsTrouble.MISSING:
            raise
        yield warning(
            "spot-role-missing",
            (*spot[0].path, "node_config", "InstanceMarketOptions"),
            "the account has no role AWSServiceRoleForEC2Spot",
            "The first spot request makes it, for which the head needs a right: else no spot node ever starts.",
            "Run `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com` once.",
        )


def _explain(query: Query, problem: Exception) -> ConfigFinding:
    kind = trouble(problem)
    if kind is AwsTrouble.DENIED:
        operation = getattr(problem, "operation_name", "")
        return no_right(query.what, right(problem, _service(query.what, operation)))
    if kind is AwsTrouble.REFUSED:
        return refused("AWS", problem, f"{_MEND}; temporary keys end after hours.")
    return no_answer(query.what, f"{type(problem).__name__}: {one_line(problem, 160)}")


def _service(what: str, operation: str) -> str:
    if operation == "GetParameter":
        return "ssm"
    if operation == "GetRole" or "Policy" in operation or "Policies" in operation or "InstanceProfile" in operation:
        return "iam"
    return "sts" if operation == "GetCallerIdentity" else _SERVICES.get(what, "ec2")


def check_key_pair(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], here: Surroundings
) -> Iterator[ConfigFinding]:
    """Find key pairs that EC2 does not have, and files that are the key of another one."""
    private = document.get("auth", "ssh_private_key")
    if not isinstance(private, str):
        return  # Ray then makes a pair of its own and takes care that both halves are there
    own = tool_output(
        ["ssh-keygen", "-y", "-P", "", "-f", str(here.local(private))], here.environ
    )  # empty for a passphrase
    seen: dict[str, dict[str, Any] | None] = {}
    for t in types:
        name = t.config.get("KeyName")
        if not isinstance(name, str):
            continue
        first = name not in seen
        if first:
            seen[name] = _pair(aws, name)
        pair, path = seen[name], (*t.path, "node_config", "KeyName")
        if pair is None and first:
            yield error(
                "key-pair-missing",
                path,
                f"there is no key pair {name!r} in {aws.region}",
                "EC2 refuses each node of this type (InvalidKeyPair.NotFound); key pairs belong to one region.",
                f"Run `aws ec2 import-key-pair --region {aws.region} --key-name {name} --public-key-material "
                "fileb://KEY.pub`, or name one that is there.",
            )
        theirs = str((pair or {}).get("PublicKey", "")).split()[:2]
        if first and own and theirs and own.split()[:2] != theirs:
            yield error(
                "key-pair-differs",
                path,
                f"{private} is not the key of key pair {name!r}",
                "The node comes up, nobody can log in, and `ray up` waits until it gives up while it is paid for.",
                "Name the key pair of this file, or give the file of this key pair as ssh_private_key.",
            )


def _pair(aws: AwsAccount, name: str) -> dict[str, Any] | None:
    try:
        pairs = aws.client("ec2").describe_key_pairs(KeyNames=[name], IncludePublicKey=True)["KeyPairs"]
    except Exception as problem:
        if trouble(problem) is AwsTrouble.MISSING:
            return None
        raise
    return pairs[0] if pairs else None
