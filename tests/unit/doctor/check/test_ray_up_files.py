"""`raytf check` on files for `ray up` that other people wrote, and on files of other tools."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from raytf.doctor.check import azure, offline, versions
from raytf.doctor.finding import Severity
from raytf.doctor.local_environment import Surroundings

TEXT = """\
cluster_name: theirs
max_workers: 1
provider: {type: aws, region: us-west-2, cache_stopped_nodes: false}
auth: {ssh_user: ubuntu}
available_node_types:
  head: {resources: {CPU: 2}, node_config: {InstanceType: m7i.large, ImageId: ami-0123456789abcdef0}, max_workers: 1}
head_node_type: head
setup_commands: ['pip install "ray[default,train]==2.60.0"']
"""
MACHINE = {"InstanceType": "m7i.large", "ImageId": "ami-0123456789abcdef0"}


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    return Surroundings("3.11.7", "2.60.0", tmp_path, {"HOME": str(tmp_path)})


def findings(here: Surroundings, text: str = TEXT, **changes: object):
    value = yaml.safe_load(text) | changes
    value = {key: inner for key, inner in value.items() if inner != "absent"}
    return offline.check(yaml.safe_dump(value), here).findings


def test_the_file_that_the_others_change_has_no_findings(here):
    assert [f for f in findings(here) if f.code != "workers-without-profile"] == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"head_node": {}}, None),
        ({"head_node": MACHINE}, "ValidationError"),
        ({"head_node": MACHINE, "worker_nodes": MACHINE}, "ValidationError"),
        ({"head_node": MACHINE, "available_node_types": "absent"}, "KeyError: 'worker_nodes'"),
        ({"head_node": {}, "available_node_types": "absent"}, "KeyError: 'worker_nodes'"),
        ({"worker_nodes": MACHINE, "available_node_types": "absent"}, "KeyError: 'head_node'"),
        ({"head_node": MACHINE, "worker_nodes": {}, "available_node_types": "absent"}, "ValidationError"),
        ({"head_node": None, "worker_nodes": None, "available_node_types": "absent"}, "AttributeError"),
        ({"head_node": {}, "worker_nodes": {}, "available_node_types": "absent"}, None),
    ],
)
def test_legacy_keys_are_judged_as_ray_does(here, changes, error):
    from ray.autoscaler._private.util import prepare_config, validate_config

    if "available_node_types" in changes:
        changes = changes | {"head_node_type": "absent"}
    config = {key: inner for key, inner in (yaml.safe_load(TEXT) | changes).items() if inner != "absent"}
    raised = ""
    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except (KeyError, AttributeError, jsonschema.ValidationError) as problem:
        raised = f"{type(problem).__name__}: {problem}"
    legacy = [f for f in findings(here, **changes) if f.code == "legacy-key"]
    if error is None:
        assert (raised, legacy) == ("", [])
    else:
        (finding,) = legacy
        assert raised.startswith(error)
        assert error in finding.why
        assert finding.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("command", "setup_severity", "start_severity"),
    [
        ("ulimit -n 65536", "warning", "warning"),
        ("export A=1 B=2", "error", "warning"),
        ("cd ~/work", "error", "warning"),
        ("ulimit -n 65536; ray stop", None, None),
        ("cd ~/work && ls", None, None),
    ],
)
def test_a_setting_in_a_line_of_its_own_is_lost(here, command, setup_severity, start_severity):
    start = "ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml"
    for changes, severity in (
        ({"initialization_commands": [command]}, setup_severity),
        ({"head_start_ray_commands": ["ray stop", command, start]}, start_severity),
    ):
        lost = [f.severity.value for f in findings(here, **changes) if f.code == "lost-setting"]
        assert lost == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--redis-address=$RAY_HEAD_IP:6379", "Write --address, or delete it."),
        ("--address=$RAY_HEAD_IP:6379 --redis-port=1", "Write --port, or delete it."),
        ("--address=$RAY_HEAD_IP:6379 --xyzzy", "Delete it; `ray start --help` lists the flags."),
    ],
)
def test_an_unknown_flag_of_workers_is_one_finding(here, flag, fix):
    changes = {"worker_start_ray_commands": ["ray stop", f"ulimit -n 65536; ray start {flag}"]}
    (finding,) = [f for f in findings(here, **changes) if f.code in ("start-flag", "worker-start")]
    assert finding.fix == fix


def test_the_version_of_ray_is_reported_once_with_its_places(here):
    old = "pip install 'ray[default]==2.9.0'"
    changes = {"setup_commands": ["true", old], "head_setup_commands": [old], "worker_setup_commands": [old]}
    (finding,) = [f for f in findings(here, **changes) if f.code == "ray-version"]
    assert finding.path == ("setup_commands", 1)
    assert finding.fix == "Use 2.60.0 everywhere. Also in head_setup_commands[0], worker_setup_commands[0]."


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("sudo pip3 install ray", "ray-not-pinned"),
        ("pip install -U https://x.com/ray-wheels/latest/ray-3.0.0.dev0-cp311-cp311-linux.whl", "nightly-ray"),
    ],
)
def test_unpinned_and_nightly_are_judged_alike_wherever_they_are(here, command, code):
    for key in ("initialization_commands", "setup_commands", "worker_setup_commands"):
        (finding,) = [f for f in findings(here, **{key: [command]}) if f.code == code]
        assert finding.severity is Severity.WARNING
    in_container = {"docker": {"image": "mine:1", "container_name": "ray"}, "initialization_commands": [command]}
    assert [f for f in findings(here, **in_container) if f.code == code] == []


@pytest.mark.parametrize(
    ("image", "codes"),
    [
        ("rayproject/ray:nightly", [("warning", "image-latest")]),
        ("rayproject/ray:latest", [("warning", "image-latest")]),
        ("rayproject/ray:2.52.0-py311", [("error", "ray-version")]),
        ("rayproject/ray:2.52.0-py311-gpu", [("error", "ray-version")]),
        ("rayproject/ray:2.60.0-py311", [("error", "cpu-image-on-gpu")]),
        ("rayproject/ray:2.60.0-py311-aarch64", [("error", "cpu-image-on-gpu")]),
        ("rayproject/ray:2.60.0-py311-gpu", []),
        ("rayproject/ray:2.60.0-py311-gpu-aarch64", []),
    ],
)
def test_an_image_of_gpu_workers_gets_one_finding(here, image, codes):
    gpu = {"node_config": {**MACHINE, "InstanceType": "g6.xlarge"}, "resources": {"GPU": 1}, "max_workers": 1}
    changes = {
        "available_node_types": yaml.safe_load(TEXT)["available_node_types"] | {"gpu": gpu},
        "docker": {"image": image, "container_name": "ray"},
    }
    images = [f for f in findings(here, **changes) if f.path[:1] == ("docker",)]
    assert [(f.severity.value, f.code) for f in images] == codes
    assert all("-gpu" in f.fix for f in images)


@pytest.mark.parametrize(
    ("tag", "accelerator", "suffix"),
    [
        ("2.9.0", "", ""),
        ("2.9.0-py310-cpu", "", ""),
        ("2.9.0-py310", "gpu", "-gpu"),
        ("2.9.0-py310-cu121", "", "-gpu"),
        ("2.9.0-py310-tpu", "", "-tpu"),
        ("2.9.0-py310-aarch64", "", "-aarch64"),
        ("2.9.0-py310-gpu-aarch64", "", "-gpu-aarch64"),
    ],
)
def test_the_advised_image_is_for_the_same_hardware(here, tag, accelerator, suffix):
    assert versions.advised_image(tag, here, accelerator) == f"rayproject/ray:2.60.0-py311{suffix}"


@pytest.mark.parametrize(
    ("machine", "is_for_gpus"), [("m7i.large", False), ("g6.xlarge", True), ("g6f.large", True), ("z9.mega", True)]
)
def test_a_machine_without_gpus_is_advised_no_driver(here, machine, is_for_gpus):
    types = {"head": {"node_config": {"InstanceType": machine}}}
    (finding,) = [f for f in findings(here, available_node_types=types) if f.code == "old-default-image"]
    assert ("nvidia" in finding.fix) == is_for_gpus


@pytest.mark.parametrize(("machine", "is_for_gpus"), [("n1-standard-4", False), ("g2-standard-4", True)])
def test_google_heads_without_gpus_are_advised_no_driver(here, machine, is_for_gpus):
    disks = [{"boot": True, "initializeParams": {"sourceImage": "projects/a/global/images/ubuntu-1804-x"}}]
    types = {"head": {"node_config": {"machineType": machine, "disks": disks}}}
    provider = {"type": "gcp", "region": "us-west1", "availability_zone": "us-west1-a", "project_id": "a"}
    changes = {"provider": provider, "available_node_types": types}
    (finding,) = [f for f in findings(here, **changes) if f.code == "retired-image"]
    assert ("nvidia" in finding.fix) == is_for_gpus


def test_a_setting_with_quotes_is_quoted_for_the_shell(here):
    command = "export A='b'"
    (finding,) = [f for f in findings(here, setup_commands=[command]) if f.code == "lost-setting"]
    assert f"run echo {shlex.quote(command)} >> ~/.bashrc in" in finding.fix


AZURE = """\
cluster_name: theirs
provider: {type: azure, location: westus2, resource_group: mine, cache_stopped_nodes: false}
auth: {ssh_user: ubuntu}
available_node_types: {head: {resources: {CPU: 2}, node_config: {azure_arm_parameters: {vmSize: Standard_D2s_v3}}}}
head_node_type: head
"""


@pytest.mark.parametrize(("has_cli", "subscription", "count"), [(False, "", 1), (False, "1-2", 0), (True, "", 0)])
def test_azure_needs_a_subscription_or_its_command_line(here, monkeypatch, has_cli, subscription, count):
    monkeypatch.setattr(azure, "package_file", lambda package, name: Path("x") if has_cli else None)
    text = AZURE.replace("resource_group: mine", f"resource_group: mine, subscription_id: '{subscription}'")
    reported = [f for f in offline.check(text, here).findings if "subscription_id" in f.what]
    assert [f.code for f in reported] == ["azure-place"] * count


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("head_node_type: {name: h, instance_type: m5.large}\nworker_node_types: []\n", "Anyscale compute config"),
        ("head_node: {instance_type: m5.large}\nworker_nodes: []\n", "Anyscale compute config"),
        ("name: a\nentrypoint: python a.py\nimage_uri: anyscale/ray:2.9.0\n", "Anyscale job"),
        ("name: a\nimage_uri: anyscale/ray:2.9.0\napplications: [{import_path: a:b}]\n", "Anyscale service"),
        ("applications: [{name: a, import_path: a:b}]\n", "Ray Serve"),
        ("resources: {accelerators: A100:8}\nrun: python a.py\n", "SkyPilot"),
        ("AWSTemplateFormatVersion: 2010-09-09\nResources: {A: {Type: 'AWS::S3::Bucket', X: !Ref B}}\n", "CloudForm"),
        ("Resources:\n  A:\n    Type: AWS::S3::Bucket\n    BucketName: !Sub x\n", "CloudFormation"),
        ("services: {web: {image: nginx}}\n", "Docker Compose"),
        ("image: {repository: rayproject/ray, tag: 2.60.0}\nhead: {}\n", "values of a Helm chart"),
    ],
)
def test_a_file_of_another_tool_gets_one_sentence(here, text, name):
    (finding,) = offline.check(text, here).findings
    assert finding.code == "foreign-file"
    assert name in finding.what


@pytest.mark.parametrize(
    "text",
    [
        "provider: {type: aws}\nhead_node: {InstanceType: m5.large}\nworker_nodes: {}\n",
        "cluster_name: a\nrun: x\nresources: {}\n",
        "apiVersion: ray.io/v1\nkind: RayService\nservices: {a: {image: b}}\n",
        "max_workers: 2\nhead_node: {InstanceType: m5.large}\n",
        "[1, 2]\n",
    ],
)
def test_a_file_for_ray_is_not_of_another_tool(here, text):
    assert "foreign-file" not in {f.code for f in offline.check(text, here).findings}
