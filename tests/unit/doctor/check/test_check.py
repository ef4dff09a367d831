"""`raytf check`: its parts, the command as a user starts it, and the configs of this repository."""

import copy
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raytf.cluster.providers import fallback
from raytf.doctor import document, inputs, machines
from raytf.doctor.check import cost, job_fit, local_files, offline
from raytf.doctor.check.field_types import is_quantity
from raytf.doctor.check.kube_pods import number
from raytf.doctor.finding import Severity, near, place
from raytf.doctor.local_environment import Surroundings, ray_file
from raytf.errors import ConfigError

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "cluster-configs"
CLUSTERS = sorted(CONFIGS.glob("*.yaml"))
NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
AWS = """\
cluster_name: demo
max_workers: 3
provider: {type: aws, region: us-west-2, cache_stopped_nodes: false}
auth: {ssh_user: ubuntu}
available_node_types:
  head: {node_config: {InstanceType: m7i.large, ImageId: ami-0123456789abcdef0}}
  gpu:
    min_workers: 1
    max_workers: 2
    node_config:
      InstanceType: g5.xlarge
      ImageId: ami-0123456789abcdef0
      IamInstanceProfile: {Name: raytf-worker}
      InstanceMarketOptions: {MarketType: spot}
head_node_type: head
setup_commands: ['pip install "ray[default,train]==2.60.0"']
"""


@pytest.fixture
def here(tmp_path):
    return Surroundings("3.11.7", "2.60.0", ROOT, {"HOME": str(tmp_path)})


def raytf(*args, cwd=None, stdin="", env=None):
    return subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        input=stdin,
        env=env,
    )


def codes(report):
    return {f.code for f in report.findings if f.severity is not Severity.FILL_IN}


def test_lines_and_places():
    (doc,), findings = document.parse("a: 1\nb:\n  - c: 2\n  - d: {e: 3}\n")
    assert findings == []
    assert doc.get("b", 1, "d", "e") == 3
    assert doc.line(("b", 1, "d", "e")) == 4
    assert doc.line(("b", 0, "missing")) == 3
    assert place(("b", 1, "d")) == "b[1].d"
    assert doc.mapping("b") == {}
    assert doc.get("a", "x", default=7) == 7


def test_anchors_and_merges_keep_their_lines():
    (doc,), findings = document.parse("x: &x\n  a: 1\n  b: 2\ny:\n  <<: *x\n  b: 3\n")
    assert findings == []
    assert doc.get("y") == {"a": 1, "b": 3}
    assert doc.line(("y", "b")) == 6


def test_a_key_given_twice_is_told_with_both_lines():
    _, (finding,) = document.parse("a: 1\nb:\n  c: 1\n  c: 2\n")
    assert (finding.code, finding.line) == ("duplicate-key", 4)
    assert "line 3" in finding.what


@pytest.mark.parametrize(
    "text", ["a: &a [*a]\n", "a: &a {b: {c: *a}}\n", "a: *b\n", "a: [1\n", "\ta: 1\n", "a: b: c\n"]
)
def test_what_is_no_yaml_has_a_line(text):
    _, (finding,) = document.parse(text)
    assert finding.code == "yaml-syntax"
    assert finding.line in (1, 2)


LAUGHS = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))]


@pytest.mark.parametrize("text", ["a: " + "[" * 5000, "a: " + "[" * 300 + "]" * 300, "\n".join(LAUGHS)])
def test_what_has_no_end_is_no_yaml(text):
    _, (finding,) = document.parse(text)
    assert finding.code == "yaml-syntax"


def test_several_documents():
    documents, _ = document.parse("a: 1\n---\n---\nb: 2\n")
    assert [d.value for d in documents] == [{"a": 1}, {"b": 2}]


