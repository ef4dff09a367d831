"""Checks a cluster YAML against Ray's own schema, with one finding per mistake, and finds keys that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema

from raytf.cluster.providers.fallback import AUTOSTOP, MODULES
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, listed, near, stops_ray_up, warning
from raytf.doctor.local_environment import ray_file

#: Provider -> keys that its code reads. Ray's schema accepts any other key, but nothing reads it.
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

#: Keys of the format before Ray 1.3, which described the head and the workers.
_LEGACY_NODES = ("head_node", "worker_nodes")
#: Other keys of older versions of Ray -> advice on how to replace it.
_LEGACY = {
    "min_workers": "Set min_workers of a type below available_node_types; here Ray drops it without a warning.",
    "initial_workers": "Delete it; min_workers of a node type starts that many.",
    "autoscaling_mode": "Delete it; upscaling_speed sets how fast the cluster grows.",
    "target_utilization_fraction": "Delete it; upscaling_speed sets how fast the cluster grows.",
    "worker_default_node_type": "Delete it; all types but the head's are workers.",
}
_TYPES = {"object": "a mapping", "array": "a list", "integer": "a whole number", "number": "a number"}
_TYPES |= {"string": "a text", "boolean": "true or false"}
#: Missing key -> what to add.
_EXAMPLES = {
    "resources": 'the resources of a node, e.g. resources: {"CPU": 8, "GPU": 1}; Ray detects them on AWS only',
    "node_config": "the machine, e.g. node_config: {InstanceType: m7i.large}; without braces it would be a text",
    "provider": "provider: {type: aws, region: us-west-2}, or another",
    "ssh_proxy_command": "ssh_proxy_command, or delete ssh_proxy_use_node_id",
}
_REFUSED = "Ray refuses the file when it validates it."


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find keys, types and values that Ray refuses, or never reads."""
    kind = document.get("provider", "type")
    if not isinstance(document.value, dict):
        what = f"the file contains {_kind(document.value)}, expected a mapping"
        yield error("wrong-type", (), what, "Ray refuses it.", "Begin with `cluster_name: ...` and `provider: ...`.")
        return
    if isinstance(kind, str) and kind not in _PROVIDERS:
        yield _unknown_provider(kind)
    for path in document.odd_keys:
        if path[:1] == ("available_node_types",) and (len(path) == 2 or path[2] == "resources"):
            what, fix = f"YAML does not read the key {path[-1]} as text", f'Put it in quotes: "{path[-1]}".'
            yield error("wrong-type", path, what, "Ray stops with a TypeError when it validates the file.", fix)
    validator = jsonschema.Draft7Validator(ray_file("autoscaler/ray-schema.json"))
    for problem in validator.iter_errors(document.value):
        yield from _explain(problem, str(kind))
    yield from _legacy_nodes(document)
    if isinstance(kind, str):
        yield from _provider_keys(document, kind)


def _legacy_nodes(document: Document) -> Iterator[ConfigFinding]:
    """Find keys of the format before Ray 1.3; see `fillout_defaults` in autoscaler/_private/util.py of Ray."""
    keys = [key for key in _LEGACY_NODES if key in document.value]
    filled = [key for key in keys if document.value[key]]
    has_types = "available_node_types" in document.value or document.get("provider", "type") in ("local", "kuberay")
    if not keys or (not filled and (has_types or all(document.value.get(key) == {} for key in _LEGACY_NODES))):
        return  # Ray drops both if they are empty; its own examples had them for a long time
    what = f"{' and '.join(filled or keys)} at the top belong{'' if len(filled or keys) > 1 else 's'} to an older Ray"
    fix = "Write each machine as `node_config` of a type below available_node_types, and name the head's type in "
    fix += "head_node_type."
    how = "`ValidationError: Additional properties are not allowed`"
    if not has_types and len(keys) == 1:
        (other,) = {*_LEGACY_NODES} - {*keys}
        what, how = f"{what}, and available_node_types is missing", f"`KeyError: {other!r}`"
    elif not has_types and None in [document.value[key] for key in keys]:
        how = "an AttributeError"
    yield stops_ray_up("legacy-key", ((filled or keys)[0],), what, fix, how)


