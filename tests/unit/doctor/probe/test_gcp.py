"""`raytf check` online and `raytf down-check` for Google Cloud, against recorded shapes on the loopback.

No cloud was asked: the answers have the fields of the discovery documents (compute v1, tpu v2, iam v1, storage v1,
cloudresourcemanager v1, serviceusage v1), which the last test compares where google-api-python-client is installed.
"""

import copy
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from raytf.commands import down_check
from raytf.doctor.check import job_fit, offline
from raytf.doctor.clouds import rest
from raytf.doctor.document import parse
from raytf.doctor.finding import Severity
from raytf.doctor.leftovers import report
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import online
from tests.support.recorded import Recorded

ROOT = Path(__file__).parents[4]
SPOT, TPU = (
    (ROOT / name).read_text().replace("your-project", "demo-1")
    for name in ("cluster-configs/gcp-gpu-spot.yaml", "tests/data/gcp_tpu.yaml")
)
ZONES = "us-central1-a,us-central1-b,us-central1-c"
THREE, SPOT = SPOT, SPOT.replace(ZONES, "us-central1-a")
ACCOUNT = "raytf-worker@demo-1.iam.gserviceaccount.com"
ZONE = re.search(r"availability_zone: (\S+)", TPU)[1]
ERROR = {"code": 403, "message": "Required permission missing", "status": "PERMISSION_DENIED"}
DENIED = {"error": {**ERROR, "errors": [{"message": "no", "domain": "global", "reason": "forbidden"}]}}
MISSING = {"error": {"code": 404, "message": "was not found", "status": "NOT_FOUND"}}
#: What the bucket needs is tried against the S3 of another test; here its roles are.
JOB = "python jobs/mnist.py --workers 1:8 --storage 'gs://raytf-check/runs?endpoint_override={}&scheme=http&anonymous=true'"


def quota(metric, limit, usage=0.0):
    return {"metric": metric, "limit": limit, "usage": usage}


def image(name, gib="40", architecture="X86_64"):
    return {"kind": "compute#image", "name": name, "diskSizeGb": gib, "status": "READY", "architecture": architecture}


