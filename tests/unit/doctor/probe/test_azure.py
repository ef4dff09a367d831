"""`raytf check` online and `raytf down-check` for Azure, against recorded shapes on the loopback.

No cloud was asked: the answers have the fields of Azure's REST reference (Microsoft.Compute 2024-07-01 and 2021-07-01,
Microsoft.Resources 2021-04-01, Microsoft.Authorization 2022-04-01, Microsoft.ManagedIdentity 2023-01-31). `az` is
a script that says what `az account get-access-token` and `az cloud show` say.
"""

import json
import os
import re
from pathlib import Path

import pytest

from raytf.commands import down_check
from raytf.doctor.check import fallbacks, job_fit, offline
from raytf.doctor.finding import Severity
from raytf.doctor.leftovers import report
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import azure, online
from raytf.doctor.probe.queries import all_nodes
from tests.support.recorded import Recorded

ROOT = Path(__file__).parents[4]
CONFIG = (ROOT / "cluster-configs/azure-gpu-spot.yaml").read_text()
CONFIG = re.sub(r"subscription_id: \S+", "subscription_id: 00000000-0000-0000-0000-000000000001", CONFIG)
SUB = "/subscriptions/00000000-0000-0000-0000-000000000001"
COMPUTE = f"{SUB}/providers/Microsoft.Compute"
IDENTITY = f"{SUB}/resourceGroups/raytf-runs/providers/Microsoft.ManagedIdentity/userAssignedIdentities/raytf-nodes"
MISSING = {"error": {"code": "ResourceNotFound", "message": "The Resource was not found."}}
DENIED = {"error": {"code": "AuthorizationFailed", "message": "The client does not have authorization."}}
IMAGES = f"{COMPUTE}/locations/eastus/publishers"
HPC = f"{IMAGES}/microsoft-dsvm/artifacttypes/vmimage/offers/ubuntu-hpc/skus/2204/versions"
JAMMY = f"{IMAGES}/Canonical/artifacttypes/vmimage/offers/0001-com-ubuntu-server-jammy/skus/22_04-lts-gen2/versions"


def usage(name, title, limit, current=0):
    return {"unit": "Count", "currentValue": current, "limit": limit, "name": {"value": name, "localizedValue": title}}


def sku(name, cpus, gpus=0, spot="True", restrictions=()):
    capabilities = {"vCPUs": cpus, "GPUs": gpus, "LowPriorityCapable": spot}
    return {
        "resourceType": "virtualMachines",
        "name": name,
        "locations": ["eastus"],
        "capabilities": [{"name": key, "value": str(value)} for key, value in capabilities.items()],
        "restrictions": list(restrictions),
    }


def image(gib=64, architecture="x64", plan=None):
    about = {"architecture": architecture, "osDiskImage": {"operatingSystem": "Linux", "sizeInGb": gib}}
    return {"name": "22.04.2025", "location": "eastus", "properties": {**about, **({"plan": plan} if plan else {})}}


def routes():
    skus = [sku("Standard_D2s_v5", 2), sku("Standard_NC4as_T4_v3", 4, 1), sku("Standard_NC8as_T4_v3", 8, 1)]
    found = {
        SUB: {"subscriptionId": SUB[-36:], "displayName": "Demo", "state": "Enabled"},
        f"{COMPUTE}/skus": {"value": [*skus, {"resourceType": "disks", "name": "Premium_LRS"}]},
        f"{COMPUTE}/locations/eastus/usages": {
            "value": [
                usage("cores", "Total Regional vCPUs", 100, 4),
                usage("lowPriorityCores", "Total Regional Spot vCPUs", 100),
                usage("standardDSv5Family", "Standard DSv5 Family vCPUs", 16),
                usage("Standard NCASv3_T4 Family", "Standard NCASv3_T4 Family vCPUs", 16),
            ]
        },
        HPC: [{"name": "22.04.2024"}, {"name": "22.04.2025"}],
        f"{HPC}/22.04.2025": image(),
        JAMMY: [{"name": "22.04.2025"}],
        f"{JAMMY}/22.04.2025": image(30),
        f"{SUB}/providers/Microsoft.Authorization/permissions": {"value": [{"actions": ["*"], "notActions": []}]},
        IDENTITY: {"name": "raytf-nodes", "properties": {"principalId": "0c5c7f2b-2b1f-4c1f-9a0e-5d9f5f3a7c11"}},
    }
    for name in ("Compute", "Network", "ManagedIdentity", "Authorization"):
        found[f"{SUB}/providers/Microsoft.{name}"] = {
            "namespace": f"Microsoft.{name}",
            "registrationState": "Registered",
        }
    return found


