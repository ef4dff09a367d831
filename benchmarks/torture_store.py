"""An S3-protocol server (moto) behind a forwarder that fails a share of the requests, as a process of its own: it has
threads, and the torturer forks. Prints its endpoint; when standard input ends, how many requests there were; and ends."""

from __future__ import annotations

import json
import sys

import boto3
from moto.server import ThreadedMotoServer

from raytf.testing import StorageProxy

BUCKET = "torture"

if __name__ == "__main__":
    share, seed = float(sys.argv[1]), int(sys.argv[2])
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=BUCKET)
    with StorageProxy(f"{host}:{port}") as proxy:
        # As often as pyarrow's client tries by itself: what fails less often, raytf does not see.
        proxy.fail_share(share, seed, tries=3)
        print(json.dumps({"endpoint": proxy.endpoint}), flush=True)
        sys.stdin.read()
        print(json.dumps({"requests": proxy.requests, "failed": proxy.failed}), flush=True)
    server.stop()