def routes():
    compute, zone = "/compute/v1/projects/demo-1", "/compute/v1/projects/demo-1/zones/us-central1-a"
    other = f"/compute/v1/projects/demo-1/zones/{ZONE}"
    tpu = f"/tpu/v2/projects/demo-1/locations/{ZONE}"
    enabled = [
        {"name": f"projects/1/services/{api}.googleapis.com", "parent": "projects/1", "state": "ENABLED"}
        for api in ("compute", "iam", "cloudresourcemanager", "tpu")
    ]
    network = "https://www.googleapis.com/compute/v1/projects/demo-1/global/networks/default"
    accelerator = "ubuntu-accelerator-2204-amd64-with-nvidia-580"
    found = {
        "/cloudresourcemanager/v1/projects/demo-1": {
            "projectId": "demo-1",
            "projectNumber": "1",
            "name": "Demo",
            "lifecycleState": "ACTIVE",
        },
        "/cloudresourcemanager/v1/projects/demo-1:testIamPermissions": lambda _, body: {
            "permissions": body["permissions"]
        },
        "/cloudresourcemanager/v1/projects/demo-1:getIamPolicy": {"version": 1, "bindings": []},
        "/serviceusage/v1/projects/demo-1/services:batchGet": {"services": enabled},
        compute: {"name": "demo-1", "quotas": [quota("GPUS_ALL_REGIONS", 16.0)]},
        zone: {"name": "us-central1-a", "status": "UP"},
        other: {"name": ZONE, "status": "UP"},
        f"{zone}/acceleratorTypes/nvidia-tesla-t4": {"name": "nvidia-tesla-t4", "maximumCardsPerInstance": 4},
        f"{compute}/regions/us-central1": {
            "name": "us-central1",
            "quotas": [
                quota("CPUS", 64.0),
                quota("PREEMPTIBLE_CPUS", 64.0),
                quota("NVIDIA_L4_GPUS", 4.0),
                quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 16.0),
                quota("PREEMPTIBLE_NVIDIA_T4_GPUS", 16.0),
            ],
        },
        f"{compute}/regions/us-central1/subnetworks": {"items": [{"name": "default", "network": network}]},
        f"{compute}/global/firewalls": {
            "items": [
                {
                    "name": "default-allow-ssh",
                    "network": network,
                    "direction": "INGRESS",
                    "sourceRanges": ["0.0.0.0/0"],
                    "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
                    "disabled": False,
                },
                {
                    "name": "default-allow-internal",
                    "network": network,
                    "direction": "INGRESS",
                    "sourceRanges": ["10.128.0.0/9"],
                    "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}],
                    "disabled": False,
                },
            ]
        },
        f"/compute/v1/projects/ubuntu-os-accelerator-images/global/images/family/{accelerator}": image(accelerator),
        "/compute/v1/projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts": image("ubuntu-2204-jammy", "10"),
        f"/iam/v1/projects/-/serviceAccounts/{ACCOUNT}": {"email": ACCOUNT, "projectId": "demo-1"},
        "/storage/v1/b/raytf-check": {"name": "raytf-check", "location": "US-CENTRAL1"},
        "/storage/v1/b/raytf-check/iam": {
            "kind": "storage#policy",
            "bindings": [{"role": "roles/storage.objectUser", "members": [f"serviceAccount:{ACCOUNT}"]}],
        },
        f"{tpu}/acceleratorTypes/v5litepod-4": {"type": "v5litepod-4"},
        f"{tpu}/runtimeVersions/v2-alpha-tpuv5-lite": {"version": "v2-alpha-tpuv5-lite"},
    }
    for name, cpus in (("e2-standard-2", 2), ("n1-standard-4", 4), ("g2-standard-4", 4)):
        found[f"{zone}/machineTypes/{name}"] = {"name": name, "guestCpus": cpus}
        found[f"{other}/machineTypes/{name}"] = {"name": name, "guestCpus": cpus}
    region = re.search(r"region: (\S+)", TPU)[1]
    found[f"{compute}/regions/{region}"] = {"name": region, "quotas": [quota("CPUS", 64.0)]}
    found[f"{compute}/regions/{region}/subnetworks"] = found[f"{compute}/regions/us-central1/subnetworks"]
    return found


@pytest.fixture
def cloud():
    server = Recorded(routes(), DENIED, MISSING)
    yield server
    server.close()


@pytest.fixture
def here(cloud, tmp_path):
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "CLOUDSDK_AUTH_ACCESS_TOKEN": "token-1"}
    versions = {"compute": "compute/v1", "tpu": "tpu/v2"}
    for api in ("compute", "cloudresourcemanager", "iam", "serviceusage", "storage", "tpu"):
        environ[f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}"] = f"{cloud.url}/{versions.get(api, f'{api}/v1')}/"
    return Surroundings("3.11.7", "2.60.0", ROOT, environ)


def ask(text, here, need=None):
    return online.inspect(text, here, need, offline.check(text, here, need))


def codes(seen):
    return {f.code for f in seen.findings}


@pytest.mark.parametrize("text", [SPOT, TPU], ids=["spot", "tpu"])
def test_nothing_is_found_in_a_project_that_the_docs_were_followed_in(cloud, here, text):
    seen = ask(text, here)
    assert codes(seen) == set(), seen.findings
    assert seen.notes == ["Google Cloud project demo-1 (ACTIVE), token of CLOUDSDK_AUTH_ACCESS_TOKEN"]
    assert {token for _, _, token, _ in cloud.asked} == {"Bearer token-1"}
    posts = {path for method, path, _, _ in cloud.asked if method != "GET"}
    assert all(path.endswith((":testIamPermissions", ":getIamPolicy")) for path in posts)