def _unknown_provider(kind: str) -> ConfigFinding:
    path, what = ("provider", "type"), f"there is no provider {kind!r}{near(kind, _PROVIDERS)}"
    if not kind.startswith("fake_multinode"):
        fix = f"Use one of {', '.join(_PROVIDERS)}."
        return stops_ray_up("unknown-provider", path, what, fix, "NotImplementedError")
    fake = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    why = "In Ray 2.60 this provider exits without a message."
    return error("unknown-provider", path, what, why, f"Use `type: external` with `module: {fake}`.")


def _explain(problem: jsonschema.ValidationError, kind: str) -> Iterator[ConfigFinding]:
    path: Path = tuple(problem.absolute_path)
    name = repr(str(path[-1])) if path else "the file"
    rule, value = problem.validator, problem.instance
    if rule == "additionalProperties":
        known = list(problem.schema.get("properties", {}))
        for key in value:
            if key not in known and (path or key not in _LEGACY_NODES):
                yield from _unknown((*path, str(key)), str(key), known, kind)
    elif rule == "required":
        for key in problem.validator_value:
            # Ray fills in these keys before it validates.
            is_filled_in = key == "cluster_name" or (key == "resources" and kind in ("aws", "kuberay"))
            if key not in value and not is_filled_in:
                fix = f"Add {_EXAMPLES.get(key, key)}."
                yield error("missing-key", (*path, key), f"{key!r} is missing", _REFUSED, fix)
    elif rule == "type":
        wanted = problem.validator_value
        names = [_TYPES.get(w, w) for w in ([wanted] if isinstance(wanted, str) else wanted)]
        what = f"{name} is {_kind(value)}, expected {' or '.join(names)}"
        yield error("wrong-type", path, what, _REFUSED, _retype(value, wanted))
    elif rule in ("minimum", "enum", "const"):
        fix = f"Write one of {listed(problem.validator_value)}." if rule == "enum" else "Write a number of 0 or more."
        yield error("wrong-value", path, f"{name} is {value!r}: {problem.message}", _REFUSED, fix)


def _unknown(path: Path, key: str, known: list[str], kind: str) -> Iterator[ConfigFinding]:
    if len(path) == 1 and key in _LEGACY:
        if key == "min_workers" and kind == "local":
            return
        is_dropped = key == "min_workers"
        why = "Ray drops it without a warning." if is_dropped else "Ray refuses the whole file."
        yield (warning if is_dropped else error)("legacy-key", path, f"{key!r} is no longer read", why, _LEGACY[key])
        return
    fix = instead(key, known)
    if len(path) == 4 and path[2] == "docker" and key in ("image", "head_image", "run_options"):
        fix = "Move head_image below the top-level `docker`." if key == "head_image" else f"Write worker_{key} here."
    yield error("unknown-key", path, f"there is no key {key!r} here", "Ray refuses the whole file.", fix)


def _retype(value: Any, wanted: Any) -> str:
    if value is None:
        return "Write a value, or delete the key; a key without a value is null in YAML."
    if wanted == "array":
        return "Begin each item with `- `."
    if wanted in ("integer", "number") and isinstance(value, str):
        return "Remove the quotes." if value.replace(".", "", 1).isdigit() else "Write a number."
    if wanted == "integer":
        return "Write a whole number."
    if wanted == "string":
        return f'Put it in quotes: "{value}".' if not isinstance(value, dict | list) else "Write a text."
    if wanted == "boolean":
        return "Write true or false, without quotes."
    return "Write its content below it as `key: value`, indented by two more spaces."


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    name = names.get(type(value), "a mapping" if isinstance(value, dict) else "a date")
    return f"{name} ({value!r})" if isinstance(value, bool | int | float | str) else name


def _provider_keys(document: Document, kind: str) -> Iterator[ConfigFinding]:
    if kind not in _PROVIDER_KEYS:
        return
    known = _PROVIDER_KEYS[kind] | _ALL_PROVIDERS
    for key in document.mapping("provider"):
        if key in known or key.startswith("_"):
            continue
        if key == AUTOSTOP and kind in MODULES.values():
            fix = f"Set `type: external` and `module: raytf.cluster.providers.{kind}.Provider`, which reads it."
        elif key == "module":
            fix = "Set `type: external` to use your own provider."
        elif key in ("min_workers", "max_workers"):
            fix = "Set it for a type below available_node_types; `max_workers` may also be at the top."
        else:
            fix = instead(key, known - {"_config_cache_path"})
        what, why = f"provider {kind} reads no key {key!r}", "Ray accepts the key, but nothing reads it."
        yield error("unknown-provider-key", ("provider", key), what, why, fix)
