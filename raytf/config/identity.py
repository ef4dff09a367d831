"""The settings that must not change when a run is resumed, as texts that can be compared.

They are the settings whose fields have an `Identity` annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from raytf.config import precision
from raytf.config.precision import Precision
from raytf.config.setting import Identity, Setting, When
from raytf.config.train_config import TrainConfig, every_setting

#: Flags that must not change in a run with parameter servers.
OF_STRATEGY = tuple(s.flag for s in every_setting() if s.identity and s.identity.when is When.WITH_SERVERS)


def beside(config: TrainConfig) -> str:
    """Return how to start another run if a different one is in storage, with flags or keyword arguments as typed."""
    return config.as_typed("To start another run beside it, pass --new, or another --run name.")


def strategy_identity(config: TrainConfig) -> dict[str, str]:
    """Return the strategy settings that must not change; empty without parameter servers."""
    return _of_settings(config, (When.WITH_SERVERS,))


def batch_identity(config: TrainConfig, records: int, own: Precision = precision.DEFAULT) -> dict[str, str]:
    """Return the settings and the data size that must not change when a run is resumed, without TensorFlow."""
    return {
        **_of_settings(config, tuple(When)),
        # Replaces the flag's text: without the flag, the job's own dtype policy counts.
        **precision.identity(config.compute.mixed_precision, own),
        "training records": str(records),
    }


def differences(before: dict[str, str], now: dict[str, str]) -> str:
    """Return how two identities differ, for people; empty if they are the same."""
    lines = []
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key, "nothing"), now.get(key, "nothing")
        if old != new:
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            lines.append(f"{key}: {_around(old, at)} in storage, {_around(new, at)} now")
    return "; ".join(lines)


def _around(text: str, at: int, width: int = 60) -> str:
    if len(text) <= width:
        return text
    start = max(0, at - width // 3)
    return f"{'...' if start else ''}{text[start : start + width]}{'...' if start + width < len(text) else ''}"


#: The value that a run uses if the flag is not passed, for settings whose default is None.
_EFFECTIVE: dict[str, Callable[[TrainConfig], Any]] = {
    "logical_shards": lambda config: config.logical_shards,
    "cpus_per_worker": lambda config: config.cluster.cpus,
}


def _of_settings(config: TrainConfig, when: Collection[When]) -> dict[str, str]:
    return {
        setting.flag: _text(setting, its, config)
        for setting in every_setting()
        if (its := setting.identity) is not None
        and its.when in when
        and its.within is None
        and _counts(setting, its.when, config)
    }


def _text(setting: Setting, identity: Identity, config: TrainConfig) -> str:
    values = config.values
    if setting.name in _EFFECTIVE:
        values[setting.name] = _EFFECTIVE[setting.name](config)
    return (identity.text or f"{{{setting.name}}}").format_map(values)


def _counts(setting: Setting, when: When, config: TrainConfig) -> bool:
    match when:
        case When.ALWAYS:
            return True
        case When.CHANGED:
            return bool(config.values[setting.name] != setting.default)
        case When.EXACT:
            return config.compute.exact
        case When.WITH_SERVERS:
            return config.strategy.has_servers
