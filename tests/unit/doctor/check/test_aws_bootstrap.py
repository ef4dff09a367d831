"""The AWS config without fallbacks through Ray's own code, against moto's EC2 on the loopback: no cloud, no cluster."""

from pathlib import Path

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer

CONFIGS = Path(__file__).parents[4] / "cluster-configs"
REGION = "us-west-2"


@pytest.fixture
def ec2(tmp_path, monkeypatch):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("raytf-head", "raytf-worker"):
        boto3.client("iam", region_name=REGION).create_instance_profile(InstanceProfileName=name)
    yield boto3.client("ec2", region_name=REGION)
    server.stop()


def test_ray_starts_each_type_as_the_config_says(ec2):
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((CONFIGS / "aws-gpu-on-demand.yaml").read_text()))
    config = AWSNodeProvider.fillout_available_node_types_resources(config)
    validate_config(config)
    config = bootstrap_aws(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    seen = {}
    for name, kind in config["available_node_types"].items():
        tags = {"ray-node-kind": "worker", "ray-launch-config": "1", "ray-node-name": name, "ray-user-node-type": name}
        (made,) = provider.create_node(kind["node_config"], tags, 1)
        (reservation,) = ec2.describe_instances(InstanceIds=[made])["Reservations"]
        seen[name] = reservation["Instances"][0]
    assert {name: (i["InstanceType"], i.get("InstanceLifecycle")) for name, i in seen.items()} == {
        "head": ("m7i.large", None),
        "gpu_l4": ("g6.xlarge", None),
        "gpu_a10g": ("g5.xlarge", None),
    }
    for name, instance in seen.items():
        assert instance["IamInstanceProfile"]["Arn"].endswith("raytf-head" if name == "head" else "raytf-worker")
        assert {"Key": "project", "Value": "raytf"} in instance["Tags"]
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["raytf-aws-gpu-on-demand"]}])[
        "SecurityGroups"
    ]
    ports = {rule.get("FromPort") for rule in group["IpPermissions"] if rule["IpRanges"]}
    assert ports == {22}
