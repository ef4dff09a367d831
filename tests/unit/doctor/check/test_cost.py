"""Tests of a cluster's estimated cost: machines, disks, addresses, and what is unknown."""

from __future__ import annotations

import pytest

from raytf.commands.check import _print_cost
from raytf.doctor import disks, machines
from raytf.doctor.check import cost
from raytf.doctor.document import parse

_ROOT = "/dev/sda1"
_AWS = """\
max_workers: 2
provider: {type: aws, region: us-east-1, use_internal_ips: true}
available_node_types:
  head: {node_config: {InstanceType: m7i.large, BlockDeviceMappings: [{DeviceName: /dev/sda1, Ebs: {VolumeSize: 100}}]}}
  gpu: {max_workers: 2, node_config: {InstanceType: GPU, BlockDeviceMappings: DISKS}}
head_node_type: head
"""
_DISKS = "[{DeviceName: /dev/sda1, Ebs: {VolumeSize: 73, VolumeType: gp3}}]"


def _ebs(name=_ROOT, **ebs):
    return {"DeviceName": name, "Ebs": ebs}


def _persistent(**first):
    return {"boot": True, "initializeParams": first}


@pytest.mark.parametrize(
    ("cloud", "config", "month"),
    [
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeSize=100, VolumeType="gp3")]}, 8),
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeSize=100)]}, 10),
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeSize=100, VolumeType="gp3", Iops=4000, Throughput=130)]}, 13.2),
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeSize=30, VolumeType="io2", Iops=300)]}, 23.25),
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeSize=100), _ebs("/dev/sdf", VolumeSize=50)]}, 15),
        ("aws", {"BlockDeviceMappings": [_ebs("/dev/sdf", VolumeSize=50)]}, None),
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeType="gp3")]}, None),
        ("aws", {"BlockDeviceMappings": [_ebs(VolumeSize=100, VolumeType="gp9")]}, None),
        ("aws", {}, None),
        ("gcp", {"disks": [_persistent(diskSizeGb=50)]}, 2),
        ("gcp", {"disks": [_persistent(diskSizeGb="50", diskType="zones/us-central1-a/diskTypes/pd-ssd")]}, 8.5),
        ("gcp", {"disks": [_persistent(diskSizeGb=50), _persistent(diskType="local-ssd")]}, 32),
        ("gcp", {"disks": [_persistent(diskType="pd-balanced")]}, None),
        ("gcp", {"machineType": "n1-standard-4", "disks": [_persistent(diskSizeGb=50, diskType=None)]}, 2),
        ("gcp", {"machineType": "zones/a/machineTypes/c3-standard-4", "disks": [_persistent(diskSizeGb=50)]}, 5),
        ("gcp", {"machineType": "n4-standard-4", "disks": [_persistent(diskSizeGb=50)]}, 4),
        ("gcp", {"machineType": "a3-ultragpu-8g", "disks": [_persistent(diskSizeGb=50)]}, 4),
        ("gcp", {"machineType": "g2-standard-4", "disks": [_persistent(diskSizeGb=50)]}, 2),
        ("gcp", {"acceleratorType": "v4-8"}, None),
        ("azure", {"azure_arm_parameters": {"osDiskSize": 128}}, 5.888),
        ("azure", {"azure_arm_parameters": {"osDiskSize": 100}}, 5.888),
        ("azure", {"azure_arm_parameters": {"osDiskSize": 0}}, None),
        ("azure", {"azure_arm_parameters": {}}, None),
    ],
)
def test_the_price_of_disks(cloud, config, month):
    usd = disks.disks_usd(cloud, config)
    assert usd == (None if month is None else pytest.approx(month / 730, abs=2e-5))


_INSIDE = {"use_internal_ips": True}
_HEAD_OUTSIDE = {**_INSIDE, "use_external_head_ip": True}


@pytest.mark.parametrize(
    ("cloud", "provider", "config", "is_head", "spot", "usd"),
    [
        ("aws", {}, {}, False, True, 0.005),
        ("aws", _INSIDE, {}, False, False, 0),
        ("aws", {}, {"NetworkInterfaces": [{"AssociatePublicIpAddress": False}]}, False, False, 0),
        ("aws", _INSIDE, {"NetworkInterfaces": [{"AssociatePublicIpAddress": True}]}, False, False, 0.005),
        ("azure", _HEAD_OUTSIDE, {}, True, False, 0.005),
        ("azure", _HEAD_OUTSIDE, {}, False, False, 0),
        ("gcp", {}, {"machineType": "n1-standard-4"}, False, False, 0.005),
        ("gcp", {}, {"machineType": "n1-standard-4"}, False, True, 0.0025),
        ("gcp", {}, {"machineType": "n1-standard-4", "networkInterfaces": [{"network": "n"}]}, False, False, 0),
        ("gcp", {}, {"machineType": "m", "networkInterfaces": [{"accessConfigs": [{}]}]}, False, False, 0.005),
        ("gcp", {}, {"acceleratorType": "v4-8"}, False, False, 0.005),
        ("gcp", {}, {"acceleratorType": "v4-8", "networkConfig": {"enableExternalIps": False}}, False, False, 0),
    ],
)
def test_the_price_of_an_address(cloud, provider, config, is_head, spot, usd):
    assert disks.address_usd(cloud, provider, config, is_head, spot) == usd


def _estimate(gpu, own=_DISKS, provider=""):
    (doc,), _ = parse(_AWS.replace("GPU", gpu).replace("DISKS", own).replace(", use_internal_ips: true", provider))
    return cost.estimate(doc)


HEAD = 0.1008 + 10 / 730


@pytest.mark.parametrize(
    ("gpu", "own", "provider", "most", "unknown", "said"),
    [
        ("g5.xlarge", _DISKS, ", use_internal_ips: true", HEAD + 2 * (1.006 + 0.008), (), "0.11 to 2.14 USD an hour,"),
        ("g5.xlarge", _DISKS, "", HEAD + 0.005 + 2 * 1.019, (), "0.12 to 2.16 USD an hour,"),
        (
            "g5.xlarge",
            "[]",
            ", use_internal_ips: true",
            HEAD + 2 * 1.006,
            ("disks of gpu",),
            "2.13 USD an hour and more,",
        ),
        (
            "p5e.48xlarge",
            "[]",
            ", use_internal_ips: true",
            HEAD,
            ("disks of gpu", "p5e.48xlarge"),
            "0.11 USD an hour and",
        ),
    ],
)
def test_what_is_unknown_is_said(capsys, gpu, own, provider, most, unknown, said):
    estimate = _estimate(gpu, own, provider)
    assert (estimate.most, estimate.unknown) == (pytest.approx(most, abs=1e-3), unknown)
    _print_cost(estimate, {})
    printed = capsys.readouterr().out
    assert said in printed
    assert ("no price is known for" in printed) == bool(unknown)
    assert (" ? " in printed) == bool(unknown)


def test_all_machines_have_a_price_but_those_without_a_list_price():
    kinds = {"aws": "InstanceType", "gcp": "machineType"}
    configs = [(cloud, {key: name}) for cloud, key in kinds.items() for name in machines.names(cloud)]
    configs += [("azure", {"azure_arm_parameters": {"vmSize": name}}) for name in machines.names("azure")]
    known = [machines.machine(cloud, config) for cloud, config in configs]
    # One is sold as blocks of capacity alone, and the others are retired.
    retired = {f"Standard_{size}" for size in ("NC6", "NC12", "NC24", "NV6", "NV12")}
    assert {machine.name for machine in known if machine.usd is None} == {"p5e.48xlarge", *retired}
    assert len(known) > 250
