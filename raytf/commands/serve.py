"""`raytf serve MODEL`: the REST API of TensorFlow Serving, on Ray Serve."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from raytf.commands._places import run_uri
from raytf.config.terminal_text import say
from raytf.errors import ConfigError, not_installed
from raytf.inference.serving.version_policy import Policy, bounds
from raytf.storage.storage import Storage
from raytf.storage.time_limit import PREFLIGHT_SECONDS, within

#: Where the token is looked for when no flag says where.
TOKEN_VARIABLE = "RAYTF_SERVE_TOKEN"


@dataclass(frozen=True)
class Serve:
    """Serve a model with the REST API of TensorFlow Serving, until Ctrl-C or SIGTERM.

    Where RAY_ADDRESS is set, as in a job of `ray job submit`, replicas run on that cluster; else on a Ray of this
    machine's own. New versions go live by themselves.
    """

    model: tyro.conf.Positional[str]
    """A run with an export (STORAGE/NAME, or its name in ~/raytf-runs), a folder of versions such as
    s3://bucket/models/mnist, or one of those."""
    name: str | None = None
    """Name of the model in URLs; by default that of the run or folder."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all of this machine's."""
    port: int = 8501
    """Port to listen on, by default that of TensorFlow Serving."""
    version: int | None = None
    """The version that answers where a request names none, loaded whatever --versions says; by default the newest."""
    versions: str = "latest"
    """Which versions are loaded: latest, latest:N (the newest N), all, or versions such as 1,3."""
    poll_seconds: float = 5.0
    """Between two looks for new versions."""
    batch_size: int = 64
    """Most records that go through the model at once; 1 never waits for others."""
    batch_wait_ms: float = 2.0
    """How long the first request of a batch waits for others."""
    replicas: Annotated[str, tyro.conf.arg(metavar="N|MIN:MAX")] = "1"
    """Number of replicas, or the fewest and the most."""
    target_requests: float = 16.0
    """Requests under way in a replica, on average, above which one is added and below which one goes."""
    cpus_per_replica: float = 1.0
    """CPUs, and threads of TensorFlow, for each replica."""
    gpus_per_replica: float = 0.0
    """GPUs for each replica; 0.5 has two share one."""
    max_body_mb: float = 32.0
    """Largest body of a request, in MiB."""
    auth_token: bool = False
    """Want the header `Authorization: Bearer TOKEN`, with the token in the environment variable RAYTF_SERVE_TOKEN."""
    auth_token_file: str | None = None
    """Likewise, with the token in the first line of this file."""
    proxies: Literal["head", "every-node"] = "head"
    """Where to listen: on the cluster's head, or on each of its nodes, for a load balancer."""
    verbose: bool = False
    """Show the messages of TensorFlow and Ray too."""

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: says which flag, what was expected and how to fix it.
        """
        for flag, value, least, most in (
            ("--port", self.port, 1, 65535),
            ("--poll-seconds", self.poll_seconds, 0.1, math.inf),
            ("--batch-size", self.batch_size, 1, math.inf),
            ("--batch-wait-ms", self.batch_wait_ms, 0, math.inf),
            ("--target-requests", self.target_requests, 1, math.inf),
            ("--cpus-per-replica", self.cpus_per_replica, 0.01, math.inf),
            ("--gpus-per-replica", self.gpus_per_replica, 0, math.inf),
            ("--max-body-mb", self.max_body_mb, 0.001, math.inf),
            ("--version", 1 if self.version is None else self.version, 0, math.inf),
        ):
            if not least <= value <= most or (math.isinf(value)):
                limit = f"from {least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
                raise ConfigError(f"{flag} {value:g}: expected a number, {limit}.")
        if self.auth_token and self.auth_token_file is not None:
            raise ConfigError("--auth-token and --auth-token-file exclude each other: give one of them.")
        if self.name is not None and not (self.name and all(c.isalnum() or c in "-_." for c in self.name)):
            raise ConfigError(f"--name {self.name}: expected letters, digits, '-', '_' and '.', such as mnist.")


def main(flags: Serve) -> None:
    """Run the command."""
    flags.check()
    policy, sizes = Policy.of(flags.versions, flags.version), bounds("--replicas", flags.replicas)
    digest = _token_digest(flags)
    place = run_uri(flags.model)
    storage = Storage(place)
    found: list[Any] = []
    within(PREFLIGHT_SECONDS, lambda: found.append(_find(place)), storage.locate(""))
    models, name, named = found[0]
    name = flags.name or name
    if named is not None:
        if flags.version not in (None, named):
            raise ConfigError(f"--version {flags.version}: {storage.locate('')} is version {named}.")
        policy = Policy(0, (named,), named)
    _check_versions(models, policy)
    try:
        from raytf.inference.serving import application  # Ray is not needed for --help
        from raytf.inference.serving.replica import ReplicaSettings
    except ImportError as error:
        raise not_installed("raytf serve", "serve", error.name) from error
    settings = ReplicaSettings(
        models.uri if not models.is_local else models.root,
        name,
        policy,
        max(1, math.ceil(flags.cpus_per_replica)),
        flags.poll_seconds,
        flags.batch_size,
        flags.batch_wait_ms / 1000,
        int(flags.max_body_mb * 2**20),
        digest,
    )
    plan = application.ServingPlan(
        settings,
        flags.host,
        flags.port,
        sizes,
        flags.target_requests,
        flags.cpus_per_replica,
        flags.gpus_per_replica,
        flags.proxies,
        flags.verbose,
    )
    _say(f"{name}: {models.locate('')}; starting {flags.replicas} replica{'' if sizes == (1, 1) else 's'}")
    application.run(plan, _say)


def _find(uri: str) -> Any:
    from raytf.inference import versions

    return versions.models_of(uri)


def _check_versions(models: Storage, policy: Policy) -> None:
    from raytf.inference import versions

    found = versions.inspect(models)
    there = [version.number for version in versions.whole(found)]
    missing = policy.missing(there)
    broken = {version.number: version.problem for version in found}
    if missing:
        why = f": {broken[missing[0]]}" if broken.get(missing[0]) else ""
        known = ", ".join(map(str, sorted(there))) or "none"
        raise ConfigError(f"version {missing[0]} is not in {models.locate('')}{why}. There are {known}.")
    if not there:
        raise ConfigError(f"{models.locate('')} has no whole version: {next(iter(broken.values()))}.")


def _token_digest(flags: Serve) -> str | None:
    """SHA-256 of the token; the token itself goes nowhere."""
    if flags.auth_token_file is not None:
        try:
            with open(os.path.expanduser(flags.auth_token_file), encoding="utf-8") as stream:
                token = stream.readline().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--auth-token-file {flags.auth_token_file} cannot be read: {error}") from error
        if not token:
            raise ConfigError(
                f"--auth-token-file {flags.auth_token_file} is empty. Expected the token in its first line."
            )
    elif flags.auth_token:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ConfigError(
                f"--auth-token: {TOKEN_VARIABLE} is not set. Set it to the token, or give --auth-token-file."
            )
    else:
        return None
    return hashlib.sha256(token.encode()).hexdigest()


def _say(message: str) -> None:
    say(f"raytf serve: {message}", lines=True)
