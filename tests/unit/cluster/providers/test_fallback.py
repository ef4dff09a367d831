"""What nodes may be instead of the first choice of their type."""

from __future__ import annotations

import copy

import pytest

from raytf.cluster.providers import fallback
from raytf.cluster.providers.base import least, slug, with_defaults

SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


def test_each_entry_says_what_differs():
    config = {
        "InstanceType": "g6.xlarge",
        **SPOT,
        "Disks": [1, 2],
        "fallback": [
            {"InstanceType": "g5.xlarge", "Disks": [3]},
            {"InstanceMarketOptions": None, "at_most": 2},
            {"InstanceMarketOptions": {"SpotOptions": {"MaxPrice": "1"}}},
        ],
    }
    before = copy.deepcopy(config)
    first, other, on_demand, dear = fallback.candidates(config)
    assert config == before
    assert first == fallback.Candidate({"InstanceType": "g6.xlarge", **SPOT, "Disks": [1, 2]})
    assert other == fallback.Candidate({"InstanceType": "g5.xlarge", **SPOT, "Disks": [3]})
    assert on_demand == fallback.Candidate({"InstanceType": "g6.xlarge", "Disks": [1, 2]}, 2)
    assert dear.config["InstanceMarketOptions"] == {"MarketType": "spot", "SpotOptions": {"MaxPrice": "1"}}
    first.config["Disks"].append(9)
    assert config == before


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, None),
        ([], None),
        ("g5.xlarge", ("fallback",)),
        (["g5.xlarge"], ("fallback", 0)),
        ([{}, {"at_most": 0}], ("fallback", 1, "at_most")),
        ([{"at_most": True}], ("fallback", 0, "at_most")),
        ([{"at_most": 1}], None),
    ],
)
def test_what_is_no_fallback(given, where):
    found = fallback.malformed({"fallback": given} if given != {} else {})
    assert (found and found[0]) == where


@pytest.mark.parametrize(
    ("resources", "cpus", "gpus", "said"),
    [
        ({"CPU": 4, "GPU": 1}, 4, 1, None),
        ({"CPU": 4, "GPU": 1}, 24, 1, None),
        ({"CPU": 4, "GPU": 1}, 4, 4, "4 GPUs, and nodes of this type have 1 GPU"),
        ({"CPU": 4, "GPU": 1}, 4, 0, "no GPU, and nodes of this type have 1 GPU"),
        ({"CPU": 4}, 4, 1, "1 GPU, and nodes of this type have no GPU"),
        ({"CPU": 8, "GPU": 1}, 4, 1, "4 CPUs, and nodes of this type have 8 CPUs"),
        ({"TPU": 4}, 0, 0, None),
    ],
)
def test_a_machine_must_be_what_ray_believes(resources, cpus, gpus, said):
    assert fallback.wrong(resources, cpus, gpus) == said


def test_a_type_has_what_all_of_its_machines_have():
    assert least([{"CPU": 4, "memory": 16, "accelerator_type:L4": 1}, {"CPU": 8, "memory": 12}]) == {
        "CPU": 4,
        "memory": 12,
    }
    assert least([]) == {}


def test_the_name_of_a_machine_is_a_label_of_each_cloud():
    assert slug("n1-standard-4 with 1 nvidia-tesla-t4 spot") == "n1-standard-4-with-1-nvidia-tesla-t4-spot"
    assert slug("Standard_NC4as_T4_v3 on-demand") == "standard-nc4as-t4-v3-on-demand"


def test_a_provider_of_type_external_gets_what_ray_gives_its_own():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = {
        "cluster_name": "c",
        "max_workers": 1,
        "provider": {"type": "external", "module": "raytf.cluster.providers.aws.Provider", "region": "r"},
        "auth": {"ssh_user": "u"},
        "available_node_types": {"head": {"resources": {}, "node_config": {}}},
        "head_node_type": "head",
        "setup_commands": ["a"],
        "head_setup_commands": [],
        "worker_setup_commands": [],
    }
    prepared = prepare_config(config)
    with pytest.raises(RuntimeError, match="cluster_synced_files"):
        validate_config(prepared)
    filled = with_defaults(prepared, "aws")
    validate_config(filled)
    assert filled["provider"] == config["provider"]
    assert filled["max_workers"] == 1
    assert filled["setup_commands"] == ["a"]


def test_the_modules_are_there():
    pytest.importorskip("ray.autoscaler._private.aws.node_provider")
    from ray.autoscaler._private.loader import load_function_or_class

    for module, cloud in fallback.MODULES.items():
        if cloud == "aws":  # the others need their clouds' packages
            assert load_function_or_class(module).cloud == cloud