def test_a_close_word_is_proposed():
    assert near("max_worker", ["max_workers", "min_workers"]) == ". Did you mean 'max_workers'?"
    assert near("ImageID", ["ImageId"]) == ". Did you mean 'ImageId'?"
    assert near("zebra", ["max_workers"]) == ""


@pytest.mark.parametrize(
    ("command", "need"),
    [
        ("python jobs/mnist.py", job_fit.JobNeeds(2, 2, 1.0, None, "~/raytf-runs")),
        ("python j.py --workers 1:8 --use-gpu --storage=s3://b/r", job_fit.JobNeeds(1, 8, 1.0, True, "s3://b/r")),
        ("python j.py --cpus_per_worker 4 --no-use-gpu", job_fit.JobNeeds(2, 2, 4.0, False, "~/raytf-runs")),
        ("python j.py --use-gpu False", job_fit.JobNeeds(2, 2, 1.0, False, "~/raytf-runs")),
        ("python j.py --strategy mirrored", job_fit.JobNeeds(1, 1, 1.0, None, "~/raytf-runs")),
        ("python j.py --strategy mirrored --logical-devices 6", job_fit.JobNeeds(1, 1, 6.0, False, "~/raytf-runs")),
        ("python j.py --strategy one-device --use-gpu", job_fit.JobNeeds(1, 1, 1.0, True, "~/raytf-runs")),
    ],
)
def test_what_a_command_asks_for(command, need):
    assert job_fit.parse(command) == need


@pytest.mark.parametrize(
    "command",
    [
        "python j.py --workers 8:1",
        "python j.py --cpus-per-worker x",
        "python 'j.py",
        "python j.py --strategy all",
        "python j.py --logical-devices two",
    ],
)
def test_a_command_that_raytf_refuses(command):
    with pytest.raises(ConfigError, match=r"[Ee]xpected"):
        job_fit.parse(command)


@pytest.mark.parametrize(
    ("workers", "code"),
    [("1:2", set()), ("2", set()), ("1:3", {"job-never-full"}), ("3", {"job-never-starts"})],
)
def test_workers_against_the_room(here, workers, code):
    report = offline.check(AWS, here, job_fit.parse(f"python j.py --workers {workers} --storage s3://b/r"))
    assert codes(report) == code


def test_a_cluster_with_room_by_its_head_alone(here):
    text = AWS.replace("InstanceType: m7i.large", "InstanceType: m7i.4xlarge")
    report = offline.check(text, here, job_fit.parse("python j.py --workers 16 --no-use-gpu --storage s3://b/r"))
    assert codes(report) == set()


def test_cost_of_the_least_and_the_most():
    (doc,), _ = document.parse(AWS)
    estimate = cost.estimate(doc)
    assert estimate is not None
    assert estimate.least == pytest.approx(0.1058 + 1.011)
    assert estimate.most == pytest.approx(0.1058 + 2 * 1.011)
    assert estimate.spot
    assert estimate.unknown == ("disks of gpu", "disks of head")


def test_traffic_between_zones_is_told_where_workers_may_be_in_several(here):
    spot, own = (ROOT / f"cluster-configs/aws-gpu-{name}.yaml" for name in ("spot", "on-demand"))
    spread = spot.read_text().replace("  region: us-west-2\n", "  region: us-west-2\n  spread: true\n")
    several = own.read_text().replace("availability_zone: us-west-2a", "availability_zone: us-west-2a,us-west-2b")
    found = [offline.check(text, here).cost.traffic for text in (spot.read_text(), own.read_text(), spread, several)]
    assert found[:2] == [None, None]
    # Eight workers send 2 * 7 / 8 of 100 MB each, twice a second, for an hour, at 2 cents a GB.
    assert (found[2].zones, found[2].workers, found[2].usd) == (3, 8, pytest.approx(8 * 0.175 * 2 * 3600 * 0.02))
    assert found[3].zones == 2


