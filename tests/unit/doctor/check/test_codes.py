"""`raytf check`: mistakes that are in no public thread of the corpus; each is one edit of a good file."""

import dataclasses
from pathlib import Path

import pytest

from raytf.doctor import machines
from raytf.doctor.check import job_fit, offline, shell_commands
from raytf.doctor.finding import Severity
from raytf.doctor.local_environment import Surroundings

ROOT = Path(__file__).parents[4]
AWS, GCP, AZURE, LOCAL = (
    (ROOT / "cluster-configs" / f"{name}.yaml").read_text()
    for name in ("aws-gpu-spot", "gcp-gpu-spot", "azure-gpu-spot", "local")
)
TPU = (ROOT / "tests/data/gcp_tpu.yaml").read_text()
V5E = "acceleratorType: v5litepod-4\n      # The"
KUBE = (ROOT / "cluster-configs/kuberay/base/raycluster.yaml").read_text()
REDIS = (ROOT / "cluster-configs/kuberay/base/redis.yaml").read_text()
JOB = (ROOT / "cluster-configs/kuberay/rayjob.yaml").read_text()


@pytest.fixture
def here(tmp_path):
    return Surroundings("3.11.7", "2.60.0", ROOT, {"HOME": str(tmp_path)})


def codes(text, here, need=None):
    return {f.code for f in offline.check(text, here, need).findings if f.severity is not Severity.FILL_IN}


