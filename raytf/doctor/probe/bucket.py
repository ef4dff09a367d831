"""Checks the bucket of a job's storage: whether it exists, is in the same region, and is writable from here.

To know whether it is writable, one object of a few bytes is written, read and deleted again: `.raytf-check-...`.
Nothing else in the online check writes anything.
"""

from __future__ import annotations

import urllib.parse
import uuid
from collections.abc import Iterator

from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, trouble
from raytf.doctor.finding import ConfigFinding, error, warning
from raytf.doctor.probe.queries import no_answer
from raytf.errors import ConfigError, StorageError, one_line

_KINDS = {AwsTrouble.MISSING: "missing", AwsTrouble.DENIED: "denied", AwsTrouble.REFUSED: "denied"}
_SCHEMES = ("s3", "gs", "gcs", "az")


def parts(storage: str) -> tuple[str, str, str] | None:
    """Return the scheme, bucket and prefix of a URI, or None for a folder."""
    scheme, mark, rest = storage.partition("://")
    if not mark or scheme not in _SCHEMES:
        return None
    bucket, _, prefix = rest.partition("?")[0].strip("/").partition("/")
    return ("gs" if scheme == "gcs" else scheme), bucket, prefix


def is_bucket(storage: str) -> bool:
    """Return whether a job keeps its runs in an object store, which can be checked from here."""
    return parts(storage) is not None


def check(storage: str, aws: AwsAccount | None = None) -> Iterator[ConfigFinding]:
    """Find a bucket that does not exist, is in another region, or cannot be written to.

    Args:
        storage: the URI of --storage.
        aws: the cluster's account and region, to compare the bucket's; None elsewhere.
    """
    location = parts(storage)
    assert location is not None
    scheme, bucket, _ = location
    own_endpoint = "endpoint_override" in urllib.parse.parse_qs(storage.partition("?")[2])
    yield from _probe(storage, f"{scheme}://{bucket}")
    if aws is not None and scheme == "s3" and not own_endpoint:
        yield from _region(aws, bucket)


def _probe(storage: str, name: str) -> Iterator[ConfigFinding]:
    try:
        if name.startswith("s3:"):
            _write_to_s3(storage)
        else:
            _write(storage)
    except ConfigError as problem:
        yield no_answer("bucket", problem)
    except Exception as problem:
        kind = problem.kind if isinstance(problem, StorageError) else _KINDS.get(trouble(problem), "other")
        if kind == "missing":
            why = "The job fails at its first checkpoint; raytf makes no buckets."
            fix = "Create it, or correct --storage."
            yield error("bucket-missing", (), f"there is no bucket {name}", why, fix)
        elif kind == "denied":
            what = f"{name} cannot be written to from here: {one_line(problem, 200)}"
            why = "The nodes have rights of their own, but `raytf show` and `raytf report` here have not."
            fix = "Add the rights of cluster-configs/iam/aws-worker-policy.json, or your cloud's, to your account."
            yield warning("bucket-denied", (), what, why, fix)
        else:
            yield no_answer("bucket", problem)


def _write_to_s3(storage: str) -> None:
    from raytf.storage.s3 import S3  # pyarrow takes a third of a second

    _, bucket, prefix = parts(storage) or ("", "", "")
    options = dict(urllib.parse.parse_qsl(storage.partition("?")[2]))
    # Not through raytf.storage.storage: pyarrow makes an object for the folder of one that it deletes.
    client, key = S3.of(options).client(), "/".join(filter(None, (prefix, _probe_name())))
    client.put_object(Bucket=bucket, Key=key, Body=b"raytf check")
    try:
        client.get_object(Bucket=bucket, Key=key)["Body"].read()
    finally:
        client.delete_object(Bucket=bucket, Key=key)


def _write(storage: str) -> None:
    from raytf.storage.storage import Storage

    place, probe = Storage(storage), _probe_name()
    place.put(probe, b"raytf check")
    try:
        place.get(probe)
    finally:
        place.delete(probe)


def _probe_name() -> str:
    return f".raytf-check-{uuid.uuid4().hex[:12]}"


def _region(aws: AwsAccount, bucket: str) -> Iterator[ConfigFinding]:
    try:
        answer = aws.client("s3").head_bucket(Bucket=bucket)
    except Exception:
        return  # `_probe` reports what is wrong with the bucket
    region = answer.get("BucketRegion") or answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
    if region and region != aws.region:
        yield in_other_region(bucket, region, aws.region)


def in_other_region(bucket: str, place: str, region: str) -> ConfigFinding:
    """Return the finding that a bucket is not in the cluster's region."""
    what = f"bucket {bucket} is in {place}, the cluster in {region}"
    why = "Each checkpoint crosses regions: it is slower, and each GB costs money."
    fix = f"Take a bucket in {region}, or start the cluster in {place}."
    return warning("bucket-region", ("provider", "region"), what, why, fix)