def test_the_most_is_bounded_by_the_cluster():
    (doc,), _ = document.parse(AWS.replace("max_workers: 3", "max_workers: 1"))
    estimate = cost.estimate(doc)
    assert estimate is not None
    assert estimate.most == pytest.approx(0.1058 + 1.011)


def test_machines():
    assert machines.machine("aws", {"InstanceType": "p4d.24xlarge"}).gpus == 8
    t4 = {
        "machineType": "n1-standard-4",
        "guestAccelerators": [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}],
    }
    assert (machines.machine("gcp", t4).gpus, machines.machine("gcp", t4).gpu) == (2, "T4")
    assert machines.machine("gcp", {"acceleratorType": "v5litepod-4"}).tpus == 4
    assert machines.machine("azure", {"azure_arm_parameters": {"vmSize": "standard_nc4as_t4_v3"}}).gpus == 1
    assert machines.machine("aws", {"InstanceType": "z9.mega"}) is None
    assert machines.machine("gcp", {"machineType": "n2-custom-4-8192"}) is None


def test_an_instance_type_newer_than_the_table_is_no_mistake(here):
    assert codes(offline.check(AWS.replace("g5.xlarge", "g9z.xlarge"), here)) == set()


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("4", 4), ("16Gi", 16 * 2**30), ("2k", 2000), (1, 1), ("1.5G", 1.5e9), ("x", 0)]
)
def test_quantities_as_numbers(text, value):
    assert number(text) == value


@pytest.mark.parametrize("good", ["500m", 4, "16Gi", "1e3", "0.5", 2.5])
def test_quantities(good):
    assert is_quantity(good)


@pytest.mark.parametrize("bad", ["16GB", "5Gx", "lots", True, None, "1 Gi"])
def test_what_is_no_quantity(bad):
    assert not is_quantity(bad)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        # Ray makes a text of a template's version, and takes the head's name from its defaults.
        ("InstanceType: m7i.large,", "LaunchTemplate: {LaunchTemplateName: mine, Version: 2},", set()),
        ("head_node_type: head\n", "", {"head-node-type"}),
        ("InstanceType: m7i.large, ", "", {"instance-type-missing"}),
        ("provider: {type: aws,", "provider: {type: aws, use_internal_ips: true,", set()),
        ("us-west-2,", "us-gov-west-1, availability_zone: us-gov-west-1a,", set()),
        ("us-west-2,", "us-west-2, availability_zone: us-west-2-lax-1a,", set()),
        ("MarketType: spot", "MarketType: spot, SpotOptions: {MaxPrice: '0.5', SpotInstanceType: one-time}", set()),
        ("InstanceType: m7i.large,", "InstanceType: m7i.large, UserData: '#cloud-config',", set()),
        ("head_node_type: head", "metadata: {owner: me}\nhead_node_type: head", set()),
        ("head_node_type: head", "head_node: {}\nworker_nodes: {}\nhead_node_type: head", set()),
    ],
)
def test_what_is_right_is_left_alone(here, old, new, found):
    assert old in AWS
    assert codes(offline.check(AWS.replace(old, new), here)) == found


def test_an_address_of_documents_is_to_be_filled_in(here):
    report = offline.check((CONFIGS / "local.yaml").read_text(), here)
    assert [f.path for f in report.of(Severity.FILL_IN) if f.code == "placeholder"] == [
        ("provider", "head_ip"),
        ("provider", "worker_ips", 0),
        ("provider", "worker_ips", 1),
    ]


def test_the_head_of_the_defaults(here):
    text = AWS.replace("head_node_type: head\n", "").replace("  head: ", "  ray.head.default: ")
    assert codes(offline.check(text, here)) == set()