COMPUTE = "/compute/v1/projects/demo-1"
REGION_PATH = f"{COMPUTE}/regions/us-central1"
FAMILY = next(path for path in routes() if "ubuntu-accelerator" in path)
CASES = {
    "project-missing": ("/cloudresourcemanager/v1/projects/demo-1", (403, DENIED)),
    "api-disabled": ("/serviceusage/v1/projects/demo-1/services:batchGet", {"services": []}),
    "zone-missing": (f"{COMPUTE}/zones/us-central1-a", {"name": "us-central1-a", "status": "DOWN"}),
    "instance-type-not-offered": (f"{COMPUTE}/zones/us-central1-a/machineTypes/g2-standard-4", (404, MISSING)),
    "accelerator-not-offered": (f"{COMPUTE}/zones/us-central1-a/acceleratorTypes/nvidia-tesla-t4", (404, MISSING)),
    "quota-too-small": (REGION_PATH, {"quotas": [quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 1.0, 1.0)]}),
    "image-missing": (FAMILY, (404, MISSING)),
    "image-disk": (FAMILY, image("with-nvidia", "200")),
    "image-architecture": (FAMILY, image("with-nvidia", "40", "ARM64")),
    "no-subnet": (f"{REGION_PATH}/subnetworks", {"items": []}),
    "ssh-closed": (f"{COMPUTE}/global/firewalls", {"items": []}),
    "service-account-missing": (f"/iam/v1/projects/-/serviceAccounts/{ACCOUNT}", (404, MISSING)),
    "right-missing": ("/cloudresourcemanager/v1/projects/demo-1:testIamPermissions", {}),
}


@pytest.mark.parametrize("code", CASES)
def test_a_mistake_is_found_and_nothing_else(cloud, here, code):
    path, answer = CASES[code]
    assert path in cloud.routes
    cloud.routes[path] = answer
    seen = ask(SPOT, here)
    assert codes(seen) == {code}, seen.findings
    assert all(f.line and f.why and f.fix for f in seen.findings)


def test_an_image_that_says_nothing_of_a_driver(cloud, here):
    plain = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
    driver = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2204-amd64-with-nvidia-580"
    assert codes(ask(SPOT.replace(driver, plain), here)) == {"image-no-driver"}


def test_a_quota_for_some_of_the_nodes_is_a_warning(cloud, here):
    cloud.routes[REGION_PATH] = {"quotas": [quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 4.0, 1.0)]}
    (found,) = ask(SPOT, here).findings
    assert (found.code, found.severity) == ("quota-too-small", Severity.WARNING)
    assert "has room for 3 of 4, but the cluster may need 8" in found.what


def test_a_firewall_that_is_open(cloud, here):
    firewalls = copy.deepcopy(cloud.routes[f"{COMPUTE}/global/firewalls"])
    wide = {**firewalls["items"][0], "name": "all", "allowed": [{"IPProtocol": "tcp", "ports": ["8000-9000"]}]}
    cloud.routes[f"{COMPUTE}/global/firewalls"] = {"items": [*firewalls["items"], wide]}
    (found,) = ask(SPOT, here).findings
    assert found.code == "open-to-world"
    assert "8265 (the dashboard and the job server)" in found.what
    cloud.routes[f"{COMPUTE}/global/firewalls"]["items"][-1]["targetTags"] = ["web"]  # not for Ray's nodes
    assert codes(ask(SPOT, here)) == set()


def test_each_of_several_zones_is_asked_about(cloud, here):
    """raytf's own provider takes several; one that lacks a machine is a warning then."""
    for path, answer in list(cloud.routes.items()):
        for zone in ("us-central1-b", "us-central1-c"):
            cloud.routes[path.replace("us-central1-a", zone)] = answer
    assert codes(ask(THREE, here)) == set()
    del cloud.routes[f"{COMPUTE}/zones/us-central1-c/machineTypes/g2-standard-4"]
    (found,) = {f.what: f for f in ask(THREE, here).findings}.values()
    assert (found.what, found.severity) == ("g2-standard-4 is not offered in us-central1-c", Severity.WARNING)


