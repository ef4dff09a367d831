"""Runs queries of a cloud in parallel within a time limit. Has the findings and the bucket check for all clouds."""

from __future__ import annotations

import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from raytf.doctor import machines
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, trouble
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, refuses_nodes, warning
from raytf.doctor.node_types import NodeType, most_used, most_workers, node_types
from raytf.errors import ConfigError, StorageError, one_line

#: Port of Ray -> the service that listens there.
RAY_PORTS = {8265: "the dashboard and the job server", 6379: "the head's tables", 10001: "Ray Client"}
#: Time limit for all queries about one file together.
LIMIT_SECONDS = 20.0
#: Words in an image's name or description that imply that it has NVIDIA's driver.
DRIVER = re.compile(r"nvidia|cuda|gpu|deep ?learning|dlami", re.IGNORECASE)
_INSTALLS_DRIVER = re.compile(r"nvidia-driver|cuda-drivers|nvidia-headless|NVIDIA-Linux|ubuntu-drivers")
_TROUBLES = {AwsTrouble.MISSING: "missing", AwsTrouble.DENIED: "denied", AwsTrouble.REFUSED: "denied"}
_SCHEMES = ("s3", "gs", "gcs", "az")


@dataclass
class ProbeResults:
    """The results of online checks against a cloud, an API server or hosts.

    Attributes:
        findings: mistakes.
        notes: facts for the user, such as the credentials that were used and the roles of nodes.
        spot: node type -> its current spot price in US dollars per hour.
    """

    findings: list[ConfigFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spot: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Query:
    """A query.

    Attributes:
        what: its subject, for `WHAT: not checked`.
        ask: returns findings, and may raise any exception of its library.
    """

    what: str
    ask: Callable[[], Iterable[ConfigFinding]]


def run(
    queries: Sequence[Query], explain: Callable[[Query, Exception], ConfigFinding], seconds: float = LIMIT_SECONDS
) -> list[ConfigFinding]:
    """Run all queries in parallel, and return their findings and one for each query without an answer in time.

    Args:
        explain: turns an exception of a query into a finding.
        seconds: how long to wait for all queries together.
    """
    answers: dict[int, list[ConfigFinding]] = {}

    def ask(i: int, query: Query) -> None:
        answer: list[ConfigFinding] = []
        try:
            answer.extend(query.ask())  # findings before an exception are kept
        except Exception as problem:
            answer.append(explain(query, problem))
        answers[i] = answer

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(queries)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [
        finding
        for i, query in enumerate(queries)
        for finding in (answers[i] if i in answers else [no_answer(query.what, f"no answer within {seconds:g} s")])
    ]


def all_nodes(document: Document) -> list[NodeType]:
    """Return each node type that may have nodes, followed by its fallbacks as types of the same name."""
    nodes: list[NodeType] = []
    for t in node_types(document):
        if not t.is_head and t.most <= 0:
            continue
        nodes.append(t)
        for other in t.others:
            most = t.most if other.at_most is None else min(t.most, other.at_most)
            nodes.append(replace(t, config=other.config, machine=other.machine, market=other.market, most=most))
    return nodes


def no_answer(what: str, problem: object) -> ConfigFinding:
    """Return the finding that a query failed or had no answer in time."""
    fix = "Check the network and the endpoint and try again, or pass --offline."
    return _unseen_warning("no-answer", f"{what}: not checked, {one_line(problem, 200)}", fix)


def no_right(what: str, rights: str) -> ConfigFinding:
    """Return the finding that the credentials are valid but lack the right to read."""
    fix = f"Ask for {rights}, which only reads, or pass --offline."
    return _unseen_warning("no-right-to-look", f"{what}: not checked, since these credentials lack {rights}", fix)


def no_credentials(place: str, unseen: str, fix: str) -> ConfigFinding:
    """Return the finding that there are no credentials."""
    what = f"{place} was not asked: {unseen} were not checked"
    return _unseen_warning("no-credentials", what, f"{fix}; or pass --offline.")


def _unseen_warning(code: str, what: str, fix: str) -> ConfigFinding:
    return warning(code, (), what, "Mistakes there appear only after money is spent.", fix)


def refused(place: str, problem: object, fix: str, command: str = "ray up") -> ConfigFinding:
    """Return the finding that a cloud or API server refuses the credentials."""
    what = f"{place} refuses these credentials: {one_line(problem, 200)}"
    return error("credentials-refused", (), what, f"`{command}` uses the same ones and fails.", fix)


def over_quota(
    document: Document,
    cloud: str,
    quota: str,
    members: Sequence[tuple[NodeType, float]],
    room: float,
    reason: str,
    ask: Callable[[float], str],
) -> Iterator[ConfigFinding]:
    """Find a quota that is too small for one node, or for all nodes.

    Args:
        cloud: aws, gcp or azure.
        quota: its name and size, as the start of a sentence.
        members: node types that count against it, each with the amount that one node uses.
        room: the amount that is free.
        reason: the cloud's error.
        ask: returns advice on how to request an amount.
    """
    small = [(t, each) for t, each in members if each > room]
    for t, each in small:
        path, name = machines.instance_path(cloud, t.path), machines.instance_type(cloud, t.config) or t.name
        why = f"No node of this type ever starts ({reason})."
        yield error("quota-too-small", path, f"{quota}, but one {name} needs {each:g}", why, ask(each * max(1, t.most)))
    most = most_used(members, most_workers(document))
    if not small and most > room:
        path, what = (*members[0][0].path, "max_workers"), f"{quota}, but the cluster may need {most:g}"
        why = "The cloud refuses nodes beyond the quota, whatever max_workers is; other clusters count too."
        yield warning("quota-too-small", path, what, why, f"{ask(most)} Or lower max_workers.")


def small_disk(path: Path, size: object, least: object, unit: str, image: str, cloud: str) -> Iterator[ConfigFinding]:
    """Find a disk that is smaller than the image on it."""
    if isinstance(size, int) and isinstance(least, int) and size < least:
        what = f"a disk of {size} {unit} for image {image}, which has {least} {unit}"
        fix = f"Write {least + 40} or more: TensorFlow with CUDA, logs and spilled objects need space too."
        yield refuses_nodes(cloud, "image-disk", path, what, fix)


def wrong_architecture(path: Path, image: str, built: str, machine: str, runs: str, cloud: str) -> ConfigFinding:
    """Return the finding that an image is built for another architecture than its machine runs."""
    what = f"image {image} is built for {built}, but {machine} runs {runs}"
    fix = f"Use an image for {runs.partition(',')[0]}, or a machine for {built}."
    return refuses_nodes(cloud, "image-architecture", path, what, fix)


def lacks_driver(document: Document, t: NodeType, about: str) -> bool:
    """Return whether an image (by its name and description) lacks NVIDIA's driver and no command installs it."""
    keys = ("initialization_commands", "setup_commands", "worker_setup_commands")
    texts = [command for _, command in document.commands(*keys)]
    texts += [str(t.config.get("UserData", "")), str(t.config.get("metadata"))]
    return not (DRIVER.search(about) or any(map(_INSTALLS_DRIVER.search, texts)))


def no_driver(path: Path, image: str, fix: str) -> ConfigFinding:
    """Return the finding that an image for a node with a GPU does not mention NVIDIA's driver."""
    what = f"image {image} does not mention NVIDIA's driver, but the node has a GPU"
    why = "Without the driver TensorFlow trains on the CPU, at the price of the GPU, or the job waits forever."
    return warning("image-no-driver", path, what, why, f"{fix}, or install the driver in setup_commands.")


def open_to_world(path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that everyone can reach ports of the nodes."""
    why = "Anyone who reaches the dashboard or the job server can run code with the cluster's rights."
    return error("open-to-world", path, what, why, fix)


def ssh_closed(path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that SSH cannot connect to the nodes."""
    why = "The node starts and costs money, but `ray up` waits for SSH until it gives up."
    return error("ssh-closed", path, what, why, fix)


def bucket_parts(storage: str) -> tuple[str, str, str] | None:
    """Return the scheme, bucket and prefix of a URI, or None for a folder."""
    scheme, mark, rest = storage.partition("://")
    if not mark or scheme not in _SCHEMES:
        return None
    bucket, _, prefix = rest.partition("?")[0].strip("/").partition("/")
    return ("gs" if scheme == "gcs" else scheme), bucket, prefix


def is_bucket(storage: str) -> bool:
    """Return whether a job keeps its runs in an object store, which can be checked from here."""
    return bucket_parts(storage) is not None


def check_bucket(storage: str, aws: AwsAccount | None = None) -> Iterator[ConfigFinding]:
    """Find a bucket that does not exist, is in another region, or cannot be written to.

    It writes, reads and deletes an object of a few bytes, `.raytf-check-...`. No other online check writes anything.

    Args:
        storage: the URI of --storage.
        aws: the cluster's account, to compare its region with the bucket's; None on other clouds.
    """
    location = bucket_parts(storage)
    assert location is not None
    scheme, bucket, _ = location
    own_endpoint = "endpoint_override" in urllib.parse.parse_qs(storage.partition("?")[2])
    yield from _probe_bucket(storage, f"{scheme}://{bucket}")
    if aws is not None and scheme == "s3" and not own_endpoint:
        yield from _compare_region(aws, bucket)


def _probe_bucket(storage: str, name: str) -> Iterator[ConfigFinding]:
    try:
        if name.startswith("s3:"):
            _write_to_s3(storage)
        else:
            _write(storage)
    except ConfigError as problem:
        yield no_answer("bucket", problem)
    except Exception as problem:
        kind = problem.kind if isinstance(problem, StorageError) else _TROUBLES.get(trouble(problem), "other")
        if kind == "missing":
            why = "The job fails at its first checkpoint; raytf creates no buckets."
            fix = "Create it, or correct --storage."
            yield error("bucket-missing", (), f"there is no bucket {name}", why, fix)
        elif kind == "denied":
            what = f"{name} cannot be written to from here: {one_line(problem, 200)}"
            why = "The nodes have their own rights, but `raytf show` and `raytf report` on this machine need yours."
            fix = "Add the rights of cluster-configs/iam/aws-worker-policy.json, or your cloud's, to your account."
            yield warning("bucket-denied", (), what, why, fix)
        else:
            yield no_answer("bucket", problem)


def _write_to_s3(storage: str) -> None:
    from raytf.storage.s3 import S3  # importing pyarrow takes a third of a second

    _, bucket, prefix = bucket_parts(storage) or ("", "", "")
    options = dict(urllib.parse.parse_qsl(storage.partition("?")[2]))
    # Not through raytf.storage.storage: pyarrow creates an object for the parent folder of an object that it deletes.
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


def _compare_region(aws: AwsAccount, bucket: str) -> Iterator[ConfigFinding]:
    try:
        answer = aws.client("s3").head_bucket(Bucket=bucket)
    except Exception:
        return  # `_probe_bucket` reports it
    region = answer.get("BucketRegion") or answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
    if region and region != aws.region:
        yield in_other_region(bucket, region, aws.region)


def in_other_region(bucket: str, place: str, region: str) -> ConfigFinding:
    """Return the finding that a bucket is not in the cluster's region."""
    what = f"bucket {bucket} is in {place}, but the cluster is in {region}"
    why = "Each checkpoint crosses regions: it is slower, and each GB costs money."
    fix = f"Use a bucket in {region}, or start the cluster in {place}."
    return warning("bucket-region", ("provider", "region"), what, why, fix)
