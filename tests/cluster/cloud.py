"""A stand-in for AWS's control plane: moto with its strict switches on, and capacity that runs out on demand.

    with Cloud() as cloud:
        cloud.empty([{"type": "g6.xlarge", "market": "spot", "code": "InsufficientInstanceCapacity"}])
        cloud.client("ec2")
        cloud.calls()

It runs in a process of its own, since moto reads its switches when it is imported. What moto lacks and EC2 has is added
in front of it: RunInstances that fails for want of capacity, that gives fewer than asked for, that knows a call by its
ClientToken, and that resolves `resolve:ssm:`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

from raytf.testing import processes

REGION = "us-west-2"
ACCOUNT = "123456789012"
_SWITCHES = {
    "MOTO_ENABLE_AMI_VALIDATION": "true",
    "MOTO_ENABLE_KEYPAIR_VALIDATION": "true",
    "MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true",
    "MOTO_IAM_LOAD_MANAGED_POLICIES": "true",
}
#: The public parameters that the configs name, for workers and heads; EC2 looks them up at each RunInstances.
IMAGE_PARAMETERS = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id",
    "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id",
)
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}


class Cloud:
    """AWS as far as Ray needs it; a context manager.

    Args:
        address: to listen at.
        log: file for what it says.

    Attributes:
        url: its endpoint, from entry on.
        env: what a process needs to use it instead of AWS.
    """

    def __init__(self, address: str = "127.0.0.1", log: Path = Path(os.devnull)):
        self._address, self._log = address, log
        self._clients: dict[str, Any] = {}
        # A cloudlet asks beside the test, and boto3 may not make clients in two threads at once.
        self._making = threading.Lock()
        self.url = ""

    def __enter__(self) -> Cloud:
        read, write = os.pipe()
        with self._log.open("w") as log, os.fdopen(read) as ready:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.cloud", self._address, str(write)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **_SWITCHES, **CREDENTIALS},
                pass_fds=[write],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            os.close(write)
            self._session = processes.Session(self._process.pid)
            processes.watch(self._session)
            port = ready.readline()
        if not port:
            self.close()
            raise RuntimeError("the cloud did not start")
        self.url = f"http://{self._address}:{int(port)}"
        self.env = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "AWS_EC2_METADATA_DISABLED": "true"}
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """End it; may be called again."""
        self._session.end()
        self._process.wait(30)
        processes.forget(self._session)

    def client(self, service: str) -> Any:
        """A client of boto3; one for each service, since to make one takes longer than to ask it."""
        import boto3

        with self._making:
            if service not in self._clients:
                self._clients[service] = boto3.client(
                    service,
                    region_name=REGION,
                    endpoint_url=self.url,
                    aws_access_key_id="test",
                    aws_secret_access_key="test",
                )
            return self._clients[service]

    def empty(self, rules: list[dict[str, Any]]) -> None:
        """What is empty from now on.

        Args:
            rules: mappings of `type`, `market` (spot, on-demand) and `zone`, each of which may be left out, and `code`;
                `most` instead of `code` for how many EC2 gives at once.
        """
        self._ask("PUT", json.dumps(rules).encode())

    def calls(self) -> list[dict[str, Any]]:
        """All calls of RunInstances: time, client, type, market, zone, wanted, and given ids or an error's code."""
        return [call for call in json.loads(self._ask("GET")) if "ended" not in call]

    def terminations(self) -> list[dict[str, Any]]:
        """All calls of TerminateInstances: time, client, and ended ids."""
        return [call for call in json.loads(self._ask("GET")) if "ended" in call]

    def instances(self, *states: str) -> list[dict[str, Any]]:
        """Instances as DescribeInstances has them, with their tags as a mapping; of the given states, or all."""
        pages = self.client("ec2").describe_instances()["Reservations"]
        found = [instance for reservation in pages for instance in reservation["Instances"]]
        for instance in found:
            instance["Tags"] = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        return [instance for instance in found if not states or instance["State"]["Name"] in states]

    def account(self, buckets: Iterable[str] = ()) -> None:
        """What docs/clusters/aws.md has its reader make once: the instance profiles and the bucket."""
        iam, s3 = self.client("iam"), self.client("s3")
        trust = json.dumps({"Version": "2012-10-17", "Statement": []})
        for name in ("raytf-head", "raytf-worker"):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
            iam.create_instance_profile(InstanceProfileName=name)
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        for bucket in buckets:
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})

    def network(self, subnets: dict[str, str], cidr: str) -> None:
        """Give the account this network in place of its default one.

        Args:
            subnets: zone -> addresses.
            cidr: addresses of all.
        """
        ec2 = self.client("ec2")
        for subnet in ec2.describe_subnets()["Subnets"]:
            ec2.delete_subnet(SubnetId=subnet["SubnetId"])
        vpc = ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
        for zone, addresses in subnets.items():
            ec2.create_subnet(VpcId=vpc, CidrBlock=addresses, AvailabilityZone=zone)

    def _ask(self, method: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}/_cloud", body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