def test_what_is_left_in_another_zone(cloud, here):
    for zone in ("us-central1-a", "us-central1-b"):
        for kind in ("instances", "disks"):
            cloud.routes[f"{COMPUTE}/zones/{zone}/{kind}"] = {}
    left_behind(cloud, "us-central1-c")
    left = report.find("c.yaml", THREE, here)
    assert left.unseen == []
    assert ["--zone us-central1-c" in t.remove for t in left.resources] == [True, True, True]


def test_a_tpu_that_the_zone_does_not_have(cloud, here):
    del cloud.routes[f"/tpu/v2/projects/demo-1/locations/{ZONE}/acceleratorTypes/v5litepod-4"]
    assert codes(ask(TPU, here)) == {"accelerator-not-offered"}


def test_the_bucket(cloud, here, gcs_endpoint):
    """Written to at an emulator; roles and place are asked of the recorded shapes."""
    need = job_fit.parse(JOB.format(gcs_endpoint).replace("raytf-check", "raytf"))
    for part in ("", "/iam"):
        cloud.routes[f"/storage/v1/b/raytf{part}"] = cloud.routes.pop(f"/storage/v1/b/raytf-check{part}")
    assert codes(ask(SPOT, here, need)) == set()
    cloud.routes["/storage/v1/b/raytf/iam"] = {"bindings": []}
    cloud.routes["/storage/v1/b/raytf"] = {"name": "raytf", "location": "EUROPE-WEST4"}
    assert codes(ask(SPOT, here, need)) == {"right-missing", "bucket-region"}
    nowhere = job_fit.parse(JOB.format(gcs_endpoint).replace("raytf-check", "nowhere"))
    assert "bucket-missing" in codes(ask(SPOT, here, nowhere))


def test_a_right_to_look_that_is_missing_is_one_warning(cloud, here):
    cloud.denied = {"/serviceusage", f"{COMPUTE}/global/firewalls"}
    seen = ask(SPOT, here)
    assert codes(seen) == {"no-right-to-look"}
    assert sorted(f.what.partition(":")[0] for f in seen.findings) == ["APIs", "network"]


def test_a_token_that_has_ended(cloud, here):
    cloud.routes["/cloudresourcemanager/v1/projects/demo-1"] = (401, {"error": {"code": 401, "message": "expired"}})
    assert codes(ask(SPOT, here)) == {"credentials-refused"}


def test_an_endpoint_that_is_silent(here):
    environ = {**here.environ, "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": "http://127.0.0.1:1"}
    assert codes(ask(SPOT, Surroundings("3.11.7", "2.60.0", ROOT, environ))) == {"no-answer"}


def test_without_credentials_one_warning(here, tmp_path):
    environ = {k: v for k, v in here.environ.items() if k != "CLOUDSDK_AUTH_ACCESS_TOKEN"} | {"PATH": str(tmp_path)}
    (found,) = ask(SPOT, Surroundings("3.11.7", "2.60.0", ROOT, environ)).findings
    assert found.code == "no-credentials"
    assert "gcloud auth application-default login" in found.fix


def service_account(folder, token_uri):
    """The environment of one, whose token server is on the loopback."""
    pytest.importorskip("google.auth")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    pem = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "key.json"
    content = {"type": "service_account", "client_email": ACCOUNT, "private_key": pem.decode()}
    file.write_text(json.dumps({**content, "project_id": "demo-1", "token_uri": token_uri}))
    return {"HOME": str(folder), "PATH": "", "GOOGLE_APPLICATION_CREDENTIALS": str(file)}


def test_the_file_of_a_service_account(tmp_path):
    """google-auth's own exchange of a signed assertion for a token."""
    answer = {"access_token": "token-2", "expires_in": 3600, "token_type": "Bearer"}
    server = Recorded({})
    server.answer = lambda *_: (200, answer)
    (document,), _ = parse(SPOT)
    try:
        assert rest.google_account(document, service_account(tmp_path, f"{server.url}/token")).token == "token-2"
    finally:
        server.close()


