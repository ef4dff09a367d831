"""Key pairs of EC2 against the key file that is on this machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, error
from raytf.cluster.check.local_environment import Surroundings
from raytf.cluster.check.node_types import NodeType
from raytf.cluster.clouds.aws import AwsAccount, AwsTrouble, trouble

_SECONDS = 5


def check(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], here: Surroundings
) -> Iterator[ConfigFinding]:
    """Find key pairs that EC2 does not have, and files that are the key of another one."""
    private = document.get("auth", "ssh_private_key")
    if not isinstance(private, str):
        return  # Ray then makes a pair of its own and takes care that both halves are there
    own = public_key(str(here.local(private)))
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


def public_key(private: str) -> str | None:
    """The public half of a key file.

    Returns:
        None where it cannot be told, as with a passphrase.
    """
    tool = shutil.which("ssh-keygen")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "-y", "-P", "", "-f", private],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