@pytest.fixture
def cloud():
    server = Recorded(routes(), DENIED, MISSING)
    yield server
    server.close()


def az(folder, url, says="token"):
    token = {"accessToken": "token-3", "expiresOn": "2030-01-01 00:00:00.000000", "subscription": SUB[-36:]}
    script = folder / "bin" / "az"
    script.parent.mkdir(exist_ok=True)
    (folder / "token.json").write_text(json.dumps({**token, "tenant": "t", "tokenType": "Bearer"}))
    body = f'case "$*" in *get-access-token*) cat {folder}/token.json;; *"cloud show"*) echo {url}/;; *) exit 1;; esac'
    script.write_text(f"#!/bin/bash\n{body if says == 'token' else 'echo Please run az login >&2; exit 1'}\n")
    script.chmod(0o755)
    return {"HOME": str(folder), "PATH": f"{script.parent}:{os.environ['PATH']}"}


@pytest.fixture
def here(cloud, tmp_path):
    return Surroundings("3.11.7", "2.60.0", ROOT, az(tmp_path, cloud.url))


def ask(text, here, need=None):
    return online.inspect(text, here, need, offline.check(text, here))


def codes(seen):
    return {f.code for f in seen.findings}


def test_nothing_is_found_in_a_subscription_that_the_docs_were_followed_in(cloud, here):
    seen = ask(CONFIG, here)
    assert codes(seen) == set(), seen.findings
    assert seen.notes == [f"Azure subscription Demo ({SUB[-36:]})"]
    assert {token for _, _, token, _ in cloud.asked} == {"Bearer token-3"}
    assert all("api-version=" in target for _, target, _, _ in cloud.asked)
    assert {method for method, _, _, _ in cloud.asked} == {"GET"}