def test_a_token_server_that_is_silent(tmp_path):
    environ = service_account(tmp_path, "http://127.0.0.1:1/token")
    assert codes(ask(SPOT, Surroundings("3.11.7", "2.60.0", ROOT, environ))) == {"no-answer"}


@pytest.mark.parametrize("text", ["[]", "7", "{}", '{"type": 7}', '{"type": "service_account"}', "no"])
def test_a_file_that_holds_no_credentials(here, tmp_path, text):
    pytest.importorskip("google.auth")
    file = tmp_path / "key.json"
    file.write_text(text)
    environ = {"HOME": str(tmp_path), "PATH": "", "GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    (found,) = ask(SPOT, Surroundings("3.11.7", "2.60.0", ROOT, environ)).findings
    assert (found.code, str(file) in found.fix) == ("no-credentials", True)


NAME = "raytf-gcp-gpu-spot"


def left_behind(cloud, zone="us-central1-a"):
    machine = f"https://www.googleapis.com/compute/v1/projects/demo-1/zones/{zone}/machineTypes/g2-standard-4"
    cloud.routes[f"{COMPUTE}/zones/{zone}/instances"] = lambda query, _: {
        "items": [
            {
                "name": f"ray-{NAME}-worker-1234abcd-compute",
                "machineType": machine,
                "status": status,
                "labels": {"ray-cluster-name": NAME, "ray-node-type": "worker"},
                "scheduling": {"provisioningModel": "SPOT"},
            }
            for status in ("RUNNING", "TERMINATED")
        ]
        if query["filter"] == [f"labels.ray-cluster-name = {NAME}"]
        else []
    }
    kind = f"https://www.googleapis.com/compute/v1/projects/demo-1/zones/{zone}/diskTypes/pd-standard"
    disks = [
        {"name": f"ray-{NAME}-worker-1234abcd-compute", "sizeGb": "120", "type": kind, "status": "READY"},
        {"name": f"ray-{NAME}-head-1-compute", "sizeGb": "50", "type": kind, "status": "READY", "users": ["x"]},
        {"name": "somebody-elses", "sizeGb": "999", "type": kind, "status": "READY"},
        {"name": f"ray-{NAME}-2-worker-1234abcd-compute", "sizeGb": "999", "type": kind, "status": "READY"},
    ]
    cloud.routes[f"{COMPUTE}/zones/{zone}/disks"] = {"items": disks}


def test_what_is_left(cloud, here):
    left_behind(cloud)
    left = report.find("c.yaml", SPOT, here)
    assert [(t.kind, t.state) for t in left.resources] == [
        ("instance", "RUNNING"),
        ("instance", "TERMINATED"),
        ("disk", "READY"),
    ]
    assert left.resources[0].usd == pytest.approx(0.7068, abs=0.05)
    assert left.resources[2].usd == pytest.approx(120 * 0.04 / 730, abs=1e-5)
    place = "--zone us-central1-a --project demo-1 --quiet"
    assert left.resources[0].remove == f"gcloud compute instances delete ray-{NAME}-worker-1234abcd-compute {place}"
    assert down_check.exit_code(left) == 1


def test_nothing_is_left(cloud, here):
    for kind in ("instances", "disks"):
        cloud.routes[f"{COMPUTE}/zones/us-central1-a/{kind}"] = {"kind": f"compute#{kind}List"}
    left = report.find("c.yaml", SPOT, here)
    assert (left.resources, left.unseen, down_check.exit_code(left)) == ([], [], 0)


def test_what_could_not_be_looked_at_proves_nothing(cloud, here):
    left_behind(cloud)
    cloud.denied = {f"{COMPUTE}/zones/us-central1-a/disks"}
    left = report.find("c.yaml", SPOT, here)
    assert len(left.resources) == 2
    assert down_check.exit_code(left) == 2


def test_a_tpu_that_is_left(cloud, here):
    for kind in ("instances", "disks"):
        cloud.routes[f"{COMPUTE}/zones/{ZONE}/{kind}"] = {}
    base = f"projects/demo-1/locations/{ZONE}/nodes"
    mine = {"ray-cluster-name": re.search(r"cluster_name: (\S+)", TPU)[1]}
    nodes = [
        {"name": f"{base}/ray-a-tpu", "acceleratorType": "v5litepod-4", "state": "READY", "labels": mine},
        {"name": f"{base}/other", "acceleratorType": "v5litepod-4", "state": "READY", "labels": {}},
    ]
    cloud.routes[f"/tpu/v2/{base}"] = {"nodes": nodes}
    (thing,) = report.find("c.yaml", TPU, here).resources
    assert (thing.kind, thing.name, thing.usd) == ("TPU", "ray-a-tpu", 4.8)


SHAPES = {
    "/compute/v1/projects/demo-1/zones/us-central1-a/machineTypes": ("compute", "MachineType"),
    "/compute/v1/projects/demo-1/zones/us-central1-a/acceleratorTypes": ("compute", "AcceleratorType"),
    "/compute/v1/projects/ubuntu": ("compute", "Image"),
    "/compute/v1/projects/demo-1/regions/us-central1/subnetworks": ("compute", "SubnetworkList"),
    "/compute/v1/projects/demo-1/regions/us-central1": ("compute", "Region"),
    "/compute/v1/projects/demo-1/global/firewalls": ("compute", "FirewallList"),
    "/compute/v1/projects/demo-1/zones/us-central1-a/instances": ("compute", "InstanceList"),
    "/compute/v1/projects/demo-1/zones/us-central1-a/disks": ("compute", "DiskList"),
    "/compute/v1/projects/demo-1/zones/us-central1-a": ("compute", "Zone"),
    "/iam/v1/projects/-/serviceAccounts": ("iam", "ServiceAccount"),
    "/storage/v1/b/raytf-check/iam": ("storage", "Policy"),
    "/storage/v1/b/raytf-check": ("storage", "Bucket"),
    "/serviceusage/v1": ("serviceusage", "BatchGetServicesResponse"),
    f"/tpu/v2/projects/demo-1/locations/{ZONE}/acceleratorTypes": ("tpu", "AcceleratorType"),
    f"/tpu/v2/projects/demo-1/locations/{ZONE}/runtimeVersions": ("tpu", "RuntimeVersion"),
}


def test_the_answers_have_the_fields_of_the_discovery_documents(cloud):
    spec = importlib.util.find_spec("googleapiclient")
    if spec is None:
        pytest.skip("google-api-python-client, which brings the discovery documents, is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "discovery_cache/documents"
    documents = {}
    left_behind(cloud)
    compared = 0
    for path, answer in cloud.routes.items():
        shape = next((SHAPES[start] for start in sorted(SHAPES, key=len, reverse=True) if path.startswith(start)), None)
        if shape is None:
            continue
        api, name = shape
        version = "v2" if api == "tpu" else "v1"
        document = documents.setdefault(api, json.loads((folder / f"{api}.{version}.json").read_text()))
        if callable(answer):
            answer = answer({"filter": [f"labels.ray-cluster-name = {NAME}"]}, None)
        compare(document["schemas"], {"$ref": name}, answer, path)
        compared += 1
    assert compared >= 18


def compare(schemas, schema, value, where):
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    if isinstance(value, dict):
        known = schema.get("properties")
        for key, inner in value.items():
            if known is None:
                assert "additionalProperties" in schema, f"{where}: {key}"
                continue
            assert key in known, f"{where}: there is no {key!r}"
            compare(schemas, known[key], inner, f"{where}.{key}")
    elif isinstance(value, list):
        for inner in value:
            compare(schemas, schema["items"], inner, where)
    elif schema.get("enum") and isinstance(value, str):
        assert value in schema["enum"], f"{where}: {value}"
    else:
        kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
        assert isinstance(value, kinds[schema["type"]]), f"{where}: {value!r}"
