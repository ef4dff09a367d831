"""`raytf check` online for AWS, against moto and what aws_front.py adds: each mistake is made there, and found."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ReadTimeoutError
from moto.backends import get_backend

from raytf.doctor.check import fallbacks, job_fit, offline
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, trouble
from raytf.doctor.document import parse
from raytf.doctor.finding import Severity
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import aws as probe_aws
from raytf.doctor.probe import aws_capacity, aws_network, online
from raytf.doctor.probe.queries import ProbeResults, all_nodes
from tests.support.aws_front import HEAD_SSM_IMAGE, REGION, SSM_IMAGE, Front

ROOT = Path(__file__).parents[4]
CONFIG = (ROOT / "cluster-configs/aws-gpu-spot.yaml").read_text()
ACCOUNT = "123456789012"
JOB = "python jobs/mnist.py --workers 1:8 --storage 's3://raytf-check/runs?endpoint_override={}&scheme=http&region=us-west-2'"
CALLER = ["ec2:*", "iam:*", "ssm:*", "s3:*"]


def image(front, name, architecture="x86_64"):
    """An image in moto, whose API drops the architecture and gives each a disk of 15 GiB."""
    made = front.client("ec2").register_image(Name=name, RootDeviceName="/dev/sda1")["ImageId"]
    get_backend("ec2")[ACCOUNT][REGION].amis[made].architecture = architecture
    return made


def policy(*actions):
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": "*"}]})


def as_docs_say(front):
    """An account that docs/clusters/aws.md was followed in, and a user who may do all."""
    iam, ec2 = front.client("iam"), front.client("ec2")
    for who in ("head", "worker"):
        name = f"raytf-{who}"
        trust = (ROOT / "cluster-configs/iam/aws-trust-policy.json").read_text()
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
        bucket = (ROOT / "cluster-configs/iam/aws-worker-policy.json").read_text().replace("BUCKET", "raytf-check")
        iam.put_role_policy(RoleName=name, PolicyName="bucket", PolicyDocument=bucket)
        iam.create_instance_profile(InstanceProfileName=name)
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    head = (ROOT / "cluster-configs/iam/aws-head-policy.json").read_text()
    iam.put_role_policy(RoleName="raytf-head", PolicyName="nodes", PolicyDocument=head)
    iam.create_role(RoleName="AWSServiceRoleForEC2Spot", AssumeRolePolicyDocument="{}")
    iam.create_user(UserName="me")
    iam.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=policy(*CALLER))
    iam.create_instance_profile(InstanceProfileName="empty")
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (table,) = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"]
    ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    name = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) 20260101"
    front.parameters[SSM_IMAGE] = image(front, name)
    front.parameters[HEAD_SSM_IMAGE] = image(front, "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-20260101")
    front.client("s3").create_bucket(Bucket="raytf-check", CreateBucketConfiguration={"LocationConstraint": REGION})
    return iam.create_access_key(UserName="me")["AccessKey"]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_ENDPOINT_URL"):
            environment.delenv(name, raising=False)
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        environment.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        environment.setenv("AWS_CONFIG_FILE", "/dev/null")
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        front = Front()
        try:
            key = as_docs_say(front)
            environment.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
            environment.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
            environment.setenv("AWS_ENDPOINT_URL", front.url)
            yield front
        finally:
            front.close()


@pytest.fixture
def front(server):
    quotas = dict(server.quotas)
    yield server
    server.quotas, server.denied = quotas, set()


@pytest.fixture
def here(tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    (tmp_path / ".ray" / "auth_token").chmod(0o600)
    return Surroundings("3.11.7", "2.60.0", ROOT, {"HOME": str(tmp_path), "PATH": os.environ["PATH"]})


def ask(text, here, front=None, storage=False):
    need = job_fit.parse(JOB.format("{}:{}".format(*front.behind))) if storage and front else None
    report = offline.check(text, here, need)
    return online.inspect(text, here, need, report)


@pytest.fixture(scope="module")
def aws(server):
    return AwsAccount(REGION)


def part(check, aws, text, *more):
    """One of the questions alone: a tenth of the time of all."""
    (document,), _ = parse(text)
    types = all_nodes(fallbacks.as_cloud(document))
    machines = [aws_capacity.Machines(aws, types)] if check in (aws_capacity.quotas, aws_capacity.check_images) else []
    return ProbeResults(list(check(aws, document, types, *machines, *more)))


def test_a_timeout_is_no_answer():
    assert trouble(ReadTimeoutError(endpoint_url="https://ec2")) is AwsTrouble.SILENT


def codes(seen):
    return {f.code for f in seen.findings if f.severity is not Severity.FILL_IN}


def edited(*pairs, text=CONFIG):
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return text


def the(seen, code):
    (found,) = [f for f in seen.findings if f.code == code]
    return found


def test_nothing_is_found_in_an_account_that_the_docs_were_followed_in(front, here):
    started = time.monotonic()
    front.calls.clear()
    seen = ask(CONFIG, here, front, storage=True)
    assert codes(seen) == set(), seen.findings
    assert time.monotonic() - started < 20
    notes = " ".join(sorted(seen.notes))
    assert f"AWS account {ACCOUNT} as arn:aws:iam::{ACCOUNT}:user/me" in notes
    assert "role raytf-head: bucket, nodes" in notes
    assert set(seen.spot) == {"gpu"}
    (may,) = json.loads((ROOT / "cluster-configs/iam/aws-check-policy.json").read_text())["Statement"]
    called = set(front.calls) - {"GetCallerIdentity"}  # for which nobody needs a right
    assert called <= {action.partition(":")[2] for action in may["Action"]}, "the policy is what looking takes"
    assert all(name.startswith(("Describe", "Get", "List", "Simulate")) for name in called)
    assert front.client("s3").list_objects_v2(Bucket="raytf-check").get("KeyCount") == 0, "the probe is still there"


ZONES = "us-west-2a,us-west-2b,us-west-2c"


@pytest.mark.parametrize(
    ("found", "edits"),
    [
        ({"instance-type-not-offered", "spot-not-offered", "no-subnet"}, [(ZONES, "us-west-2z")]),
        ({"instance-type-not-offered", "no-subnet"}, [(ZONES, "us-west-2a,us-west-2-lax-1a")]),
        (
            {"instance-profile-missing", "image-missing", "subnet-missing"},
            [
                ("Name: raytf-worker", "Name: raytf-workers"),
                (f"resolve:ssm:{SSM_IMAGE}", "ami-0123456789abcdef0"),
                ("{Name: raytf-head}", "{Name: raytf-head}\n      SubnetIds: [subnet-0123456789abcdef0]"),
            ],
        ),
        # The head's policy lets it read parameters of AWS's deep learning images alone.
        ({"image-missing", "right-missing"}, [(f"resolve:ssm:{SSM_IMAGE}", "resolve:ssm:/aws/service/nothing")]),
        (
            {"instance-profile-empty", "image-architecture", "image-root-device", "security-group-missing"},
            [
                ("{Name: raytf-head}", "{Name: raytf-head}\n      SecurityGroupIds: [sg-0123456789abcdef0]"),
                ("Name: raytf-worker", "Name: empty"),
                ("InstanceType: m7i.large", "InstanceType: m7g.large"),
                ("DeviceName: /dev/sda1", "DeviceName: /dev/xvda"),
            ],
        ),
        (
            {"image-disk", "max-price", "right-missing"},
            [
                ("VolumeSize: 120", "VolumeSize: 10"),  # moto gives every image 15
                ("MarketType: spot  # no", "MarketType: spot\n        SpotOptions: {MaxPrice: '0.000001'}  # no"),
                # The head's policy lets it start nodes of clusters named raytf-... alone.
                ("cluster_name: raytf-aws-gpu-spot", "cluster_name: mine"),
            ],
        ),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else "",
)
def test_mistakes_in_the_file_are_found(front, here, found, edits):
    seen = ask(edited(*(text for pair in edits for text in pair)), here)
    assert codes(seen) == found, seen.findings
    assert all(f.line for f in seen.findings)


def test_an_image_for_another_time(front, aws):
    bare = image(front, "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server")
    old = image(front, "Deep Learning AMI (Ubuntu 18.04) V71.0")
    assert codes(part(aws_capacity.check_images, aws, edited(f"resolve:ssm:{SSM_IMAGE}", bare))) == {"image-no-driver"}
    driver = "setup_commands:\n  - sudo apt-get install -y nvidia-driver-570-server\n"
    text = edited(f"resolve:ssm:{SSM_IMAGE}", bare, "\nsetup_commands:\n", f"\n{driver}")
    assert codes(part(aws_capacity.check_images, aws, text)) == set()
    assert codes(part(aws_capacity.check_images, aws, edited(f"resolve:ssm:{SSM_IMAGE}", old))) == {"image-old-driver"}


def test_a_machine_that_only_ec2_knows(front, here):
    """Its GPUs and vCPUs come from DescribeInstanceTypes, where the table has none of it."""
    text = edited("g5.xlarge", "inf2.xlarge")
    assert "gpu-count" in codes(ask(text, here))


def keyed(private, name="mine"):
    text = edited("ssh_user: ubuntu", f"ssh_user: ubuntu\n  ssh_private_key: {private}")
    return text.replace("      ImageId: resolve", f"      KeyName: {name}\n      ImageId: resolve")


def test_key_pairs(front, aws, here, tmp_path):
    ec2 = front.client("ec2")
    for name in ("own", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True, timeout=30)
        ec2.import_key_pair(KeyName=name, PublicKeyMaterial=(tmp_path / f"{name}.pub").read_bytes())
    assert codes(part(probe_aws.check_key_pair, aws, keyed(tmp_path / "own", "own"), here)) == set()
    assert codes(part(probe_aws.check_key_pair, aws, keyed(tmp_path / "own", "other"), here)) == {"key-pair-differs"}
    seen = part(probe_aws.check_key_pair, aws, keyed(tmp_path / "own", "nobodys"), here)
    assert codes(seen) == {"key-pair-missing"}
    assert "'nobodys' in us-west-2" in the(seen, "key-pair-missing").what


@pytest.mark.parametrize(
    ("quotas", "severity", "said"),
    [
        ({"L-3819A6DF": 0.0}, Severity.ERROR, "is 0 vCPUs, but one g6.xlarge needs 4"),
        ({"L-3819A6DF": 8.0}, Severity.WARNING, "is 8 vCPUs, but the cluster may need 32"),
        ({"L-DB2E81BA": 2.0}, Severity.ERROR, "Running On-Demand G and VT instances"),
        ({"L-1216C47A": 1.0}, Severity.ERROR, "one m7i.large needs 2"),
    ],
)
def test_quotas(front, aws, quotas, severity, said):
    front.quotas |= quotas
    found = [f for f in part(aws_capacity.quotas, aws, CONFIG).findings if f.code == "quota-too-small"]
    assert {f.severity for f in found} == {severity}
    assert said in found[0].what


@pytest.mark.parametrize(
    ("name", "market", "code"),
    [
        ("g6.xlarge", "spot", "L-3819A6DF"),
        ("g6.xlarge", "on-demand", "L-DB2E81BA"),
        ("m7i.large", "on-demand", "L-1216C47A"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("p5.48xlarge", "spot", "L-C4BD4855"),
        ("p5.48xlarge", "on-demand", "L-417A185B"),
        ("trn1.2xlarge", "on-demand", "L-2C3B7624"),
        ("u-6tb1.metal", "on-demand", None),
    ],
)
def test_which_quota_counts(name, market, code):
    found = aws_capacity.quota_of(name, market)
    assert (found[0] if found else None) == code


@pytest.fixture(scope="module")
def private(server):
    """A network without a way out."""
    ec2 = server.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", AvailabilityZone=f"{REGION}a")["Subnet"]["SubnetId"]
    return vpc, subnet


def everywhere(line):
    """A line in each node_config: the anchor has it, and the others merge it."""
    return edited("      InstanceType: m7i.large\n", f"      InstanceType: m7i.large\n      {line}\n")


def test_a_subnet_without_a_way_out(front, aws, private):
    _, subnet = private
    seen = part(aws_network.check, aws, everywhere(f"SubnetIds: [{subnet}]"))
    assert codes(seen) == {"subnet-unusable"}
    assert "no public address" in the_first(seen).what
    front.client("ec2").modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
    seen = part(aws_network.check, aws, everywhere(f"SubnetIds: [{subnet}]"))
    assert codes(seen) == {"no-internet-route"}
    inside = everywhere(f"SubnetIds: [{subnet}]").replace(
        "  region: us-west-2\n", "  region: us-west-2\n  use_internal_ips: true\n"
    )
    assert "NAT gateway" in the_first(part(aws_network.check, aws, inside)).what
    front.client("ec2").modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": False})


def the_first(seen):
    return seen.findings[0]


def group(front, *rules, itself=False):
    ec2 = front.client("ec2")
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    name = f"g{time.monotonic_ns()}"
    made = ec2.create_security_group(GroupName=name, Description="d", VpcId=vpc)["GroupId"]
    permissions = [
        {"IpProtocol": "tcp", "FromPort": low, "ToPort": high, "IpRanges": [{"CidrIp": cidr}]}
        for low, high, cidr in rules
    ]
    if itself:
        permissions.append({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made}]})
    if permissions:
        ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=permissions)
    return made, name


@pytest.mark.parametrize(
    ("rules", "itself", "found"),
    [
        ([(22, 22, "203.0.113.7/32")], True, set()),
        ([(22, 22, "0.0.0.0/0")], True, set()),
        ([(22, 22, "203.0.113.7/32")], False, {"nodes-cut-off"}),
        ([], True, {"ssh-closed"}),
        ([(22, 22, "0.0.0.0/0"), (8265, 8265, "0.0.0.0/0")], True, {"open-to-world"}),
        ([(0, 65535, "0.0.0.0/0")], True, {"open-to-world"}),
    ],
)
def test_security_groups(front, aws, rules, itself, found):
    made, _ = group(front, *rules, itself=itself)
    seen = part(aws_network.check, aws, everywhere(f"SecurityGroupIds: [{made}]"))
    assert codes(seen) == found, seen.findings


def test_networks_of_interfaces_and_templates(front, aws, private):
    """Ray takes subnets and groups from the interfaces, and from a template what it does not find."""
    made, _ = group(front, itself=True)
    _, subnet = private
    line = f"NetworkInterfaces: [{{DeviceIndex: 0, SubnetId: {subnet}, Groups: [{made}]}}]"
    seen = part(aws_network.check, aws, everywhere(line))
    assert codes(seen) == {"ssh-closed", "subnet-unusable"}, seen.findings
    assert all(f.path[-1] == "NetworkInterfaces" for f in seen.findings)
    template = edited(
        "us-west-2a,us-west-2b,us-west-2c", "us-west-2z", text=everywhere("LaunchTemplate: {LaunchTemplateName: x}")
    )
    assert "no-subnet" not in codes(part(aws_network.check, aws, template))


def test_a_group_that_was_left_by_another_cluster(front, aws):
    """Ray finds it by its name and adds rules only where it has none."""
    _, empty = group(front)
    assert codes(part(aws_network.check, aws, edited("GroupName: raytf-aws-gpu-spot", f"GroupName: {empty}"))) == set()
    _, closed = group(front, itself=True)
    assert codes(part(aws_network.check, aws, edited("GroupName: raytf-aws-gpu-spot", f"GroupName: {closed}"))) == {
        "ssh-closed"
    }
    _, wide = group(front, (22, 22, "0.0.0.0/0"), (6379, 6379, "0.0.0.0/0"), itself=True)
    seen = part(aws_network.check, aws, edited("GroupName: raytf-aws-gpu-spot", f"GroupName: {wide}"))
    assert "6379 (the head's tables)" in the(seen, "open-to-world").what


def test_rights_of_the_caller_and_of_the_nodes(front, here):
    iam = front.client("iam")
    iam.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=policy("ec2:Describe*", "ec2:RunInstances"))
    iam.delete_role_policy(RoleName="raytf-worker", PolicyName="bucket")
    try:
        seen = ask(CONFIG, here, front, storage=True)
    finally:
        iam.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=policy(*CALLER))
        text = (ROOT / "cluster-configs/iam/aws-worker-policy.json").read_text().replace("BUCKET", "raytf-check")
        iam.put_role_policy(RoleName="raytf-worker", PolicyName="bucket", PolicyDocument=text)
    said = " ".join(f.what for f in seen.findings if f.code == "right-missing")
    assert codes(seen) == {"right-missing"}
    for lack in ("iam:PassRole", "ec2:TerminateInstances", "ec2:CreateTags", "ec2:CreateKeyPair"):
        assert f"you (arn:aws:iam::{ACCOUNT}:user/me) may not {lack}" in said
    for lack in ("s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:DeleteObject"):
        assert f"(raytf-worker) may not {lack}" in said
    assert "the head (raytf-head)" not in said


def test_no_spot_role(front, here):
    front.client("iam").delete_role(RoleName="AWSServiceRoleForEC2Spot")
    try:
        assert codes(ask(CONFIG, here)) == {"spot-role-missing"}
    finally:
        front.client("iam").create_role(RoleName="AWSServiceRoleForEC2Spot", AssumeRolePolicyDocument="{}")


def test_a_bucket_that_is_not_there(front, here):
    need = job_fit.parse(JOB.format("{}:{}".format(*front.behind)).replace("raytf-check", "raytf-nowhere"))
    report = offline.check(CONFIG, here, need)
    seen = online.inspect(CONFIG, here, need, report)
    assert "bucket-missing" in codes(seen)


def test_a_bucket_that_is_far_away(front, here, monkeypatch):
    endpoint = "http://{}:{}".format(*front.behind)
    elsewhere = boto3.client("s3", region_name="eu-central-1", endpoint_url=endpoint)
    elsewhere.create_bucket(Bucket="raytf-far", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    for role in ("raytf-worker", "raytf-head"):
        text = (ROOT / "cluster-configs/iam/aws-worker-policy.json").read_text().replace("BUCKET", "raytf-far")
        front.client("iam").put_role_policy(RoleName=role, PolicyName="far", PolicyDocument=text)
    # No endpoint in the URI; AWS_ENDPOINT_URL leads to moto, which the front would do for other services too.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
    need = job_fit.parse("python j.py --storage s3://raytf-far/runs")
    seen = online.inspect(CONFIG, here, need, offline.check(CONFIG, here, need))
    assert codes(seen) == {"bucket-region"}
    assert "raytf-far is in eu-central-1, but the cluster is in us-west-2" in the_first(seen).what


def test_each_right_to_look_that_is_missing_is_one_warning(front, here):
    wanted = {
        "images": "ssm:GetParameter",
        "rights": "iam:SimulatePrincipalPolicy",
        "quotas": "servicequotas:GetServiceQuota",
        "spot prices": "ec2:DescribeSpotPriceHistory",
        "network": "ec2:DescribeRouteTables",
        "instance types": "ec2:DescribeInstanceTypeOfferings",
        "spot role": "iam:GetRole",
    }
    front.denied = {right.partition(":")[2] for right in wanted.values()}
    seen = ask(CONFIG, here)
    assert sorted(f.what for f in seen.findings) == sorted(
        f"{what}: not checked, since these credentials lack {right}" for what, right in wanted.items()
    )
    assert {(f.code, f.severity) for f in seen.findings} == {("no-right-to-look", Severity.WARNING)}


def test_without_credentials_one_warning(front, here, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    seen = ask(CONFIG, here)
    assert [f.code for f in seen.findings] == ["no-credentials"]
    assert "--offline" in the_first(seen).fix


def test_a_profile_that_there_is_not_and_settings_that_cannot_be_read(front, here, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert [f.code for f in ask(CONFIG, here).findings] == ["no-credentials"]
    monkeypatch.delenv("AWS_PROFILE")
    (tmp_path / "config").write_text("[default\nregion")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert [f.code for f in ask(CONFIG, here).findings] == ["no-credentials"]


def test_credentials_that_have_ended(front, here):
    front.denied = set()
    answer = front.answer

    def refuse(method, path, headers, body):
        if b"GetCallerIdentity" in body:
            said = "<Error><Type>Sender</Type><Code>ExpiredToken</Code><Message>it has expired</Message></Error>"
            return 403, {"Content-Type": "text/xml"}, f"<ErrorResponse>{said}</ErrorResponse>".encode()
        return answer(method, path, headers, body)

    front.answer = refuse
    try:
        seen = ask(CONFIG, here)
    finally:
        del front.answer
    assert [f.code for f in seen.findings] == ["credentials-refused"]


def test_an_endpoint_that_is_silent(front, here, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert codes(ask(CONFIG, here)) == {"no-answer"}


def test_a_file_that_is_not_filled_in_asks_nobody(front, here):
    front.calls.clear()
    seen = ask(edited("Name: raytf-worker", "Name: your-profile"), here)
    assert [(f.code, f.severity) for f in seen.findings] == [("not-asked-yet", Severity.FILL_IN)]
    assert front.calls == []


def test_the_command(front, here, tmp_path):
    """As a user calls it: exit codes, notes, the price of spot, JSON, and silence with --offline."""
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG.replace("--python 3.11.7", f"--python {platform.python_version()}"))  # else it warns
    environment = {**os.environ, "HOME": str(tmp_path)}

    def raytf(*args, **more):
        command = [sys.executable, "-c", "from raytf.commands.main import main; main()", "check", *args, str(file)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={**environment, **more}
        )

    done = raytf()
    assert done.returncode == 0, done.stdout
    assert f"AWS account {ACCOUNT}" in done.stdout
    assert "spot, now 0.0000" in done.stdout
    (row,) = json.loads(raytf("--json").stdout)
    assert set(row["cost"]["spot_now"]) == {"gpu"}
    assert any("arn:aws:iam" in note for note in row["notes"])
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    done = raytf(**nobody)
    assert done.returncode == 1
    assert "[no-credentials]" in done.stdout
    assert (raytf("--offline", **nobody).returncode, raytf("--offline", **nobody).stderr) == (0, "")
