"""Records of MNIST's size in every form that benchmark 3 reads, on local disk and on an S3 server of one's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BATCH = 128
_BUCKET = "benchmark"
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("%s:%s" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
#: What every program needs to reach the server.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


def arrays(records: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [n, 28, 28, 1], with noise in the middle like digits, and labels int64 [n]."""
    rng = np.random.default_rng(0)
    images = np.zeros((records, 28, 28, 1), np.uint8)
    images[:, 8:20, 8:20] = rng.integers(0, 256, (records, 12, 12, 1), np.uint8)
    return images, rng.integers(0, 10, records)


def make(folder: Path, records: int) -> None:
    """Write x.npy, y.npy, and folders `parquet` and `tfrecord` as `raytf data convert` does, in four files or so."""
    from raytf.data import ArraySource
    from raytf.data.sources.writer import FileLayout, write
    from raytf.storage.storage import Storage

    images, labels = arrays(records)
    np.save(folder / "x.npy", images)
    np.save(folder / "y.npy", labels)
    source = ArraySource(images, labels)
    for to in ("parquet", "tfrecord"):
        layout = FileLayout.of(to, source.spec, records, records * 800 // 4, None)  # type: ignore[arg-type]
        write(Storage(str(folder / to)), source, layout, "benchmark")


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[str]:
    """Put the files of a folder on a server and give the URI of the folder there, which ends with its options."""
    import boto3

    os.environ.update(CREDENTIALS)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        client = boto3.client("s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1")
        client.create_bucket(Bucket=_BUCKET)
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".npy"):
            client.put_object(Bucket=_BUCKET, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())
        yield f"s3://{_BUCKET}/{{}}?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    finally:
        server.kill()
        server.wait()
