"""`raytf down-check`: its command, and what Ray's own code has made on moto's EC2 with its strict switches on.

Google Cloud, Azure, hosts and KubeRay are beside their online checks: test_online_gcp.py, _azure, _ssh, _kube.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer

from raytf.commands import down_check
from raytf.doctor.leftovers import report, resource
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError
from tests.support.aws_front import reset
from tests.unit.conftest import forget_clients

ROOT = Path(__file__).parents[3]
CONFIG = (ROOT / "cluster-configs/aws-gpu-spot.yaml").read_text()
REGION = "us-west-2"
NAME = "raytf-aws-gpu-spot"
HERE = Surroundings("3.11.7", "2.60.0", ROOT, {})


@pytest.fixture(scope="module")
def ec2(tmp_path_factory):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as environment:
        server.start()
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(tmp_path_factory.mktemp("home")),
            "MOTO_ENABLE_AMI_VALIDATION": "true",
            "MOTO_ENABLE_KEYPAIR_VALIDATION": "true",
            "MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true",
        }.items():
            environment.setenv(name, value)
        environment.delenv("AWS_PROFILE", raising=False)
        reset((host, port))
        for name in ("raytf-head", "raytf-worker"):
            boto3.client("iam", region_name=REGION).create_instance_profile(InstanceProfileName=name)
        yield boto3.client("ec2", region_name=REGION)
        reset((host, port))
        server.stop()


def look(text=CONFIG):
    return report.find("c.yaml", text, HERE)


def kinds(left):
    return sorted((t.kind, t.state) for t in left.resources)


def test_a_cluster_that_never_was(ec2):
    left = look(CONFIG.replace(f"cluster_name: {NAME}", "cluster_name: raytf-never"))
    assert [t for t in left.resources if not t.is_free] == []
    assert down_check.exit_code(left) == 0


@pytest.fixture(scope="module")
def cluster(ec2):
    """A head and a worker, made by Ray's node provider with Ray's tags."""
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config

    forget_clients()
    image = ec2.register_image(Name="driver", RootDeviceName="/dev/sda1")["ImageId"]
    text = CONFIG.replace(CONFIG.partition("ImageId: ")[2].partition("\n")[0], image)
    config = bootstrap_aws(AWSNodeProvider.fillout_available_node_types_resources(prepare_config(yaml.safe_load(text))))
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    made = {}
    for name in ("head", "gpu"):
        tags = {"ray-node-type": "head" if name == "head" else "worker", "ray-node-name": name}
        kind = config["available_node_types"][name]
        kind["node_config"].pop("fallback", None)  # which raytf's provider takes out
        (made[name],) = provider.create_node(kind["node_config"], {**tags, "ray-user-node-type": name}, 1)
    yield made
    forget_clients()


def test_a_cluster_that_runs(ec2, cluster):
    left = look()
    assert [(t.kind, t.state) for t in left.costly] == [("instance", "running")] * 2
    by_name = {t.name: t for t in left.resources}
    assert by_name[cluster["head"]].usd == pytest.approx(0.1008)
    assert by_name[cluster["gpu"]].note == "g6.xlarge, worker, spot: at most this"
    assert by_name[cluster["head"]].remove == (
        f"aws ec2 terminate-instances --instance-ids {cluster['head']} --region us-west-2"
    )
    free = {t.kind for t in left.resources if t.is_free}
    assert {"security group", "key pair"} <= free
    assert down_check.exit_code(left) == 1


def test_what_ray_down_may_leave(ec2, cluster):
    """A node that was stopped, a disk, an address and an open spot request; another cluster's things are not ours."""
    ec2.stop_instances(InstanceIds=[cluster["head"]])
    ec2.terminate_instances(InstanceIds=[cluster["gpu"]])
    tag = {"Key": "ray-cluster-name", "Value": NAME}

    def volume(*tags):
        specification = [{"ResourceType": "volume", "Tags": list(tags)}]
        return ec2.create_volume(
            AvailabilityZone=f"{REGION}a", Size=120, VolumeType="gp3", TagSpecifications=specification
        )["VolumeId"]

    loose, of_the_config = volume(tag), volume({"Key": "project", "Value": "raytf"})
    volume({"Key": "ray-cluster-name", "Value": "other"})
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": [tag]}])[
        "AllocationId"
    ]
    (group,) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [NAME]}])["SecurityGroups"]
    image = ec2.describe_instances(InstanceIds=[cluster["head"]])["Reservations"][0]["Instances"][0]["ImageId"]
    launch = {"ImageId": image, "InstanceType": "g6.xlarge", "SecurityGroups": [group["GroupName"]]}
    ec2.request_spot_instances(InstanceCount=1, LaunchSpecification=launch)
    left = look()
    by_name = {t.name: t for t in left.resources}
    assert by_name[cluster["head"]].note == "m7i.large, head; its disks cost money"
    assert cluster["gpu"] not in by_name
    assert by_name[loose].usd == pytest.approx(120 * 0.08 / 730, abs=1e-5)
    assert "tag project=raytf, which other clusters may have too" in by_name[of_the_config].note
    assert by_name[address].usd == 0.005
    assert [t.kind for t in left.costly].count("volume") >= 3, "that of the stopped head too"
    (request,) = [t for t in left.resources if t.kind == "spot request"]  # moto grants it at once
    assert (request.state, request.usd) == ("active", pytest.approx(0.8048))
    assert down_check.exit_code(left) == 1


