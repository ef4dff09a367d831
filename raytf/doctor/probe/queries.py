"""Runs queries of a cloud at once, each with its own errors, within a limit of time; findings of all; the bucket."""

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

#: Ports of Ray, and what listens there.
RAY_PORTS = {8265: "the dashboard and the job server", 6379: "the head's tables", 10001: "Ray Client"}
#: For all queries about one file together.
LIMIT_SECONDS = 20.0
#: Words of an image's name that promise NVIDIA's driver.
DRIVER = re.compile(r"nvidia|cuda|gpu|deep ?learning|dlami", re.IGNORECASE)
_INSTALLS_DRIVER = re.compile(r"nvidia-driver|cuda-drivers|nvidia-headless|NVIDIA-Linux|ubuntu-drivers")
_TROUBLES = {AwsTrouble.MISSING: "missing", AwsTrouble.DENIED: "denied", AwsTrouble.REFUSED: "denied"}
_SCHEMES = ("s3", "gs", "gcs", "az")


@dataclass
class ProbeResults:
    """The answers of a cloud, of an API server or of hosts.

    Attributes:
        findings: mistakes.
        notes: whose credentials were used, which roles there are.
        spot: node type -> US dollars an hour that a spot node of it costs now.
    """

    findings: list[ConfigFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spot: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Query:
    """A query.

    Attributes:
        what: its subject, for `WHAT: not looked at`.
        ask: returns findings; may raise whatever its library raises.
    """

    what: str
    ask: Callable[[], Iterable[ConfigFinding]]


def run(
    queries: Sequence[Query], explain: Callable[[Query, Exception], ConfigFinding], seconds: float = LIMIT_SECONDS
) -> list[ConfigFinding]:
    """Run all queries at once, and report those that have no answer in time.

    Args:
        explain: turns an exception of a query into a finding.
        seconds: to wait for all of them.
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
        for finding in (answers[i] if i in answers else [no_answer(query.what, f"nothing came within {seconds:g} s")])
    ]


def all_nodes(document: Document) -> list[NodeType]:
    """Return the first choice of each node type, and its fallbacks as types of the same name."""
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
    """Return the finding that a query had no answer in time."""
    fix = "Check the network and the endpoint and try again, or pass --offline."
    return _unseen_warning("no-answer", f"{what}: not looked at, {one_line(problem, 200)}", fix)


def no_right(what: str, rights: str) -> ConfigFinding:
    """Return the finding that the credentials are good but lack the right to read."""
    fix = f"Ask for {rights}, which only reads, or pass --offline."
    return _unseen_warning("no-right-to-look", f"{what}: not looked at, since these credentials lack {rights}", fix)


def no_credentials(place: str, unseen: str, fix: str) -> ConfigFinding:
    """Return the finding that there are no credentials."""
    what = f"{place} was not asked: {unseen} were not looked at"
    return _unseen_warning("no-credentials", what, f"{fix}; or pass --offline.")


def _unseen_warning(code: str, what: str, fix: str) -> ConfigFinding:
    return warning(code, (), what, "Mistakes there show only after money is spent.", fix)


def refused(place: str, problem: object, fix: str, command: str = "ray up") -> ConfigFinding:
    """Return the finding that the credentials are there but are refused."""
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
    """Find a quota that has no room for a node, or not for all of them.

    Args:
        cloud: aws, gcp or azure.
        quota: its name and size, as the start of a sentence.
        members: node types that count on it, each with how much one node takes.
        room: how much is free.
        reason: the cloud's error.
        ask: how to get so much.
    """
    small = [(t, each) for t, each in members if each > room]
    for t, each in small:
        path, name = machines.instance_path(cloud, t.path), machines.instance_type(cloud, t.config) or t.name
        why = f"No node of this type ever starts ({reason})."
        yield error("quota-too-small", path, f"{quota}, and one {name} takes {each:g}", why, ask(each * max(1, t.most)))
    most = most_used(members, most_workers(document))
    if not small and most > room:
        path, what = (*members[0][0].path, "max_workers"), f"{quota}, and the cluster may want {most:g}"
        why = "Beyond the quota nodes are refused, whatever max_workers says; other clusters count too."
        yield warning("quota-too-small", path, what, why, f"{ask(most)} Or lower max_workers.")


def small_disk(path: Path, size: object, least: object, unit: str, image: str, cloud: str) -> Iterator[ConfigFinding]:
    """Find a disk that is smaller than the image on it."""
    if isinstance(size, int) and isinstance(least, int) and size < least:
        what = f"a disk of {size} {unit} for image {image}, which has {least} {unit}"
        fix = f"Write {least + 40} or more: TensorFlow with CUDA, logs and spilled objects need space too."
        yield refuses_nodes(cloud, "image-disk", path, what, fix)


def wrong_architecture(path: Path, image: str, built: str, machine: str, runs: str, cloud: str) -> ConfigFinding:
    """Return the finding that an image is built for another architecture than its machine runs."""
    what = f"image {image} is built for {built}, and {machine} runs {runs}"
    fix = f"Take an image for {runs.partition(',')[0]}, or a machine for {built}."
    return refuses_nodes(cloud, "image-architecture", path, what, fix)


def lacks_driver(document: Document, t: NodeType, about: str) -> bool:
    """Return whether neither an image, by its name and description, nor the set-up brings NVIDIA's driver."""
    keys = ("initialization_commands", "setup_commands", "worker_setup_commands")
    texts = [command for _, command in document.commands(*keys)]
    texts += [str(t.config.get("UserData", "")), str(t.config.get("metadata"))]
    return not (DRIVER.search(about) or any(map(_INSTALLS_DRIVER.search, texts)))


def no_driver(path: Path, image: str, fix: str) -> ConfigFinding:
    """Return the finding that an image for a node with a GPU does not promise NVIDIA's driver."""
    what = f"image {image} does not mention NVIDIA's driver, and the node has a GPU"
    why = "Without the driver TensorFlow trains on the CPU, at the price of the GPU, or the job waits forever."
    return warning("image-no-driver", path, what, why, f"{fix}, or install the driver in setup_commands.")


def open_to_world(path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that everybody reaches ports of the nodes."""
    why = "Anyone who reaches the dashboard or the job server can run code with the cluster's rights."
    return error("open-to-world", path, what, why, fix)


def ssh_closed(path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that SSH does not get in."""
    why = "The node comes up and costs money, and `ray up` waits for SSH until it gives up."
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

    An object of a few bytes, `.raytf-check-...`, is written, read and deleted again; nothing else in the online check
    writes anything.

    Args:
        storage: the URI of --storage.
        aws: the cluster's account and region, to compare the bucket's; None elsewhere.
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

    _, bucket, prefix = bucket_parts(storage) or ("", "", "")
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


def _compare_region(aws: AwsAccount, bucket: str) -> Iterator[ConfigFinding]:
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
