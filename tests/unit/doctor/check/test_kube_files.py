"""`raytf check` on manifests of other people, and on files of other tools.

The rules were tried on the 94 YAML files of ray-operator/config/samples in ray-project/kuberay at
feeaf72facab4881ba2b179248bb67315634e229, which are fetched by hand and not in CI. Two errors are left there: `template`
in a file with $KSA_NAME, and `gpu-not-declared` for a pod that selects nodes with GPUs and requests none.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raytf.commands.check import Checked, _print
from raytf.doctor.check import offline
from raytf.doctor.finding import Severity
from raytf.doctor.local_environment import Surroundings

HERE = Surroundings("3.11.7", "2.60.0", Path("/"), {"HOME": "/nowhere"})


def pods(image: str, limits: str = "{cpu: 1, memory: 4Gi}") -> str:
    containers = f"[{{name: ray, image: '{image}', resources: {{limits: {limits}}}}}]"
    return f"{{rayStartParams: {{}}, template: {{spec: {{containers: {containers}}}}}}}"


def cluster(head: str, worker: str = "", version: str = "2.60.0") -> str:
    """Return the spec of a RayCluster with a head on CPUs and, if it has an image, a worker with a GPU."""
    text = f"rayVersion: {version}, headGroupSpec: {pods(head)}"
    if worker:
        group = pods(worker, "{cpu: 1, memory: 4Gi, nvidia.com/gpu: 1}")[1:]
        text += f", workerGroupSpecs: [{{groupName: a, replicas: 1, minReplicas: 1, maxReplicas: 1, {group}]"
    return f"{{{text}}}"


def manifest(spec: str, kind: str = "RayCluster") -> str:
    return f"apiVersion: ray.io/v1\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec}\n"


def found(text: str) -> list[tuple[str, str]]:
    return [(f.severity.value, f.code) for f in offline.check(text, HERE).findings]


GOOD = cluster("rayproject/ray:2.60.0-py311")
IMAGES = [
    ("rayproject/ray:latest-gpu", "rayproject/ray:latest-gpu", "2.60.0", "image-latest"),
    ("rayproject/ray:nightly", "rayproject/ray:nightly", "2.60.0", "image-latest"),
    ("rayproject/ray:2.52.0", "", "2.52.0", "ray-version"),
    ("rayproject/ray:2.52.0", "rayproject/ray:2.52.0", "2.52.0", "ray-version"),
    ("rayproject/ray:2.52.0-py312-cpu", "rayproject/ray-ml:2.52.0-py312-cu121", "2.46.0", "ray-version"),
    ("rayproject/ray:2.60.0-py310", "", "2.60.0", "python-version"),
    ("rayproject/ray:2.60.0-py312", "rayproject/ray:2.60.0-py312-gpu", "2.60.0", "python-version"),
    ("rayproject/ray:2.60.0-gpu", "", "2.60.0", "image-python"),
    ("rayproject/ray:2.60.0-py311", "", "2.52.0", "image-ray-version"),
    ("rayproject/ray:2.60.0-py311", "rayproject/ray:2.52.0-py311-gpu", "2.60.0", "images-differ"),
    ("mine/ray:1", "", "2.52.0", "ray-version"),
]


@pytest.mark.parametrize("case", IMAGES)
def test_the_images_of_a_file_are_one_finding_and_its_fix_is_right(case):
    head, worker, version, code = case
    text = manifest(cluster(head, worker, version))
    (finding,) = offline.check(f"{text}---\n{text.replace('name: a}', 'name: b}', 1)}", HERE).findings
    assert finding.code == code
    assert (finding.severity is Severity.ERROR) == (code == "images-differ")
    assert finding.line is not None
    if head.startswith("rayproject/"):
        fixed = re.sub(r"rayVersion: [\d.]+", "rayVersion: 2.60.0", text) if "rayVersion" in finding.fix else text
        images = re.findall(r"rayproject/[\w.:-]*\w", finding.fix)
        if "instead of" in finding.fix:
            pairs = re.findall(r"(rayproject/[\w.:-]+) instead of (rayproject/[\w.:-]*\w)( in pods)?", finding.fix)
            for new, old, _ in sorted(pairs, key=lambda pair: pair[2]):
                at = fixed.rfind(f"'{old}'") if new.endswith("-gpu") else fixed.find(f"'{old}'")
                fixed = fixed[:at] + f"'{new}'" + fixed[at + len(old) + 2 :]
        elif images:
            fixed = re.sub(r"rayproject/[\w.:-]+", images[0], fixed)
        assert found(fixed) == []


def test_the_advice_for_a_pod_with_gpus_is_an_image_with_cuda():
    (finding,) = offline.check(manifest(cluster("rayproject/ray:latest", "rayproject/ray:latest")), HERE).findings
    assert "rayproject/ray:2.60.0-py311-gpu instead of rayproject/ray:latest in pods with GPUs" in finding.fix


JOB = f"{{entrypoint: python a.py, rayClusterSpec: {GOOD}}}"
CRON = f"{{schedule: '0 3 * * *', jobTemplate: {JOB}}}"
SPECS = {"RayCluster": GOOD, "RayJob": JOB, "RayService": f"{{rayClusterConfig: {GOOD}}}", "RayCronJob": CRON}
GATE = ("warning", "feature-gate")


@pytest.mark.parametrize("right", SPECS)
@pytest.mark.parametrize("wrong", [*SPECS, "Job"])
def test_a_wrong_kind_is_one_finding_that_names_the_right_one(right, wrong):
    gate = [GATE] if right == "RayCronJob" else []
    if right == wrong:
        assert found(manifest(SPECS[right], wrong)) == gate
    else:
        assert found(manifest(SPECS[right], wrong)) == [("error", "kube-kind"), *gate]
        (finding,) = offline.check(manifest(SPECS[right], wrong), HERE).of(Severity.ERROR)
        assert finding.fix == f"Write kind: {right}."


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("2.60.0-py311", "2.9.0", "ray-version"),
        ("cpu: 1,", "cpuu: 1,", "kube-resource"),
        ("entrypoint: python a.py", "submissionMode: K8s", "kube-rule"),
        ("0 3 * * *", "0 3 * *", "kube-rule"),
        ("0 3 * * *", "CRON_TZ=UTC 0 3 * * *", "kube-rule"),
        ("python a.py", "python jobs/mnist.py --workers 8:1", "kube-value"),
    ],
)
def test_a_raycronjob_is_checked_as_its_rayjob(old, new, code):
    text = manifest(CRON, "RayCronJob")
    assert old in text
    assert code in {code for _, code in found(text.replace(old, new, 1))}


@pytest.mark.parametrize(
    "text",
    [
        manifest(f"{{rayClusterSpec: {GOOD}}}", "RayJob"),
        manifest(GOOD.replace("template: {", "template: {metadata: null, ")),
        manifest(cluster("rayproject/ray:2.60.0-py311", "rayproject/ray-ml:2.60.0.0e19ea-py311-gpu")),
        manifest(cluster("mine/head:1", "mine/worker:2")),
        manifest(cluster("mine:1", "mine:1").replace("maxReplicas: 1", "maxReplicas: 5")),
    ],
)
def test_what_kuberay_takes_is_left_alone(text):
    assert found(text) == []


INGRESS = """
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: a, annotations: {kubernetes.io/ingress.class: nginx}}
spec: {rules: [{http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: a, port: {number: 8265}}}}]}}]}
"""
ROUTE = """
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: a}
spec: {parentRefs: [{name: a}], rules: [{backendRefs: [{name: a-head-svc, port: 8265}]}]}
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: a}
spec: {type: LoadBalancer, ports: [{port: 80, targetPort: 8265}]}
"""
NAMED = INGRESS.replace("number: 8265", "name: dashboard")
WITH_TOKEN = "{authOptions: {mode: token}, rayV"
WITH_INGRESS = manifest(GOOD.replace("headGroupSpec: {", "headGroupSpec: {enableIngress: true, "))
NODE_PORT = manifest(GOOD.replace("headGroupSpec: {", "headGroupSpec: {serviceType: NodePort, "))
OPEN = ("warning", "open-to-world")


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        (INGRESS, [OPEN]),
        (NAMED, []),
        (NAMED.replace("name: a,", "name: a-head-svc,"), [OPEN]),
        (f"{manifest(GOOD)}---{NAMED}", [OPEN]),
        (ROUTE, [OPEN]),
        (SERVICE, [("error", "open-to-world")]),
        (SERVICE.replace("LoadBalancer", "NodePort"), [OPEN]),
        (NODE_PORT, [OPEN]),
        (f"{NODE_PORT}---{INGRESS}", [OPEN]),
        (NODE_PORT.replace("{rayV", WITH_TOKEN), []),
        (WITH_INGRESS, [OPEN]),
        (WITH_INGRESS.replace("{rayV", WITH_TOKEN), []),
        (WITH_INGRESS.replace("true", "false"), []),
        (INGRESS.replace("8265", "8000"), []),
        (SERVICE.replace("8265", "8000"), []),
        (SERVICE.replace("LoadBalancer", "ClusterIP"), []),
        (INGRESS.replace("nginx}", "nginx, nginx.ingress.kubernetes.io/auth-url: https://a.example}"), []),
        (f"{manifest(GOOD.replace('{rayV', WITH_TOKEN))}---{INGRESS}", []),
    ],
)
def test_a_way_to_the_dashboard_without_a_login_is_found(text, findings):
    assert found(text) == findings


AWS = "service.beta.kubernetes.io/aws-load-balancer"


@pytest.mark.parametrize(
    ("annotation", "is_internal"),
    [
        (f"{AWS}-scheme: internal", True),
        (f"{AWS}-scheme: internet-facing", False),
        (f"{AWS}-internal: 'true'", True),
        (f"{AWS}-internal: 'false'", False),
        ("networking.gke.io/load-balancer-type: Internal", True),
        ("networking.gke.io/load-balancer-type: External", False),
        ("alb.ingress.kubernetes.io/scheme: internal", True),
        ("kubernetes.io/ingress.class: gce-internal", True),
        ("kubernetes.io/ingress.class: gce", False),
        ("team: internal", False),
    ],
)
def test_an_internal_load_balancer_is_left_alone(annotation, is_internal):
    for text in (
        SERVICE.replace("{name: a}", f"{{name: a, annotations: {{{annotation}}}}}"),
        INGRESS.replace("{kubernetes.io/ingress.class: nginx}", f"{{{annotation}}}"),
        WITH_INGRESS.replace("{name: a}", f"{{name: a, annotations: {{{annotation}}}}}", 1),
    ):
        assert ("open-to-world" not in {code for _, code in found(text)}) == is_internal


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("apiVersion: ray.io/v1\nkind: RayCluster\nspec:\n  {{- with .Values.a }}\n  a: 1\n", "template", "helm"),
        ("apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: '{{ .Values.name }}'}\n", "template", "helm"),
        ("a: b\nlist:\n\n  - name: x-{{ .Values.a }}\n  {{ end }}\n", "template", "helm"),
        (manifest(cluster("$IMAGE")), "template", "envsubst"),
        (manifest(cluster("a:1")).replace("name: a}", "name: '${NAME}'}"), "template", "envsubst"),
        ("ray-version: 2.60.0\nhead: {cpu: 1}\n", "foreign-file", "kubectl ray"),
        ("worker-groups: [{cpu: 3}]\n", "foreign-file", "kubectl ray"),
    ],
)
def test_another_format_gets_one_sentence(text, code, word):
    (finding,) = offline.check(text, HERE).findings
    assert (finding.severity, finding.code) == (Severity.ERROR, code)
    assert word in finding.fix
    assert finding.line is not None


@pytest.mark.parametrize(
    "text",
    [
        manifest(GOOD.replace("name: ray,", "name: ray, args: ['ulimit -n 9; $KUBERAY_GEN_RAY_START_CMD'],")),
        manifest(GOOD.replace("rayStartParams: {}", "rayStartParams: {node-ip-address: $MY_POD_IP}")),
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {rule: '{{ $labels.instance }}', image: $A}\n",
    ],
)
def test_variables_that_something_expands_are_left_alone(text):
    assert "template" not in {code for _, code in found(text)}


def test_braces_in_a_command_hide_no_syntax_error():
    text = "setup_commands:\n  - docker ps --format '{{.Names}}'\n  - a: [\n"
    assert found(text) == [("error", "yaml-syntax")]


@pytest.mark.parametrize(("text", "word"), [(manifest(GOOD), "nothing found"), (SERVICE, "nothing of Ray here")])
def test_a_file_without_ray_is_called_that(capsys, text, word):
    _print("a.yaml", Checked(offline.check(text.replace("8265", "80"), HERE)))
    assert capsys.readouterr().out == f"a.yaml: {word}\n"