CASES = [
    ("negative-count", AWS, "    min_workers: 0\n    max_workers: 8\n", "    min_workers: -1\n    max_workers: 8\n"),
    ("head-type-workers", AWS, "min_workers: 0\n    max_workers: 0\n", "min_workers: 1\n    max_workers: 1\n"),
    ("upscaling-speed", AWS, "upscaling_speed: 1.0", "upscaling_speed: 0"),
    ("wrong-value", AWS, "upscaling_speed: 1.0", "upscaling_speed: -1"),
    ("cpu-count", AWS, '{"CPU": 4, "GPU": 1}', '{"CPU": 64, "GPU": 1}'),
    ("market-type", AWS, "MarketType: spot  # no MaxPrice", "SpotOptions: {SpotInstanceType: one-time}  # no MaxPrice"),
    (
        "network-twice",
        AWS,
        "IamInstanceProfile: {Name: raytf-head}",
        "IamInstanceProfile: {Name: raytf-head}\n      SubnetIds: [subnet-1]\n      NetworkInterfaces: "
        "[{DeviceIndex: 0, SubnetId: subnet-1, Groups: [sg-1]}]",
    ),
    (
        "security-groups",
        AWS,
        "IamInstanceProfile: {Name: raytf-head}",
        "IamInstanceProfile: {Name: raytf-head}\n      SecurityGroups: [mine]",
    ),
    (
        "port-range",
        AWS,
        "GroupName: raytf-aws-gpu-spot",
        "GroupName: raytf-aws-gpu-spot\n    IpPermissions: [{FromPort: 9, ToPort: 8, IpProtocol: tcp}]",
    ),
    ("autostop-period", AWS, "  region: us-west-2\n", "  region: us-west-2\n  autostop: 15\n"),
    ("fallback-not-read", AWS, "type: external\n  module: raytf.cluster.providers.aws.Provider", "type: aws"),
    ("fallback-shape", AWS, "at_most: 2", "at_most: 0"),
    ("fallback-shape", AWS, "        - InstanceType: g5.xlarge", "        - g5.xlarge"),
    ("fallback-twice", AWS, "- InstanceType: g5.xlarge", "- InstanceType: g6.xlarge"),
    ("fallback-resources", AWS, "- InstanceType: g5.xlarge", "- InstanceType: g5.12xlarge"),
    ("fallback-resources", AWS, "- InstanceType: g5.xlarge", "- InstanceType: m7i.xlarge"),
    ("unknown-instance-type", AWS, "- InstanceType: g5.xlarge", "- InstanceType: g5.xlarg"),
    ("ec2-unknown-key", AWS, "- InstanceType: g5.xlarge", "- InstanceTyp: g5.xlarge"),
    ("provider-module", AWS, "providers.aws.Provider", "providers.aws.Providr"),
    ("provider-module", AWS, "  module: raytf.cluster.providers.aws.Provider\n", ""),
    ("wrong-value", AWS, "  region: us-west-2\n", "  region: us-west-2\n  hold_seconds: soon\n"),
    ("wrong-value", AWS, "  region: us-west-2\n", "  region: us-west-2\n  spread: zones\n"),
    ("unknown-provider-key", AWS, "  region: us-west-2\n", "  region: us-west-2\n  hold_secs: 60\n"),
    (
        "missing-key",
        AWS,
        "\nhead_setup_commands:\n  - cd ~/raytf && ~/.local/bin/uv pip install --python ~/venv/bin/python -c "
        "constraints.txt '.[all]'\n",
        "\n",
    ),
    (
        "ray-not-pinned",
        AWS,
        "setup_commands:\n",
        "setup_commands:\n  - python -m pip install -U numpy 'ray[default]' rich\n",
    ),
    ("foreign-raytf", AWS, "setup_commands:\n", "setup_commands:\n  - pip install raytf\n"),
    ("foreign-raytf", AWS, "'.[all,gpu]'", "'raytf[gpu]==0.1.0'"),
    ("cuda-not-pinned", AWS, "-c constraints-gpu.txt '.[all,gpu]'", "-c constraints.txt '.[all,gpu]'"),
    ("cuda-not-pinned", AWS, "-c constraints-gpu.txt '.[all,gpu]'", "'./raytf_train-0.1.0-py3-none-any.whl[all,gpu]'"),
    ("cuda-not-pinned", GCP, "-c constraints-gpu.txt '.[all,gpu]'", "'tensorflow[and-cuda]==2.21.0'"),
    ("reboot", AWS, "setup_commands:\n", "setup_commands:\n  - sudo reboot\n"),
    ("one-dash", AWS, "ray start --head --port=", "ray start --head -port="),
    ("head-start", AWS, "ray start --head --port=6379", "ray start --port=6379"),
    ("no-ray-stop", AWS, "head_start_ray_commands:\n  - ray stop\n", "head_start_ray_commands:\n"),
    ("fixed-head-address", AWS, "--address=$RAY_HEAD_IP:6379", "--address=10.0.0.4:6379"),
    ("python-version", AWS, "uv venv --seed --python 3.11.7 ~/venv", "uv venv --seed --python 3.11 ~/venv"),
    ("python-version", AWS, "setup_commands:\n", "setup_commands:\n  - conda create -y -n ray python=3.11\n"),
    ("ray-not-pinned", AWS, "setup_commands:\n", "setup_commands:\n  - pip install 'ray[default]>=2.9'\n"),
    ("ray-not-pinned", AWS, "setup_commands:\n", "setup_commands:\n  - pip3 install numpy ray~=2.9 rich\n"),
    ("pins-differ", AWS, "setup_commands:\n", "setup_commands:\n  - pip install 'rich==13.1' numpy rich==14\n"),
    ("pins-differ", GCP, "'.[all]' google-api-python-client", "'.[all]' google-api-python-client==2.1.0"),
    ("auth-mode", AWS, "RAY_AUTH_MODE=token RAY_", "RAY_AUTH_MODE=tokens RAY_"),
    ("auth-not-chosen", AWS, "RAY_AUTH_MODE=token RAY_", "RAY_AUTH_MODE=Disabled RAY_"),
    ("auth-not-chosen", GCP, "RAY_AUTH_MODE=token RAY_", "RAY_AUTH_MOD=token RAY_"),
    ("image-name", AWS, "docker_here", '{image: "my image:1", container_name: ray}'),
    ("image-python", AWS, "docker_here", '{image: "rayproject/ray:2.60.0-gpu", container_name: ray}'),
    ("image-retired", AWS, "docker_here", '{image: "rayproject/autoscaler:1", container_name: ray}'),
    ("run-options", AWS, "docker_here", '{image: "mine:1", container_name: ray, run_options: [--rm]}'),
    ("mount-relative", AWS, "  ~/raytf/raytf: raytf\n", "  raytf: raytf\n"),
    ("mount-too-large", AWS, "  ~/raytf/raytf: raytf\n", "  ~/raytf/raytf: /\n"),
    ("gcp-machine", GCP, "      machineType: e2-standard-2\n", ""),
    ("gcp-gpu-twice", GCP, "machineType: n1-standard-4", "machineType: g2-standard-4"),
    ("gcp-disk-type", GCP, "diskType: pd-balanced", "diskType: pd-standard"),
    ("gcp-disk-type", GCP, "            diskType: pd-balanced\n", ""),
    ("gcp-disk-type", TPU, "{diskSizeGb: 50, source", "{diskType: pd-ssd, diskSizeGb: 50, source"),
    ("gcp-spot-restart", GCP, "automaticRestart: false}", "automaticRestart: true}"),
    ("tpu-runtime", TPU, "      runtimeVersion: v2-alpha-tpuv5-lite\n      scheduling", "      scheduling"),
    ("tpu-type", TPU, "acceleratorType: v5litepod-4\n      # The", "acceleratorType: v5lite-4\n      # The"),
    ("tpu-count", TPU, '{"CPU": 112, "TPU": 4}', '{"CPU": 112, "TPU": 8}'),
    ("start-flag", AWS, "--object-manager-port=8076 --num-cpus=0", "--object-manager-prt=8076 --num-cpus=0"),
    ("start-flag", AWS, "ray start --head", "ray start --head --dashboard_host=127.0.0.1"),
    ("start-flag", AWS, "nohup raytf node --notices aws", "nohup raytf node --notice aws"),
    ("start-flag", AWS, "nohup raytf node --notices aws", "nohup raytf node --notices gcp"),
    ("start-flag", AWS, "nohup raytf node --notices aws", "nohup raytf node --notices amazon"),
    ("start-parameter", KUBE, "num-cpus:", "num-cpu:"),
    ("tpu-type", TPU, "acceleratorType: v5litepod-4\n      # The", "acceleratorType: v5e_4\n      # The"),
    ("tpu-pod", TPU, "acceleratorType: v5litepod-4\n      # The", "acceleratorType: v5litepod-64\n      # The"),
    ("tpu-pod", TPU, V5E, "acceleratorConfig: {type: V4, topology: 2x2x2}\n      # The"),
    ("tpu-count", TPU, V5E, "acceleratorConfig: {type: V5LITE_POD, topology: 2x4}\n      # The"),
    ("tpu-type", TPU, V5E, "acceleratorConfig: {type: V4, topology: 2x2x1}\n      acceleratorType: v4-8\n      # The"),
    ("tpu-type", TPU, V5E, "acceleratorConfig: {type: V4}\n      # The"),
    ("tpu-type", TPU, V5E, "acceleratorConfig: {type: v4, topology: 2x2x1}\n      # The"),
    ("tpu-type", TPU, V5E, "acceleratorConfig: {type: V3, topology: 2x2}\n      # The"),
    ("tpu-type", TPU, V5E, "acceleratorConfig: {type: V6E, topology: 2-2}\n      # The"),
    (
        "azure-parameters",
        AZURE,
        "      azure_arm_parameters:\n        vmSize: Standard_D2s_v5",
        "      parameters:\n        vmSize: 1",
    ),
    ("azure-size", AZURE, "        vmSize: Standard_D2s_v5\n", ""),
    ("azure-size", AZURE, "vmSize: Standard_D2s_v5", "vmSize: D2s_v5"),
    ("disk-too-small", AZURE, "osDiskSize: 128", "osDiskSize: 30"),
    ("azure-place", AZURE, "location: eastus", "location: us-east-1"),
    ("local-hosts", LOCAL, "head_ip: 192.0.2.11", "head_ip: 10.0.0.300"),
    ("azure-image", AZURE, "        imagePublisher: Canonical\n", ""),
    ("kube-unknown-field", REDIS, "  strategy: {type", "  stratgy: {type"),
    ("kube-missing-field", REDIS, "ports: [{containerPort: 6379}]", "ports: [{name: redis}]"),
    ("kube-kind", KUBE, "kind: RayCluster", "kind: RayClusters"),
    ("kube-name", KUBE, "  name: raytf\nspec", f"  name: {'a' * 60}\nspec"),
    ("kube-name", KUBE, "  name: raytf\nspec", "  name: Ray_TF\nspec"),
    ("no-max-replicas", KUBE, "      maxReplicas: 8\n", ""),
    ("replicas-out-of-range", KUBE, "      replicas: 0\n", "      replicas: 9\n"),
    ("no-memory-limit", KUBE, 'limits: {cpu: "2", memory: 4Gi}', 'limits: {cpu: "2"}'),
    ("requests-above-limits", KUBE, 'limits: {cpu: "2", memory: 4Gi}', 'limits: {cpu: "2", memory: 3Gi}'),
    ("kube-rule", KUBE, "      rayStartParams: {}\n", "      rayStartParams: {labels: a=b}\n"),
    ("kube-value", KUBE, "authOptions: {mode: token}", "authOptions: {mode: tokens}"),
    ("kube-value", KUBE, "    version: v2\n", "    version: v3\n"),
    ("kube-value", KUBE, "    version: v2\n", "    version: v2\n    upscalingMode: conservative\n"),
    ("feature-gate", KUBE, "  rayVersion: 2.60.0\n", "  rayVersion: 2.60.0\n  tlsOptions: {enabled: true}\n"),
    ("kube-value", JOB, "submissionMode: K8sJobMode", "deletionStrategy: {onSuccess: {policy: DeleteSelf}}"),
    (
        "kube-value",
        JOB,
        "submissionMode: K8sJobMode",
        "deletionStrategy: {deletionRules: [{policy: DeleteSelf, condition: {ttlSeconds: 9}}]}",
    ),
    ("kube-rule", KUBE, "redisAddress: raytf-redis:6379", "externalStorageNamespace: mine"),
    ("kube-value", KUBE, "  rayVersion: 2.60.0\n", "  rayVersion: 2.60.0\n  managedBy: me\n"),
    ("kube-value", JOB, "--workers 1:8", "--workers 8:1"),
    ("kube-value", JOB, "--run mnist", "--run 'mnist"),
    ("kube-rule", JOB, "submissionMode: K8sJobMode", "submissionMode: k8sJob"),
    ("kube-rule", JOB, "submissionMode: K8sJobMode", "activeDeadlineSeconds: 0"),
    ("kube-rule", JOB, "submissionMode: K8sJobMode", "runtimeEnvYAML: 'pip: ['"),
    (
        "open-to-world",
        KUBE,
        *("serviceType: ClusterIP", "serviceType: NodePort"),
        *("  authOptions: {mode: token}\n", ""),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_mistake_is_found_and_nothing_else(here, case):
    code, text, *edits = case
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        if old == "docker_here":
            text = text.replace("auth:\n", f"docker: {new}\nauth:\n", 1)
        else:
            assert old in text
            text = text.replace(old, new) if text.startswith("apiVersion") else text.replace(old, new, 1)
    assert codes(text, here) == {code}


@pytest.mark.parametrize(
    "command",
    [
        "pip install 'ray[default]==2.60.0'",
        "pip install 'ray[default] == 2.60.0' numpy",
        "pip install raytf-train rayon",
        "cd ~/raytf && pip install ./raytf .",
        "conda create -y -n ray python=3.11.7",
        "uv pip install --python ~/venv/bin/python3.11 .",
        "pip install https://example.com/ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl",
    ],
)
def test_what_is_pinned_is_left_alone(here, command):
    assert codes(AWS.replace("setup_commands:\n", f"setup_commands:\n  - {command}\n", 1), here) == set()


@pytest.mark.parametrize(
    "command",
    [
        "pip install rich==13.1 && pip install --target other rich==14",
        "pip install 'rich[jupyter]==13.1' rich==13.1.0",
        "pip install 'rich==13.*' rich==13.1",
        "pip install 'rich==13.1; python_version < \"3.12\"' 'rich==14; python_version >= \"3.12\"'",
        "pip install -c nowhere.txt rich==13.1",
        "pip install rich==13.1 rich==$VERSION",
        "pip install rich==13.1 rich==13.$MINOR",
        "pip install rich==13.1  # not rich==14",
    ],
)
def test_pins_that_pip_accepts(here, command):
    text = AWS.replace("setup_commands:\n", f"setup_commands:\n  - >-\n    {command}\n", 1)
    assert "pins-differ" not in codes(text, here)


def test_a_pin_against_the_mounted_constraints(here, tmp_path):
    (tmp_path / "pins.txt").write_text("# mine\nRich==14.0\nnumpy==2.1 ; python_version < '3'\n")
    text = AWS.replace("file_mounts:\n", f"file_mounts:\n  ~/pins.txt: {tmp_path}/pins.txt\n")
    for command, found in {
        "rich==13.1": {"pins-differ"},
        "rich==14": set(),
        "numpy==2.0": set(),
    }.items():
        line = f"setup_commands:\n  - pip install -c ~/pins.txt {command}\n"
        assert codes(text.replace("setup_commands:\n", line, 1), here) == found


@pytest.mark.parametrize("value", [".inf", ".nan", "-.inf"])
def test_a_count_without_end_against_a_job(here, value):
    text = AWS.replace('{"CPU": 4, "GPU": 1}', f'{{"CPU": {value}, "GPU": {value}}}')
    assert "wrong-value" in codes(text, here, job_fit.JobNeeds(1, 2, 1.0, None, "s3://b/r"))
    pods = KUBE.replace("nvidia.com/gpu: 1", f"nvidia.com/gpu: {value}")
    codes(pods, here, job_fit.JobNeeds(1, 2, 1.0, None, "s3://b/r"))


def test_a_node_type_whose_name_is_a_number(here):
    (found,) = offline.check(AWS.replace("  gpu:\n", "  1:\n", 1), here).of(Severity.ERROR)
    assert (found.code, found.path) == ("wrong-type", ("available_node_types", "1"))


def test_the_flags_are_those_of_ray_start_and_of_raytf_node():
    from ray.scripts.scripts import start as ray_start

    from raytf.commands.node import Node
    from raytf.config.flags import NoticeSection

    flags = {flag for p in ray_start.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")}
    assert {f"--{name}" for name in shell_commands.START_OPTIONS} == flags
    own = {f.name for section in (Node, NoticeSection) for f in dataclasses.fields(section)}
    assert {name.replace("-", "_") for name in shell_commands.NODE_OPTIONS} == own - {"command"}


def test_ray_takes_a_mode_in_large_letters(here):
    text = AWS.replace("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=Token")
    assert text != AWS
    assert codes(text.replace("ray start --head", "ray start --head --dashboard-host=0.0.0.0"), here) == set()


def test_a_mistake_of_a_fallback_is_said_where_it_is(here):
    (found,) = (
        f
        for f in offline.check(AWS.replace("- InstanceType: g5.xlarge", "- InstanceType: g5.xlarg"), here).findings
        if f.code == "unknown-instance-type"
    )
    assert found.path == ("available_node_types", "gpu", "node_config", "fallback", 0, "InstanceType")
    assert found.line == 1 + AWS[: AWS.index("InstanceType: g5.xlarge")].count("\n")


@pytest.mark.parametrize(
    ("code", "text", "edits"),
    [
        ("autostop-docker", AWS, {"auth:\n": "docker: {image: x, container_name: y}\nauth:\n"}),
        (
            "autostop-scopes",
            GCP,
            {"    node_config:\n": "    node_config:\n      serviceAccounts: [{email: a@b.c, scopes: [storage-rw]}]\n"},
        ),
    ],
)
def test_a_head_that_could_not_end_itself_is_found(here, code, text, edits):
    for old, new in edits.items():
        text = text.replace(old, new, 1)
    assert code not in codes(text, here)
    assert code in codes(text.replace("\nprovider:\n", "\nprovider:\n  autostop: 15m\n", 1), here)


@pytest.mark.parametrize(
    ("accounts", "listed"),
    [
        ("5", "none"),
        ("[{scopes: 5}]", "5"),
        ("[{scopes: 'https://a.example/b'}]", "https://a.example/b"),
        ("[{scopes: [b, a]}]", "a, b"),
        ("[{scopes: 'https://www.googleapis.com/auth/cloud-platform'}]", None),
    ],
)
def test_scopes_of_any_type_are_judged(here, accounts, listed):
    text = GCP.replace("\nprovider:\n", "\nprovider:\n  autostop: 15m\n", 1)
    text = text.replace("    node_config:\n", f"    node_config:\n      serviceAccounts: {accounts}\n", 1)
    errors = offline.check(text, here).of(Severity.ERROR)
    assert [f.what for f in errors] == ([] if listed is None else [f"the scopes of the head are {listed}"])
    assert all("/auth/cloud-platform;" in f.fix for f in errors)


@pytest.mark.parametrize(
    ("shape", "kind", "chips"),
    [
        ({"type": "V4", "topology": "2x2x1"}, "v4-8", 4),
        ({"type": "V5P", "topology": "2x2x1"}, "v5p-8", 4),
        ({"type": "V5LITE_POD", "topology": "2x4"}, "v5litepod-8", 8),
        ({"type": "V6E", "topology": "1x1"}, "v6e-1", 1),
    ],
)
def test_the_chips_of_a_topology_are_counted_as_ray_counts_them(shape, kind, chips):
    ray = pytest.importorskip("ray.autoscaler._private.gcp.config", reason="Google's client is not installed")
    config = {"acceleratorConfig": shape}
    assert machines.accelerator_type(config) == ray.tpu_accelerator_config_to_type(shape) == kind
    assert machines.machine("gcp", config).tpus == ray._get_num_tpu_chips(config) == chips
    assert machines.machine("gcp", config).usd == machines.machine("gcp", {"acceleratorType": kind}).usd > 0
    assert (chips <= machines.tpus_of_host(kind.split("-")[0])) == ray._is_single_host_tpu(config)


def test_a_topology_of_one_host_is_no_mistake(here):
    assert codes(TPU.replace(V5E, "acceleratorConfig: {type: V4, topology: 2x2x1}\n      # The"), here) == set()


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--workers 1:4", {"job-no-tpu"}),
        ("--workers 1:4 --no-use-gpu", {"job-no-tpu"}),
        ("--workers 1:4 --use-gpu", {"job-no-gpu"}),
        ("--strategy tpu", set()),
    ],
)
def test_a_job_on_a_cluster_of_tpus(here, flags, found):
    need = job_fit.parse(f"python jobs/mnist.py {flags} --storage gs://b/r")
    assert codes(TPU, here, need) == found
    mixed = TPU.replace(V5E.partition("\n")[0], "machineType: n1-standard-4", 1).replace(', "TPU": 4', "", 1)
    assert "job-no-tpu" not in codes(mixed, here, need)


def test_a_pod_for_tpus_needs_its_node(here):
    selector = "nodeSelector: {cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice}"
    text = KUBE.replace("nvidia.com/gpu: 1", "google.com/tpu: 4").replace(
        "          serviceAccountName: raytf\n          #", f"          {selector}\n          #"
    )
    assert codes(text, here) == {"tpu-selector"}


def test_a_selector_for_gpus_needs_a_gpu(here):
    text = KUBE.replace(", nvidia.com/gpu: 1}", "}").replace(
        "          serviceAccountName: raytf\n          #",
        "          nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4}\n          #",
    )
    assert codes(text, here) == {"gpu-not-declared"}


@pytest.mark.parametrize(
    ("workers", "found"), [("1:8", set()), ("1:9", {"job-never-full"}), ("9", {"job-never-starts"})]
)
def test_a_job_against_a_raycluster(here, workers, found):
    need = job_fit.parse(f"python jobs/mnist.py --workers {workers} --storage s3://b/r")
    assert codes(KUBE, here, need) == found


def test_a_rayjob_says_what_it_needs_itself(here):
    spec = KUBE.partition("spec:\n")[2].replace("\n", "\n  ")
    text = JOB.replace("  clusterSelector: {ray.io/cluster: raytf}\n", f"  rayClusterSpec:\n  {spec}\n")
    assert codes(text, here) == set()
    assert codes(text.replace("--workers 1:8", "--workers 12"), here) == {"job-never-starts"}
    assert codes(text.replace("--use-gpu ", ""), here) == {"gpu-left-open"}
    assert codes(text.replace("--use-gpu ", "").replace("minReplicas: 0", "minReplicas: 1"), here) <= {
        "replicas-out-of-range"
    }
    assert codes(text.replace("--use-gpu ", "--no-use-gpu "), here) == set()


def test_a_rayjob_against_the_raycluster_of_the_same_input(here):
    assert codes(f"{KUBE}\n---\n{JOB}", here) == set()
    assert codes(f"{JOB}\n---\n{KUBE}".replace("--workers 1:8", "--workers 12"), here) == {"job-never-starts"}
    assert codes(f"{JOB}\n---\n{KUBE}".replace("--use-gpu ", ""), here) == {"gpu-left-open"}
    assert (
        codes(f"{JOB}\n---\n{KUBE}".replace("cluster: raytf}", "cluster: other}").replace("8 ", "12 "), here) == set()
    )


def test_a_placeholder_is_to_be_filled_in(here):
    report = offline.check(GCP, here)
    assert {f.code for f in report.of(Severity.FILL_IN)} == {"placeholder", "auth-token"}
    assert report.of(Severity.ERROR) == []