def test_a_key_that_others_can_read(here, tmp_path):
    key = tmp_path / "key.pem"
    key.write_text("secret")
    key.chmod(0o644)
    keyed = AWS.replace("{ssh_user: ubuntu}", f"{{ssh_user: ubuntu, ssh_private_key: {key}}}")
    keyed = keyed.replace("ImageId: ", "KeyName: mine, ImageId: ", 1)
    keyed = keyed.replace("      ImageId: ", "      KeyName: mine\n      ImageId: ")
    assert codes(offline.check(keyed, here)) == {"key-permissions"}
    key.chmod(0o600)
    assert codes(offline.check(keyed, here)) == set()


def test_a_mount_with_its_history(tmp_path):
    (tmp_path / "work" / ".git").mkdir(parents=True)
    (tmp_path / "work" / "a.py").write_text("1")
    there = Surroundings("3.11.7", "2.60.0", tmp_path, {"HOME": str(tmp_path / "home")})
    mounted = AWS + "file_mounts: {/home/ubuntu/work: work}\n"
    assert codes(offline.check(mounted, there)) == {"mount-git"}
    assert codes(offline.check(mounted + "rsync_exclude: ['**/.git']\n", there)) == set()


def test_a_working_dir_counts_what_ray_takes(here, tmp_path):
    big = tmp_path / "work"
    for name, size in (("kept.bin", 90), (".git/pack", 200), ("data/set.bin", 200)):
        (big / name).parent.mkdir(parents=True, exist_ok=True)
        with open(big / name, "wb") as file:
            file.truncate(size << 20)
    found = list(local_files.working_dir(str(big), here))
    assert [(f.code, f.severity) for f in found] == [("working-dir", Severity.WARNING)]
    assert "data (200 MiB)" in found[0].what
    (big / ".rayignore").write_text("data/\n")
    assert list(local_files.working_dir(str(big), here)) == []
    (big / ".rayignore").unlink()
    with open(big / "more.bin", "wb") as file:
        file.truncate(600 << 20)
    assert [f.severity for f in local_files.working_dir(str(big), here)] == [Severity.ERROR]


def test_an_autoscaler_that_the_shell_chooses(tmp_path):
    text = "provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}\nauth: {ssh_user: me}\n"
    text += 'setup_commands: ["echo export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/t >> ~/.bashrc"]\n'
    shell = {"HOME": str(tmp_path)}
    assert codes(offline.check(text, Surroundings("3.11.7", "2.60.0", tmp_path, shell))) == {"local-autoscaler"}
    shell["RAY_UP_enable_autoscaler_v2"] = "0"
    assert codes(offline.check(text, Surroundings("3.11.7", "2.60.0", tmp_path, shell))) == set()


@pytest.mark.parametrize("text", ["", "# nothing\n", "[1, 2]\n", "just words\n"])
def test_what_is_no_cluster(here, text):
    assert codes(offline.check(text, here)) <= {"empty", "wrong-type"}
    assert codes(offline.check(text, here))


def test_nothing_is_found_in_a_cluster_of_tpus(here):
    assert codes(offline.check((ROOT / "tests/data/gcp_tpu.yaml").read_text(), here)) == set()


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_nothing_is_found_in_the_configs_of_this_repository(here, file):
    report = offline.check(
        file.read_text(), here, job_fit.parse("python jobs/mnist.py --workers 1:2 --storage gs://b/r")
    )
    assert codes(report) == set(), report.findings


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_ray_itself_takes_the_configs_of_this_repository(file):
    from ray.autoscaler._private.util import prepare_config, validate_config

    from raytf.cluster.providers.base import with_defaults

    config = prepare_config(yaml.safe_load(file.read_text()))
    if config["provider"]["type"] == "external":
        config = with_defaults(config, fallback.cloud_of(config["provider"]))
    validate_config(config)
    if config["provider"]["type"] != "local":
        workers = [t for name, t in config["available_node_types"].items() if name != config["head_node_type"]]
        assert sum(len(fallback.candidates(t["node_config"])) for t in workers) >= 2
        assert all(t["min_workers"] == 0 for t in workers)