LOCATION = {"type": "Location", "reasonCode": "NotAvailableForSubscription", "values": ["eastus"]}
USAGES = f"{COMPUTE}/locations/eastus/usages"
REST = [sku("Standard_D2s_v5", 2), sku("Standard_NC8as_T4_v3", 8, 1)]
CASES = [
    ("project-missing", SUB, (404, MISSING)),
    ("api-disabled", f"{SUB}/providers/Microsoft.ManagedIdentity", {"registrationState": "NotRegistered"}),
    ("instance-type-not-offered", f"{COMPUTE}/skus", {"value": REST}),
    (
        "instance-type-not-offered",
        f"{COMPUTE}/skus",
        {"value": [*REST, sku("Standard_NC4as_T4_v3", 4, 1, restrictions=[LOCATION])]},
    ),
    ("spot-not-offered", f"{COMPUTE}/skus", {"value": [*REST, sku("Standard_NC4as_T4_v3", 4, 1, spot="False")]}),
    ("quota-too-small", USAGES, {"value": [usage("lowPriorityCores", "Total Regional Spot vCPUs", 3)]}),
    ("quota-too-small", USAGES, {"value": [usage("Standard NCASv3_T4 Family", "NCASv3_T4", 4, 4)]}),
    ("quota-too-small", USAGES, {"value": [usage("standardDSv5Family", "DSv5", 0)]}),
    ("image-missing", HPC, (404, MISSING)),
    ("image-missing", HPC, []),
    ("image-plan", f"{HPC}/22.04.2025", image(plan={"publisher": "p", "name": "n", "product": "o"})),
    ("image-disk", f"{HPC}/22.04.2025", image(256)),
    ("image-architecture", f"{HPC}/22.04.2025", image(architecture="Arm64")),
    (
        "right-missing",
        f"{SUB}/providers/Microsoft.Authorization/permissions",
        {"value": [{"actions": ["*"], "notActions": ["Microsoft.Authorization/*/Write"]}]},
    ),
    ("identity-missing", IDENTITY, (404, MISSING)),
    ("resource-group-elsewhere", f"{SUB}/resourcegroups/raytf", {"name": "raytf", "location": "westeurope"}),
    ("credentials-refused", SUB, (401, {"error": {"code": "ExpiredAuthenticationToken", "message": "it has expired"}})),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_mistake_is_found_and_nothing_else(cloud, here, case):
    code, path, answer = case
    assert path in cloud.routes or code == "resource-group-elsewhere"
    cloud.routes[path] = answer
    seen = ask(CONFIG, here)
    assert codes(seen) == {code}, seen.findings
    assert all(f.line and f.why and f.fix for f in seen.findings)


def test_a_quota_for_some_of_the_nodes_is_a_warning(cloud, here):
    cloud.routes[USAGES] = {"value": [usage("lowPriorityCores", "Spot", 50)]}
    (found,) = ask(CONFIG, here).findings
    # Eight workers of the larger size are the most.
    assert (found.severity, "may need 64" in found.what) == (Severity.WARNING, True)


@pytest.mark.parametrize(
    ("size", "usage_name"),
    [
        ("Standard_D2s_v5", "standardDSv5Family"),
        ("Standard_NC4as_T4_v3", "Standard NCASv3_T4 Family"),
        ("Standard_NC24ads_A100_v4", "StandardNCADSA100v4Family"),
        ("Standard_NC6s_v3", "standardNCSv3Family"),
        ("Standard_D4ps_v5", "standardDPSv5Family"),
        ("Standard_E16-4s_v5", "standardESv5Family"),
    ],
)
def test_which_quota_counts(size, usage_name):
    assert azure.family(size) == azure.usage_family(usage_name)


def test_the_identity_that_ray_makes_is_not_looked_for(cloud, here):
    del cloud.routes[IDENTITY]
    assert codes(ask(re.sub(r"  msi_resource_group: .*\n", "", CONFIG), here)) == set()


def test_the_bucket_of_the_job_is_tried_if_it_is_on_azure(cloud, here, monkeypatch):
    tried = []
    monkeypatch.setattr(azure, "check_bucket", lambda storage: iter(tried.append(storage) or ()))
    for storage in ("az://raytf/runs?account_name=acct", "s3://raytf/runs", "/mnt/runs"):
        assert codes(ask(CONFIG, here, job_fit.JobNeeds(1, 8, 1.0, None, storage))) == set()
    assert tried == ["az://raytf/runs?account_name=acct"]


def test_a_size_that_only_azure_knows(cloud, here):
    text = CONFIG.replace("Standard_NC8as_T4_v3", "Standard_NX1_v9")
    cloud.routes[f"{COMPUTE}/skus"]["value"].append(sku("Standard_NX1_v9", 24, 0))
    assert codes(ask(text, here)) == {"gpu-count"}


def test_a_right_to_look_that_is_missing_is_one_warning(cloud, here):
    cloud.denied = {USAGES}
    (found,) = ask(CONFIG, here).findings
    assert found.code == "no-right-to-look"
    assert "Microsoft.Compute/locations/usages/read" in found.what


def test_without_credentials_one_warning(cloud, tmp_path):
    for environ in (az(tmp_path, cloud.url, says="nothing"), {"HOME": str(tmp_path), "PATH": str(tmp_path)}):
        (found,) = ask(CONFIG, Surroundings("3.11.7", "2.60.0", ROOT, environ)).findings
        assert (found.code, "az login" in found.fix) == ("no-credentials", True)


@pytest.mark.parametrize("said", ["{}", "[]", '"x"', '{"accessToken": null}'])
def test_an_answer_of_az_without_a_token(cloud, here, tmp_path, said):
    (tmp_path / "token.json").write_text(said)
    assert codes(ask(CONFIG, here)) == {"no-credentials"}


def test_a_token_goes_nowhere_else(cloud, here):
    """A next link that leads to another server is not followed."""
    other = Recorded({"/x": {"value": []}})
    try:
        cloud.routes[f"{COMPUTE}/skus"]["nextLink"] = f"{other.url}/x"
        ask(CONFIG, here)
        assert other.asked == []
    finally:
        other.close()


def test_pages_are_followed(cloud, here):
    first = cloud.routes[f"{COMPUTE}/skus"]
    cloud.routes[f"{COMPUTE}/skus2"] = {"value": [first["value"].pop(1)]}
    first["nextLink"] = f"{cloud.url}{COMPUTE}/skus2?api-version=2021-07-01&$skiptoken=2"
    assert codes(ask(CONFIG, here)) == set()


NAME = re.search(r"cluster_name: (\S+)", CONFIG)[1]
GROUP = f"{SUB}/resourceGroups/raytf"


def resource(kind, name, **tags):
    path = f"{GROUP}/providers/{kind}/{name}"
    return {"id": path, "name": name, "type": kind, "location": "eastus", **({"tags": tags} if tags else {})}


def left_behind(cloud):
    vm = f"ray-{NAME}-worker-abcd-1234"
    mine = {"ray-cluster-name": NAME}
    cloud.routes[f"{GROUP}/resources"] = {
        "value": [
            resource("Microsoft.Compute/virtualMachines", vm, **mine),
            resource("Microsoft.Compute/disks", f"{vm}_OsDisk_1_x"),
            resource("Microsoft.Network/networkInterfaces", f"{vm}-nic"),
            resource("Microsoft.Network/publicIPAddresses", f"ray-{NAME}-head-abcd-1-ip"),
            resource("Microsoft.Network/virtualNetworks", f"ray-{NAME}-abcd-vnet"),
            resource("Microsoft.Compute/virtualMachines", "ray-other-1", **{"ray-cluster-name": "other"}),
            # Of clusters whose names begin alike.
            resource("Microsoft.Compute/disks", f"ray-{NAME}-2-worker-abcd-1234_OsDisk_1_x"),
            resource("Microsoft.Network/networkInterfaces", f"ray-{NAME}-worker-head-abcd-1234-nic"),
            resource("Microsoft.Network/virtualNetworks", f"ray-{NAME}-dev-abcd-vnet"),
        ]
    }
    cloud.routes[f"{GROUP}/providers/Microsoft.Compute/virtualMachines/{vm}"] = {
        "name": vm,
        "properties": {
            "hardwareProfile": {"vmSize": "Standard_NC4as_T4_v3"},
            "priority": "Spot",
            "instanceView": {"statuses": [{"code": "ProvisioningState/succeeded"}, {"code": "PowerState/running"}]},
        },
    }
    cloud.routes[f"{GROUP}/providers/Microsoft.Compute/disks/{vm}_OsDisk_1_x"] = {
        "sku": {"name": "Premium_LRS"},
        "properties": {"diskSizeGB": 128, "diskState": "Unattached"},
    }
    return vm


def test_what_is_left(cloud, here):
    vm = left_behind(cloud)
    left = report.find("c.yaml", CONFIG, here)
    assert [t.kind for t in left.resources] == ["instance", "disk", "network interface", "address", "network"]
    assert left.resources[0].usd == pytest.approx(0.526)
    assert left.resources[0].remove == f"az vm delete --resource-group raytf --name {vm} --yes"
    assert left.resources[1].usd == pytest.approx(128 * 0.154 / 730, abs=1e-5)
    assert [t.is_free for t in left.resources] == [False, False, True, False, True]
    assert down_check.exit_code(left) == 1
    del cloud.routes[f"{GROUP}/resources"]["value"][5:]
    assert report.find("c.yaml", CONFIG, here).resources[-1].remove == "az group delete --name raytf --yes"


def test_a_group_that_is_gone_has_nothing_left(cloud, here):
    left = report.find("c.yaml", CONFIG, here)
    assert (left.resources, left.unseen, down_check.exit_code(left)) == ([], [], 0)


def test_a_group_that_may_not_be_seen_proves_nothing(cloud, here):
    cloud.denied = {GROUP}
    assert down_check.exit_code(report.find("c.yaml", CONFIG, here)) == 2


def test_the_machines_of_the_config_are_known():
    from raytf.doctor.document import parse

    (document,), _ = parse(CONFIG)
    assert all(t.machine for t in all_nodes(fallbacks.as_cloud(document)))
