"""Ray's own schema of a cluster YAML, one clear finding for each mistake, and keys that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, listed, near, warning
from raytf.doctor.local_environment import ray_file

#: Provider -> keys that its code reads; Ray's schema lets any other pass, and nobody reads it.
_PROVIDER_KEYS: dict[str, set[str]] = {
    "aws": {"region", "availability_zone", "security_group", "key_pair", "aws_credentials", "cloudwatch"},
    "gcp": {"region", "availability_zone", "project_id", "gcp_credentials"},
    "azure": {
        *("location", "resource_group", "subscription_id", "availability_zone", "tags", "unique_id", "subnet_mask"),
        *("msi_name", "msi_resource_group", "use_external_head_ip"),
    },
    "local": {"head_ip", "worker_ips", "external_head_ip", "coordinator_address"},
}
_ALL_PROVIDERS = {
    *("type", "use_internal_ips", "cache_stopped_nodes", "disable_node_updaters", "disable_launch_config_check"),
    *("foreground_node_launch", "worker_liveness_check", "worker_rpc_drain", "_config_cache_path"),
}
_PROVIDERS = ("aws", "azure", "gcp", "local", "aliyun", "vsphere", "spark", "external", "kuberay", "readonly")

#: Keys of older versions of Ray -> what to do now.
_LEGACY = {
    "head_node": "Give its content as `node_config` of a type below available_node_types; name that in head_node_type.",
    "worker_nodes": "Give its content as `node_config` of a type below available_node_types.",
    "min_workers": "Give min_workers to a type below available_node_types; here Ray drops it without a word.",
    "initial_workers": "Leave it out; min_workers of a node type starts that many.",
    "autoscaling_mode": "Leave it out; upscaling_speed says how fast it grows.",
    "target_utilization_fraction": "Leave it out; upscaling_speed says how fast it grows.",
    "worker_default_node_type": "Leave it out; all types but the head's are workers.",
}
_TYPES = {"object": "a mapping", "array": "a list", "integer": "a whole number", "number": "a number"}
_TYPES |= {"string": "a text", "boolean": "true or false"}


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find keys, types and values that Ray refuses, or never reads."""
    kind = document.get("provider", "type")
    if not isinstance(document.value, dict):
        yield error(
            "wrong-type",
            (),
            f"the file holds {_kind(document.value)}, expected a mapping",
            "Ray refuses it.",
            "Begin with `cluster_name: ...` and `provider: ...`.",
        )
        return
    if isinstance(kind, str) and kind not in _PROVIDERS:
        dead = kind.startswith("fake_multinode")
        yield error(
            "unknown-provider",
            ("provider", "type"),
            f"there is no provider {kind!r}{near(kind, _PROVIDERS)}",
            "In Ray 2.60 this provider ends without a word." if dead else "`ray up` ends with NotImplementedError.",
            "Use `type: external` with `module: ray.autoscaler._private.fake_multi_node.node_provider."
            "FakeMultiNodeProvider`."
            if dead
            else f"Use one of {', '.join(_PROVIDERS)}.",
        )
    for path in document.odd_keys:
        if path[:1] != ("available_node_types",) or not (len(path) == 2 or path[2] == "resources"):
            continue
        yield error(
            "wrong-type",
            path,
            f"the key {path[-1]} is not text for YAML",
            "Ray ends with a TypeError when it validates the file.",
            f'Put it in quotes: "{path[-1]}".',
        )
    validator = jsonschema.Draft7Validator(ray_file("autoscaler/ray-schema.json"))
    for problem in validator.iter_errors(document.value):
        yield from _say(problem, str(kind))
    yield from _provider_keys(document, str(kind))