@NEEDS_KUBECTL
@pytest.mark.parametrize("overlay", ["eks", "gke", "aks", "local"])
def test_nothing_is_found_in_the_overlays(here, overlay):
    (text,) = inputs.read([str(CONFIGS / "kuberay/overlays" / overlay)]).values()
    assert codes(offline.check(text, here)) == set()
    kinds = [d["kind"] for d in yaml.safe_load_all(text)]
    assert {"RayCluster", "Namespace", "ServiceAccount", "Deployment"} <= set(kinds)


@NEEDS_KUBECTL
@pytest.mark.parametrize(
    ("overlay", "resources"),
    [
        ("eks", {"gpu": {"CPU": 3, "GPU": 1}}),
        ("gke", {"gpu": {"CPU": 3, "GPU": 1}, "tpu": {"CPU": 24, "TPU": 4, "TPU-v5litepod-4-head": 1}}),
        ("aks", {"gpu": {"CPU": 3, "GPU": 1}}),
        ("local", {"cpu": {"CPU": 1}}),
    ],
)
def test_the_autoscaler_of_ray_reads_the_overlays(overlay, resources):
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    (text,) = inputs.read([str(CONFIGS / "kuberay/overlays" / overlay)]).values()
    (cluster,) = [d for d in yaml.safe_load_all(text) if d["kind"] == "RayCluster"]
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    types = {name: t for name, t in config["available_node_types"].items() if name != config["head_node_type"]}
    assert {n: {k: v for k, v in t["resources"].items() if k != "memory"} for n, t in types.items()} == resources
    assert all((t["min_workers"], t["max_workers"] >= 2) == (0, True) for t in types.values())
    assert config["available_node_types"][config["head_node_type"]]["resources"]["CPU"] == 0