def test_the_commands_that_it_prints_leave_nothing(ec2, cluster):
    """Each is run as it stands, by a client that takes the place of `aws`: nothing that costs money is left then."""
    for _ in range(3):  # a disk goes only after its instance
        for thing in look().costly:
            run(ec2, thing.remove)
    left = look()
    assert left.costly == []
    assert (down_check.exit_code(left), down_check.exit_code(left, everything=True)) == (0, 1)


def run(ec2, command):
    """`aws ec2 VERB --option value ...` as a call of boto3."""
    words = command.split()
    assert words[:2] == ["aws", "ec2"]
    assert words[-2:] == ["--region", REGION]
    verb, (option, value) = words[2].replace("-", "_"), words[3:5]
    name = "".join(part.capitalize() for part in option.removeprefix("--").split("-"))
    # What went with its instance, or goes only after it, is no mistake of the command.
    with suppress(ec2.exceptions.ClientError):
        getattr(ec2, verb)(**{name: [value] if name.endswith("Ids") else value})


def raytf(*args, **more):
    return subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", "down-check", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **more},
    )


def test_the_command(ec2, tmp_path):
    tags = [{"Key": "ray-cluster-name", "Value": NAME}]
    made = ec2.create_volume(
        AvailabilityZone=f"{REGION}a",
        Size=100,
        VolumeType="gp3",
        TagSpecifications=[{"ResourceType": "volume", "Tags": tags}],
    )["VolumeId"]
    file = ROOT / "cluster-configs/aws-gpu-spot.yaml"
    done = raytf(file)
    assert done.returncode == 1, done.stderr
    assert f"aws ec2 delete-volume --volume-id {made} --region us-west-2" in done.stdout
    assert "1 left, 0.0110 USD an hour, 8.00 a month (list prices of 2026-07)" in done.stdout
    (row,) = json.loads(raytf("--json", file).stdout)
    assert (row["usd_per_month"], row["unseen"]) == (8.0, [])
    assert [t["name"] for t in row["left"] if t["usd"]] == [made]
    ec2.delete_volume(VolumeId=made)
    done = raytf(file)
    assert (done.returncode, "nothing is left that costs money" in done.stdout) == (0, True)
    assert raytf(file, AWS_ENDPOINT_URL="http://127.0.0.1:1").returncode == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not the YAML of a cluster"),
        ("provider: {type: vsphere}", "provider 'vsphere'"),
        ("provider: {type: aws}", "no provider.region"),
        ("provider: {type: gcp, project_id: your-project, availability_zone: z}", "is not filled in"),
        ("provider: {type: gcp}", "no provider.project_id"),
        ("provider: {type: azure}", "no provider.resource_group"),
        ("provider: {type: local}", "no provider.head_ip"),
        ("provider: {type: aws, region: us-west-2}", "no credentials for AWS"),
        ("provider: {type: azure, resource_group: r}", "no credentials for Azure"),
        ("provider: {type: gcp, project_id: p, availability_zone: z}", "no credentials for Google Cloud"),
        ("{apiVersion: ray.io/v1, kind: RayCluster, metadata: {name: x}}", "no kubectl with a context"),
    ],
)
def test_what_it_refuses(tmp_path, monkeypatch, text, said):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    here = Surroundings("3.11.7", "2.60.0", tmp_path, {"HOME": str(tmp_path), "PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match=said):
        report.find("c.yaml", text, here)


def test_one_of_several_files_that_cannot_be_looked_for_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("provider: {type: aws}\n")
    (tmp_path / "b.yaml").write_text("provider: {type: vsphere}\n")
    (tmp_path / "c.yaml").write_bytes(b"\x80")
    done = raytf(tmp_path)
    assert done.returncode == 2
    for name, said in (("a", "no provider.region"), ("b", "provider 'vsphere'"), ("c", "cannot be read")):
        assert f"{tmp_path}/{name}.yaml: nowhere" in done.stdout
        assert said in done.stdout


def test_no_file_and_no_such_file():
    assert "No file given" in raytf().stderr
    done = raytf("/no/such.yaml")
    assert (done.returncode, "cannot be read" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("found", "unseen", "everything", "code"),
    [
        ([], [], False, 0),
        ([0.0], [], False, 0),
        ([0.0], [], True, 1),
        ([None], [], False, 1),
        ([0.1], [], False, 1),
        ([0.1], ["disks: no"], False, 2),
        ([], ["disks: no"], False, 2),
    ],
)
def test_exit_codes(found, unseen, everything, code):
    left = resource.Leftovers([resource.LeftResource("x", "n", "s", usd, "rm") for usd in found], unseen)
    assert down_check.exit_code(left, everything) == code