def _say(problem: jsonschema.ValidationError, kind: str) -> Iterator[ConfigFinding]:
    path: Path = tuple(problem.absolute_path)
    rule, value = problem.validator, problem.instance
    if rule == "additionalProperties":
        known = list(problem.schema.get("properties", {}))
        for key in value:
            # Empty ones of the old format change nothing; Ray's own examples had them for long.
            is_empty = key in ("head_node", "worker_nodes") and not value[key]
            if key not in known and not (is_empty and not path):
                yield from _unknown((*path, str(key)), str(key), known, kind)
    elif rule == "required":
        for key in problem.validator_value:
            if key not in value and not _ray_fills(key, kind):
                yield _missing((*path, key), key)
    elif rule == "type":
        wanted = problem.validator_value
        names = [_TYPES.get(w, w) for w in ([wanted] if isinstance(wanted, str) else wanted)]
        yield error(
            "wrong-type",
            path,
            f"{_where(path)} is {_kind(value)}, expected {' or '.join(names)}",
            "Ray refuses the file when it validates it.",
            _retype(value, wanted),
        )
    elif rule in ("minimum", "enum", "const"):
        yield error(
            "wrong-value",
            path,
            f"{_where(path)} is {value!r}: {problem.message}",
            "Ray refuses the file when it validates it.",
            f"Give one of {listed(problem.validator_value)}." if rule == "enum" else "Give a number of 0 or more.",
        )


def _unknown(path: Path, key: str, known: list[str], kind: str) -> Iterator[ConfigFinding]:
    if len(path) == 1 and key in _LEGACY:
        if key == "min_workers" and kind == "local":
            return
        lost = key in ("min_workers", "head_node", "worker_nodes")
        why = "Ray drops it without a word." if key == "min_workers" else "It belongs to the format before Ray 2."
        yield (warning if lost else error)("legacy-key", path, f"{key!r} is no longer read", why, _LEGACY[key])
        return
    in_docker = len(path) == 4 and path[2] == "docker"
    if in_docker and key in ("image", "head_image", "run_options"):
        fix = f"Write worker_{key} here." if key != "head_image" else "Give head_image below the top-level `docker`."
    else:
        fix = instead(key, known)
    yield error("unknown-key", path, f"there is no key {key!r} here", "Ray refuses the file: all of it.", fix)


def _missing(path: Path, key: str) -> ConfigFinding:
    if key == "resources":
        fix = 'Give what a node of this type has, e.g. resources: {"CPU": 8, "GPU": 1}; Ray finds it out on AWS only.'
    elif key == "node_config":
        fix = "Give the machine, e.g. node_config: {InstanceType: m7i.large}; without braces it would be a text."
    elif key == "provider":
        fix = "Give provider: {type: aws, region: us-west-2}, or another."
    elif key == "ssh_proxy_command":
        fix = "Give ssh_proxy_command, or leave out ssh_proxy_use_node_id."
    else:
        fix = f"Give {key}."
    return error("missing-key", path, f"{key!r} is missing", "Ray refuses the file when it validates it.", fix)


def _ray_fills(key: str, kind: str) -> bool:
    """Return whether Ray fills the key in before it validates."""
    return key == "cluster_name" or (key == "resources" and kind in ("aws", "kuberay"))


def _retype(value: Any, wanted: Any) -> str:
    if value is None:
        return "Give a value, or leave the key out; a key without a value is null in YAML."
    if wanted == "array":
        return "Begin each item with `- `."
    if wanted in ("integer", "number") and isinstance(value, str):
        return "Leave out the quotes." if value.replace(".", "", 1).isdigit() else "Give a number."
    if wanted == "integer":
        return "Give a whole number."
    if wanted == "string":
        return f'Put it in quotes: "{value}".' if not isinstance(value, dict | list) else "Give a text."
    if wanted == "boolean":
        return "Write true or false, without quotes."
    return "Indent what belongs to it by two more spaces, as `key: value`."


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    name = names.get(type(value), "a mapping" if isinstance(value, dict) else "a date")
    return f"{name} ({value!r})" if isinstance(value, bool | int | float | str) else name


def _where(path: Path) -> str:
    return repr(str(path[-1])) if path else "the file"


def _provider_keys(document: Document, kind: str) -> Iterator[ConfigFinding]:
    known = _PROVIDER_KEYS.get(kind)
    if known is None:
        return
    known = known | _ALL_PROVIDERS
    for key in document.mapping("provider"):
        if key in known or key.startswith("_"):
            continue
        if key == "module":
            fix = "Set `type: external` to have your own provider used."
        elif key in ("min_workers", "max_workers"):
            fix = "Give it to a type below available_node_types; `max_workers` also at the top."
        else:
            fix = instead(key, known - {"_config_cache_path"})
        yield error(
            "unknown-provider-key",
            ("provider", key),
            f"provider {kind} reads no key {key!r}",
            "Ray lets it pass and nobody reads it: what it was to do is not done.",
            fix,
        )