@NEEDS_KUBECTL
def test_the_images_user_may_write_into_the_folder_of_the_node():
    (text,) = inputs.read([str(CONFIGS / "kuberay/overlays/local")]).values()
    (cluster,) = [d["spec"] for d in yaml.safe_load_all(text) if d["kind"] == "RayCluster"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (first,) = group["template"]["spec"]["initContainers"]
        assert (first["command"], first["securityContext"]) == (["chown", "1000:1000", "/mnt/raytf"], {"runAsUser": 0})
        assert first["volumeMounts"][0] in group["template"]["spec"]["containers"][0]["volumeMounts"]


def test_the_same_python_everywhere():
    wanted = "3.11.7"
    for file in CLUSTERS:
        assert f"--python {wanted} " in file.read_text(), file.name
    for file in (CONFIGS / "docker").glob("*.Dockerfile"):
        base = "${CPU_IMAGE}" if file.stem == "tpu" else f"python:{wanted}-slim"
        assert f"FROM {base}" in file.read_text(), file.name


def test_the_policies_give_no_more_than_is_needed():
    head = json.loads((CONFIGS / "iam/aws-head-policy.json").read_text())["Statement"]
    worker = json.loads((CONFIGS / "iam/aws-worker-policy.json").read_text())["Statement"]
    for statement in [*head, *worker]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not any("*" in action for action in actions)
        changes = [a for a in actions if not a.split(":")[1].startswith(("Describe", "Get", "List"))]
        assert not changes or statement["Resource"] != "*" or "Condition" in statement
    assert {s["Resource"] for s in worker} == {"arn:aws:s3:::BUCKET", "arn:aws:s3:::BUCKET/*"}


#: What Ray's own defaults have, beyond doubt: wheels of last night, a dashboard for all, an image of 2018, no project.
DEFECTS = {
    "aws": {"nightly-ray", "dashboard-open", "old-default-image", "workers-without-profile"},
    "gcp": {"nightly-ray", "dashboard-open", "gcp-place", "workers-without-profile"},
    "azure": {"nightly-ray", "dashboard-open", "azure-place", "python-version", "cache-stopped-nodes"},
}


@pytest.mark.parametrize("provider", DEFECTS)
def test_no_false_alarm_on_the_defaults_of_ray(here, provider):
    import ray

    text = (Path(ray.__file__).parent / "autoscaler" / provider / "defaults.yaml").read_text()
    assert codes(offline.check(text, here)) == DEFECTS[provider]


def test_the_schema_is_that_of_the_installed_ray():
    known = set(ray_file("autoscaler/ray-schema.json")["properties"])
    assert {"cluster_name", "provider", "available_node_types"} <= known


def test_exit_codes_and_what_is_said(tmp_path):
    good, warns, bad = tmp_path / "good.yaml", tmp_path / "warns.yaml", tmp_path / "bad.yaml"
    fitting = AWS.replace("2.60.0", importlib.metadata.version("ray"))
    good.write_text(fitting)
    warns.write_text(fitting.replace(", cache_stopped_nodes: false", ""))
    bad.write_text(fitting.replace("max_workers: 3", "max_worker: 3"))
    assert [raytf("check", "--offline", f).returncode for f in (good, warns, bad)] == [0, 1, 2]
    done = raytf("check", "--offline", bad)
    assert f"{bad}:2: error: there is no key 'max_worker' here [unknown-key]" in done.stdout
    assert "Did you mean 'max_workers'?" in done.stdout
    assert done.stderr == ""
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = raytf("check", good, env={**nobody, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 1
    assert "AWS was not asked" in done.stdout


def test_json_for_scripts(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(AWS.replace("{ssh_user: ubuntu}", "{ssh_usr: ubuntu}"))
    done = raytf("check", "--offline", "--json", file)
    (row,) = json.loads(done.stdout)
    assert row["file"] == str(file)
    finding = next(f for f in row["findings"] if f["code"] == "unknown-key")
    assert finding["severity"] == "error"
    assert (finding["line"], finding["path"], finding["place"]) == (4, ["auth", "ssh_usr"], "auth.ssh_usr")
    assert row["cost"]["most"] > row["cost"]["least"] > 0
    assert row["cost"]["and_more"]
    assert [line["disks"] for line in row["cost"]["lines"]] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "No file given"),
        (("/no/such.yaml",), "cannot be read"),
        (("c.yaml", "--job", "python j.py --workers 0"), "--workers 0"),
        ((".",), "has no .yaml file"),
    ],
)
def test_what_it_refuses(tmp_path, arguments, said):
    if arguments[:1] == ("c.yaml",):
        (tmp_path / "c.yaml").write_text(AWS)
    done = raytf("check", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_rest_of_a_folder_is_checked_where_a_file_cannot_be_read(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\x80")
    (tmp_path / "b.yaml").write_text(AWS.replace("max_workers: 3", "max_worker: 3"))
    (tmp_path / "k").mkdir()
    (tmp_path / "k/kustomization.yaml").write_text("resources: [nowhere.yaml]\n")
    done = raytf("check", "--offline", "--json", tmp_path)
    rows = {Path(row["file"]).name: {f["code"] for f in row["findings"]} for row in json.loads(done.stdout)}
    assert done.returncode == 2
    assert (rows["a.yaml"], rows["k"]) == ({"unreadable"}, {"unreadable"})
    assert "unknown-key" in rows["b.yaml"]


def test_nobody_reads_to_the_end(tmp_path):
    (tmp_path / "b.yaml").write_text(AWS.replace("max_workers: 3", "max_worker: 3"))
    command = [
        sys.executable,
        "-c",
        "from raytf.commands.main import main; main()",
        "check",
        "--offline",
        tmp_path / "b.yaml",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(120) == 141


def test_standard_input_that_is_no_text():
    done = subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", "check", "--offline", "-"],
        capture_output=True,
        timeout=120,
        input=b"\x80\xff",
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard input cannot be read")


def test_standard_input():
    done = raytf("check", "--offline", "-", stdin="provider: {type: awss}\n")
    assert done.returncode == 2
    assert "(standard input):1: error: there is no provider 'awss'. Did you mean 'aws'?" in done.stdout


@NEEDS_KUBECTL
def test_all_configs_at_once_are_quick(tmp_path):
    # Of the processor: on a loaded machine the clock says nothing.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = raytf("check", "--offline", CONFIGS, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert "error" not in done.stdout, done.stdout


MAKERS = "error|warning|Finding|stops_ray_up|refused_pod|refuses_nodes|kind"
CODES = re.compile(rf'(?:{MAKERS})\)?\(\s*(?:(?:"[A-Z]\w+"|cloud), )?"([a-z][a-z0-9-]+)"')
#: Made from the prefix of an API.
PREFIXED = {f"{api}-{kind}" for api in ("ec2", "kube") for kind in ("type", "value")}
PREFIXED |= {"ec2-unknown-key", "kube-unknown-field", "kube-missing-field"}


def given(folder):
    """The codes that modules of a folder of raytf/doctor report; for `check` also those of the modules beside it."""
    files = [*(ROOT / "raytf/doctor" / folder).glob("*.py")]
    if folder == "check":
        files += (ROOT / "raytf/doctor").glob("*.py")
    return set(CODES.findall("".join(file.read_text() for file in files)))


def test_each_code_is_in_the_docs():
    table = (ROOT / "docs/clusters/index.md").read_text().partition("| about |")[2].partition("`kube-rule` is")[0]
    assert len(given("check")) > 100
    assert given("check") | PREFIXED <= set(re.findall(r"`([a-z0-9-]+)`", table))
    online = (
        (ROOT / "docs/clusters/index.md")
        .read_text()
        .partition("| place | asked with |")[2]
        .partition("`right-missing` on")[0]
    )
    assert len(given("probe")) > 45
    assert given("probe") <= set(re.findall(r"`([a-z0-9-]+)`", online))


def test_each_code_has_a_test():
    """One that expects it: of the corpus, or of a test's text."""
    tests = "".join(file.read_text() for file in (ROOT / "tests/unit").rglob("test_*.py"))
    expected = set(re.findall(r'"([a-z][a-z0-9-]+)"', tests))
    for file in (ROOT / "tests/data/broken_clusters").glob("*.yaml"):
        expected |= set(re.findall(r"[a-z0-9-]+", file.read_text().partition("# expect:")[2].partition("\n")[0]))
    assert given("check") | given("probe") <= expected, sorted((given("check") | given("probe")) - expected)


def test_it_loads_no_ray():
    code = "import sys, raytf.commands.check; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"ray", "tensorflow", "keras", "boto3", "botocore", "pyarrow"} & set(eval(done.stdout))


def test_it_survives_any_value_anywhere(here):
    """Each value of a file is replaced by others: findings are wanted then, never a traceback."""
    wrongs = (None, 7, "text", [], {}, [None], True, [{}], {"a": None})
    broken = [
        ROOT / "tests/data/broken_clusters" / f"{name}.yaml" for name in ("dashboard-port-open", "root-disk-small")
    ]
    names = ("aws-gpu-spot", "gcp-gpu-spot", "azure-gpu-spot", "local", "kuberay/base/raycluster", "kuberay/rayjob")
    for file in (*(CONFIGS / f"{name}.yaml" for name in names), *broken):
        value = yaml.safe_load(file.read_text())
        for i, path in enumerate(_paths(value)):
            for wrong in (wrongs[i % len(wrongs)], wrongs[(i + 4) % len(wrongs)]):
                changed = copy.deepcopy(value)
                inner = changed
                for key in path[:-1]:
                    inner = inner[key]
                inner[path[-1]] = wrong
                text = yaml.dump(changed, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
                offline.check(text, here, job_fit.JobNeeds(1, 4, 1.0, None, "s3://b/r"))


def _paths(value, path=()):
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(inner, (*path, key))
