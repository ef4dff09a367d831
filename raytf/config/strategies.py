"""The strategies, their kinds, and what settings say of those that do not take them."""

from __future__ import annotations

from typing import Literal, get_args

from raytf.config.setting import Refused

Strategy = Literal["multi-worker-mirrored", "mirrored", "one-device", "central-storage", "parameter-server", "tpu"]

#: Strategies of one process: one worker, whose devices share the work.
ONE_WORKER = ("mirrored", "one-device", "central-storage", "tpu")

#: Those that take all GPUs of their machine, or logical CPU devices in their place.
ALL_DEVICES = ("mirrored", "central-storage")

#: Those whose workers add gradients over the network.
OVER_THE_NETWORK = ("multi-worker-mirrored",)
#: Those whose weights are on servers.
SERVERS = ("parameter-server",)


def all_but(*names: str) -> tuple[str, ...]:
    """The other strategies."""
    return tuple(name for name in get_args(Strategy) if name not in names)


def not_with_servers(
    why: str, given: str = "{flag}", unless: tuple[object, ...] = (), sync_replicas: bool | None = None
) -> Refused:
    """Parameter servers do nothing with the setting, or cannot.

    Args:
        given: how the message begins.
        unless, sync_replicas: as of `Refused`.
    """
    message = f"{given} with --strategy {{strategy}}: {why}. Leave it out."
    return Refused(SERVERS, message, unless, sync_replicas)


#: Of a setting of parameter servers.
OF_SERVERS = Refused(
    all_but(*SERVERS),
    "{flag} says something about parameter servers, and --strategy is {strategy}. Give --strategy parameter-server, or "
    "leave out {flag}.",
)
#: How the message of a setting of devices begins.
ONLY_DEVICES = (
    f"{{given}} with --strategy {{strategy}}: only {' and '.join(ALL_DEVICES)} share the work among devices of one "
    "machine. "
)
