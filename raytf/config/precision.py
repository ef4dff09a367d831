"""The dtypes that layers compute with, from the job's settings in Keras and from `--mixed-precision`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raytf import _keras
from raytf.errors import ConfigError

#: The policy of Keras for each choice of the flag.
POLICIES = {"off": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
_MIXED = "mixed_"


@dataclass(frozen=True)
class Precision:
    """The precision of a layer that sets none itself.

    Attributes:
        policy: name of the global dtype policy.
        floatx: Keras's default float.
        config: the policy as Keras serializes it, if the name alone does not define it.
    """

    policy: str = "float32"
    floatx: str = "float32"
    config: Any = None


#: Keras's own defaults.
DEFAULT = Precision()


def of_process() -> Precision:
    """Return the precision that is set in this process, or Keras's defaults if Keras is not loaded."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "config"):
        return DEFAULT
    floatx = keras.config.floatx()
    policy = _keras.own_dtype_policy()
    if policy is None:
        return Precision(floatx, floatx)
    is_plain = type(policy) is keras.DTypePolicy
    return Precision(policy.name, floatx, None if is_plain else keras.dtype_policies.serialize(policy))


def parse(document: Any) -> Precision:
    """Parse a precision from a run's folder, written by `dataclasses.asdict`; return the defaults if it is invalid."""
    if not isinstance(document, dict):
        return DEFAULT
    policy, floatx, config = (document.get(key) for key in ("policy", "floatx", "config"))
    if not isinstance(policy, str) or floatx not in ("float16", "bfloat16", "float32", "float64"):
        return DEFAULT
    return Precision(policy, floatx, config if isinstance(config, dict) else None)


def choose(flag: str | None, own: Precision) -> Precision:
    """Return the precision to set before a model function is called.

    Raises:
        ConfigError: the flag contradicts the job's own precision.
    """
    if flag is None:
        return own
    if flag == "off":
        if own.policy.startswith(_MIXED):
            raise _contradiction(flag, f"the job has set the dtype policy {own.policy}")
        return own
    if own.policy not in ("float32", POLICIES[flag]):
        raise _contradiction(flag, f"the job has set the dtype policy {own.policy}")
    return Precision(POLICIES[flag], own.floatx)


def check_made(flag: str | None, after: Precision, layers: Iterable[str]) -> None:
    """Refuse a model that contradicts `--mixed-precision`. `after` is the precision after the model function returned,
    `layers` are the policies of its layers."""
    if flag is None:
        return
    if after.policy.startswith(_MIXED) if flag == "off" else after.policy != POLICIES[flag]:
        raise _contradiction(flag, f"the model function has set the dtype policy {after.policy}")
    other = sorted({name for name in layers if name.startswith(_MIXED) and name != POLICIES[flag]})
    if other:
        raise _contradiction(flag, f"the model has layers of dtype policy {other[0]}")


def check_for_servers(policy: str) -> None:
    """Refuse a policy that parameter servers do not support, because it needs a loss scale."""
    if policy == POLICIES["float16"]:
        raise ConfigError(
            f"the dtype policy {policy} with --strategy parameter-server: all workers would write the loss scale at "
            "the same time. Use mixed_bfloat16, which needs no loss scale."
        )


def identity(flag: str | None, own: Precision) -> dict[str, str]:
    """Return the texts that must not change when a run is resumed. A policy counts as the flag that sets it."""
    chosen = choose(flag, own)
    name = next((flag for flag, policy in POLICIES.items() if policy == chosen.policy), None)
    other = {} if name else {"dtype policy": chosen.policy}
    default = {} if chosen.floatx == "float32" else {"floatx": chosen.floatx}
    return {"--mixed-precision": name or "off", **other, **default}


def _contradiction(flag: str, but: str) -> ConfigError:
    return ConfigError(
        f"--mixed-precision {flag}, but {but}. Leave out the flag to use the job's policy, or remove the "
        "policy from the job."
    )
