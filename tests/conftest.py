"""Fixtures for all tests: an S3 server of one's own, and MNIST where a copy lies beside the repository."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from raytf.testing import Job, environment

# A job is a dozen processes, each of which would compile raytf again: an eighth of its CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A loaded machine is no reason to fail.
settings.register_profile("raytf", deadline=None)
settings.load_profile("raytf")

ROOT = Path(__file__).parents[1]
#: Tests here start Ray.
WITH_RAY = (ROOT / "tests" / "cluster", ROOT / "tests" / "ray")
#: Tests here wait for most of their time.
WAITING = [
    ROOT / "tests" / "unit" / name for name in ("runs/test_lease.py", "storage/test_azure.py", "storage/test_claims.py")
]
#: Waits for as long as test_aws.py, beside which it would leave both cores idle.
LATER = ROOT / "tests" / "cluster" / "test_local.py"
#: Tests here take longest of those without Ray: begun last, one would leave a core idle.
LONG = [
    ROOT / "tests" / "tf" / f"test_{name}.py" for name in ("step", "server_step", "overlap", "replicas", "wire_ranks")
]
MNIST = ROOT.parent / "shared" / "data" / "mnist"


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m`, leave out what takes long, and without a path what the gate adds. xdist hands the expression on."""
    if not config.option.markexpr:
        has_path = config.args_source != pytest.Config.ArgsSource.TESTPATHS
        config.option.markexpr = "not slow and not jobs" + ("" if has_path else " and not gate")


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not in what was imported: tests that trace graphs take a tenth less time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whole jobs and clusters are the gate's, but for those that show in minutes that raytf works."""
    if any(item.path.is_relative_to(folder) for folder in WITH_RAY) and item.get_closest_marker("core") is None:
        item.add_marker("gate")


@pytest.hookimpl(trylast=True)  # of the tests that are left when markers have been looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray come first; beside the others, which hardly use the machine, a run is left undisturbed.

    Of the others, those that wait come first, as at the end there would be no work beside them, and then the longest.
    """
    with_ray = [item for item in items if any(item.path.is_relative_to(folder) for folder in WITH_RAY)]
    files = list(dict.fromkeys(item.path for item in with_ray))
    with_ray.sort(key=lambda item: len(files) / 2 if item.path == LATER else files.index(item.path))
    samples = [item for item in with_ray if "undisturbed" in getattr(item, "fixturenames", ())]
    others = [item for item in items if item not in with_ray]
    others.sort(key=lambda item: (item.path not in WAITING, item.path not in LONG))
    if samples:
        for item in others:
            item.fixturenames.insert(0, "undisturbed")
    items[:] = [*(item for item in with_ray if item not in samples), *others, *samples]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Five minutes of training without faults, in the background; its output says how that went."""
    command = [sys.executable, "-m", "tests.stress.undisturbed", "--minutes", "5"]
    with Job(command, tmp_path_factory.mktemp("undisturbed") / "log", environment(), folder=ROOT) as job:
        yield job


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """HOST:PORT of an S3 server in this process; credentials for it are in the environment."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        environment.delenv("AWS_ENDPOINT_URL", raising=False)
        environment.delenv("AWS_PROFILE", raising=False)
        server.start()
        try:
            server._server.app = _atomic(server._server.app)
            host, port = server.get_host_and_port()
            yield f"{host}:{port}"
        finally:
            server.stop()


def _atomic(app: Callable[..., Any]) -> Callable[..., Any]:
    """moto looks first and writes then, so that of several conditional writes at once several win; Amazon's has one."""
    lock = threading.Lock()

    def call(environ: dict[str, Any], start_response: Any) -> Any:
        is_conditional = "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ
        with lock if is_conditional else contextlib.nullcontext():
            return app(environ, start_response)

    return call


@pytest.fixture
def s3(s3_endpoint: str) -> Callable[..., str]:
    """Builds URIs: `s3("runs")` lies in a bucket of this test, `s3("runs", bucket="b")` in another one."""
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://{s3_endpoint}", region_name="us-east-1")
    own = f"raytf-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=own)

    def uri(prefix: str = "", bucket: str = own) -> str:
        path = f"{bucket}/{prefix}".rstrip("/")
        return f"s3://{path}?endpoint_override={s3_endpoint}&scheme=http&region=us-east-1"

    return uri


@pytest.fixture(scope="session")
def gcs_endpoint() -> Iterator[str]:
    """HOST:PORT of a GCS server with a bucket named `raytf`; it needs no credentials."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = Path(sys.executable).with_name("gcp-storage-emulator")
    options = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=raytf"]
    server = subprocess.Popen([command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(server, port, "the GCS server")
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(30)


@pytest.fixture
def gcs(gcs_endpoint: str) -> str:
    """URI of a folder of this test's own on GCS."""
    return f"gs://raytf/{uuid.uuid4().hex[:12]}?endpoint_override={gcs_endpoint}&scheme=http&anonymous=true"


#: Of the account that Azurite has for everybody to know.
_AZURITE_ACCOUNT = "devstoreaccount1"
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of Azurite with a container named `raytf`; credentials for it are in the environment.

    Skipped where Azurite is neither on the path (or named by AZURITE) nor can be installed by npm.
    """
    from azure.storage.blob import BlobServiceClient

    program = os.environ.get("AZURITE") or shutil.which("azurite-blob") or _install_azurite(tmp_path_factory)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--blobHost=127.0.0.1", f"--blobPort={port}", "--inMemoryPersistence", "--silent"]
    command = [program, *options, "--skipApiVersionCheck", "--disableTelemetry"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AZURE_STORAGE_ACCOUNT", _AZURITE_ACCOUNT)
        environment.setenv("AZURE_STORAGE_KEY", _AZURITE_KEY)
        environment.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
        try:
            _wait_for(server, port, "Azurite")
            credential = {"account_name": _AZURITE_ACCOUNT, "account_key": _AZURITE_KEY}
            client = BlobServiceClient(f"http://127.0.0.1:{port}/{_AZURITE_ACCOUNT}", credential=credential)
            client.create_container("raytf")
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait(30)


def _install_azurite(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Azurite needs npm")
    folder = tmp_path_factory.mktemp("azurite")
    install = [npm, "install", "--no-fund", "--no-audit", "--prefix", str(folder), "azurite@3"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot install Azurite: {done.stderr[-200:]}")
    return str(folder / "node_modules" / ".bin" / "azurite-blob")


def _wait_for(server: subprocess.Popen[bytes], port: int, name: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, f"{name} ended"
            assert time.monotonic() < deadline, f"{name} did not come up"
            time.sleep(0.1)


@pytest.fixture
def azure(azure_endpoint: str) -> str:
    """URI of a folder of this test's own on Azure."""
    return f"az://raytf/{uuid.uuid4().hex[:12]}?endpoint_override={azure_endpoint}&scheme=http"


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """The folder with MNIST's IDX files."""
    if not (MNIST / "train-images-idx3-ubyte.gz").exists():
        pytest.skip(f"no copy of MNIST in {MNIST}")
    return MNIST
