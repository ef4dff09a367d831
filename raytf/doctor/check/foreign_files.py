"""Recognizes configuration files of other tools, of which `ray up` and KubeRay read nothing.

Sources: the references of Anyscale (docs.anyscale.com/reference: compute-config-api, job-api, service-api, and the
archived compute config), Ray Serve, SkyPilot (docs.skypilot.co/en/latest/reference/yaml-spec.html), AWS CloudFormation
("Template anatomy"), the Compose Specification, and create-cluster.complete.yaml of KubeRay's kubectl plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error

#: CloudFormation's own YAML tags, such as !Ref, make its templates unreadable for other tools.
_CLOUDFORMATION = re.compile(r"^AWSTemplateFormatVersion\b|^\s+Type: *[\"']?AWS::\w+::", re.MULTILINE)
#: Keys that every `ray up` file or every manifest has, and no file below.
_OURS = ("provider", "cluster_name", "available_node_types", "apiVersion")


_ANYSCALE = {"image_uri", "compute_config", "containerfile", "query_auth_token_enabled"}


def _is_anyscale_compute(value: dict[str, Any]) -> bool:
    old = isinstance(value.get("head_node_type"), dict) or isinstance(value.get("worker_node_types"), list)
    machine = value.get("head_node")
    new = isinstance(value.get("worker_nodes"), list) or (isinstance(machine, dict) and "instance_type" in machine)
    return old or new or "auto_select_worker_config" in value


def _is_anyscale_work(value: dict[str, Any], key: str) -> bool:
    return key in value and not _ANYSCALE.isdisjoint(value)


def _is_serve(value: dict[str, Any]) -> bool:
    applications = value.get("applications")
    return isinstance(applications, list) and any(
        isinstance(app, dict) and "import_path" in app for app in applications
    )


def _is_skypilot(value: dict[str, Any]) -> bool:
    is_task = isinstance(value.get("run"), str) or isinstance(value.get("setup"), str)
    return is_task and not {"resources", "workdir", "num_nodes", "file_mounts", "envs", "service"}.isdisjoint(value)


def _is_compose(value: dict[str, Any]) -> bool:
    services = value.get("services")
    return isinstance(services, dict) and any(
        isinstance(service, dict) and not {"image", "build"}.isdisjoint(service) for service in services.values()
    )


def _is_helm_values(value: dict[str, Any]) -> bool:
    image = value.get("image")
    return isinstance(image, dict) and "repository" in image


_PASS_ANOTHER = "Pass a `ray up` file or a KubeRay manifest; cluster-configs/ has examples."


@dataclass(frozen=True)
class _Format:
    name: str
    command: str
    has_shape: Callable[[dict[str, Any]], bool]
    fix: str = _PASS_ANOTHER


_FORMATS = (
    _Format("an Anyscale compute config", "anyscale compute-config create", _is_anyscale_compute),
    _Format("an Anyscale service", "anyscale service deploy", lambda value: _is_anyscale_work(value, "applications")),
    _Format("an Anyscale job", "anyscale job submit", lambda value: _is_anyscale_work(value, "entrypoint")),
    _Format("a config of Ray Serve", "serve deploy", _is_serve),
    _Format("a SkyPilot task", "sky launch", _is_skypilot),
    _Format("a Docker Compose file", "docker compose up", _is_compose),
    _Format(
        "a configuration of the kubectl plugin for Ray",
        "kubectl ray create cluster",
        lambda value: not {"worker-groups", "ray-version"}.isdisjoint(value),
        "Check what the plugin makes of it: kubectl ray create cluster NAME --file FILE --dry-run | raytf check -",
    ),
    _Format(
        "values of a Helm chart",
        "helm install",
        _is_helm_values,
        "Render it first: helm template NAME CHART --values FILE | raytf check -",
    ),
)


def find(text: str, documents: Sequence[Document]) -> ConfigFinding | None:
    """Return the finding that a file is of another tool, or None if it can be a `ray up` file or a manifest."""
    values = [document.value for document in documents if isinstance(document.value, dict)]
    if any(key in value for value in values for key in _OURS):
        return None
    if _CLOUDFORMATION.search(text):
        return _foreign("an AWS CloudFormation template", "aws cloudformation deploy")
    for format_ in _FORMATS:
        if any(format_.has_shape(value) for value in values):
            return _foreign(format_.name, format_.command, format_.fix)
    return None


def _foreign(name: str, command: str, fix: str = _PASS_ANOTHER) -> ConfigFinding:
    why = f"`{command}` reads it; `ray up` does not, and raytf checks nothing in it."
    return replace(error("foreign-file", (), f"this is not a `ray up` file: it is {name}", why, fix), line=1)