class _Front:
    """What EC2 does and moto does not; a WSGI application around moto's."""

    def __init__(self, moto: Callable[..., Iterable[bytes]]):
        self._moto = moto
        self._rules: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._answers: dict[str, bytes] = {}
        # Moto's EC2 is no more thread-safe than its dictionaries.
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_cloud":
            return self._control(environ, start)
        if "x-www-form-urlencoded" not in environ.get("CONTENT_TYPE", ""):
            return self._moto(environ, start)  # not EC2; S3's bodies may be of a length that nobody says before
        body = _body(environ)
        if b"Action=RunInstances&" in body or body.endswith(b"Action=RunInstances"):
            with self._lock:
                return self._run(body, environ, start)
        if b"Action=TerminateInstances" in body:
            ended = [value[0] for key, value in parse_qs(body.decode()).items() if key.startswith("InstanceId.")]
            self._calls.append({"time": time.time(), "client": environ["REMOTE_ADDR"], "ended": ended})
        return self._moto(environ, start)

    def _control(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            self._rules = json.loads(_body(environ))
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(self._calls).encode()]

    def _run(self, body: bytes, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        asked = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        token = asked.get("ClientToken", "")
        if token in self._answers:
            start("200 OK", [("Content-Type", "text/xml")])
            return [self._answers[token]]
        call = {
            "time": time.time(),
            "client": environ["REMOTE_ADDR"],
            "type": asked.get("InstanceType"),
            "market": asked.get("InstanceMarketOptions.MarketType", "on-demand"),
            "zone": self._zone(asked),
            "wanted": int(asked["MaxCount"]),
            "token": token,
        }
        self._calls.append(call)
        rule = next((rule for rule in self._rules if _concerns(rule, call)), {})
        if "code" in rule:
            call["error"] = rule["code"]
            status = "500 Internal Server Error" if rule["code"].startswith("Insufficient") else "400 Bad Request"
            start(status, [("Content-Type", "text/xml")])
            return [_error(rule["code"], "There is no such capacity for your request.")]
        if "most" in rule:
            asked["MaxCount"] = str(min(call["wanted"], rule["most"]))
        asked["MinCount"] = asked["MaxCount"]  # moto gives as few as it may, EC2 as many as it has
        image = asked.get("ImageId", "")
        if image.startswith("resolve:ssm:"):
            if image.removeprefix("resolve:ssm:") not in IMAGE_PARAMETERS:
                start("400 Bad Request", [("Content-Type", "text/xml")])
                return [_error("InvalidParameterValue", f"{image} was not found")]
            asked["ImageId"] = _image()
        changed = urlencode(asked).encode()
        environ |= {"wsgi.input": io.BytesIO(changed), "CONTENT_LENGTH": str(len(changed))}
        answer = b"".join(self._moto(environ, start))
        call["ids"] = re.findall(r"<instanceId>(i-\w+)</instanceId>", answer.decode())
        if call["ids"]:
            self._answers[token] = answer
        return [answer]

    def _zone(self, asked: dict[str, str]) -> str:
        from moto.ec2 import ec2_backends

        subnet = asked.get("SubnetId") or asked.get("NetworkInterface.1.SubnetId", "")
        backend = ec2_backends[ACCOUNT][REGION]
        return str(backend.get_subnet(subnet).availability_zone) if subnet else ""


def _concerns(rule: dict[str, Any], call: dict[str, Any]) -> bool:
    return all(rule.get(key, call[key]) == call[key] for key in ("type", "market", "zone"))


def _image() -> str:
    """An image that moto knows, of the size and the device names of Ubuntu's."""
    from moto.ec2 import ec2_backends

    images = ec2_backends[ACCOUNT][REGION].describe_images()
    return str(next(image.id for image in images if "ubuntu" in image.name and image.architecture == "x86_64"))


def _body(environ: dict[str, Any]) -> bytes:
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _error(code: str, message: str) -> bytes:
    return (
        f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
        "<RequestID>7a62c49f-347e-4fc4-9331-6e8eEXAMPLE</RequestID></Response>"
    ).encode()


@contextlib.contextmanager
def _serving(address: str) -> Iterator[int]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    front = _Front(DomainDispatcherApplication(create_backend_app))
    server = make_server(address, 0, front, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()


def main() -> None:
    """Serve until SIGTERM."""
    with _serving(sys.argv[1]) as port, os.fdopen(int(sys.argv[2]), "w") as ready:
        ready.write(f"{port}\n")
        ready.flush()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
