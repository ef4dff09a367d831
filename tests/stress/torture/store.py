"""An S3-protocol server (moto) behind a forwarder that fails a share of the requests, as a process of its own: it has
threads, and the torturer forks. Prints its endpoints; and, when standard input ends, what it has counted."""

from __future__ import annotations

import json
import sys

import boto3
from moto.server import ThreadedMotoServer

from raytf.testing import StorageProxy

BUCKET = "torture"

if __name__ == "__main__":
    share, seed, tries = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    with StorageProxy(f"{host}:{port}") as proxy:
        proxy.fail_share(share, seed, tries)
        print(json.dumps({"endpoint": proxy.endpoint, "direct": f"{host}:{port}"}), flush=True)
        sys.stdin.read()
        left = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        counts = {"requests": proxy.requests, "requests failed": proxy.failed, "uploads in parts left": len(left)}
        print(json.dumps(counts), flush=True)
    server.stop()
