"""`raytf serve MODEL`: serve a model with the REST API of TensorFlow Serving, on Ray Serve."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Interval

from raytf.commands._places import model_uri
from raytf.config.terminal_text import say
from raytf.errors import ConfigError, not_installed
from raytf.inference import versions
from raytf.inference.serving.served_versions import Policy, bounds
from raytf.storage.storage import PREFLIGHT_SECONDS, Storage, within

#: The environment variable that holds the token by default.
TOKEN_VARIABLE = "RAYTF_SERVE_TOKEN"


@dataclass(frozen=True)
class Serve:
    """Serve a model with the REST API of TensorFlow Serving, until Ctrl-C or SIGTERM.

    If RAY_ADDRESS is set, as in a job of `ray job submit`, replicas run on that cluster; otherwise raytf starts Ray on
    this machine. New versions are loaded automatically.
    """

    model: tyro.conf.Positional[str]
    """A run with an export (STORAGE/NAME, or its name in ~/raytf-runs), a folder of versions such as
    s3://bucket/models/mnist, or a version in such a folder."""
    name: str | None = None
    """Name of the model in URLs; by default the name of the run or folder."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all addresses of this machine."""
    port: Annotated[int, Interval(ge=1, le=65535)] = 8501
    """Port to listen on; the default is the port of TensorFlow Serving."""
    version: Annotated[int | None, Ge(0)] = None
    """The version for requests without one, loaded even if --versions leaves it out; by default the newest."""
    versions: str = "latest"
    """Which versions are loaded: latest, latest:N (the newest N), all, or versions such as 1,3."""
    poll_seconds: Annotated[float, Interval(ge=0.1, lt=math.inf)] = 5.0
    """Seconds between two checks for new versions."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Maximum number of records in one call of the model; 1 never waits for other requests."""
    batch_wait_ms: Annotated[float, Interval(ge=0, lt=math.inf)] = 2.0
    """Milliseconds that the first request of a batch waits for others."""
    replicas: Annotated[str, tyro.conf.arg(metavar="N|MIN:MAX")] = "1"
    """Number of replicas, or the fewest and the most."""
    target_requests: Annotated[float, Interval(ge=1, lt=math.inf)] = 16.0
    """Target number of requests in progress per replica; above it replicas are added, below it removed."""
    cpus_per_replica: Annotated[float, Interval(ge=0.01, lt=math.inf)] = 1.0
    """CPUs and TensorFlow threads of each replica."""
    gpus_per_replica: Annotated[float, Interval(ge=0, lt=math.inf)] = 0.0
    """GPUs of each replica; with 0.5, two replicas share one GPU."""
    max_body_mb: Annotated[float, Interval(ge=0.001, lt=math.inf)] = 32.0
    """Largest body of a request, in MiB."""
    auth_token: bool = False
    """Require the header `Authorization: Bearer TOKEN`, with the token from the environment variable
    RAYTF_SERVE_TOKEN."""
    auth_token_file: str | None = None
    """Require the header as for --auth-token, with the token from the first line of this file."""
    proxies: Literal["head", "every-node"] = "head"
    """Where to listen: on the cluster's head, or on each of its nodes, for a load balancer."""
    verbose: bool = False
    """Also show the messages of TensorFlow and Ray."""

    def check(self) -> None:
        """Check that the flags can work.

        Raises:
            ConfigError: a flag cannot work; the message says what was expected and how to fix it.
        """
        if self.auth_token and self.auth_token_file is not None:
            raise ConfigError("--auth-token and --auth-token-file exclude each other: pass one of them.")
        if self.name is not None and not (self.name and all(c.isalnum() or c in "-_." for c in self.name)):
            raise ConfigError(f"--name {self.name}: expected letters, digits, '-', '_' and '.', such as mnist.")


def main(flags: Serve) -> None:
    """Run the command."""
    flags.check()
    policy, sizes = Policy.of(flags.versions, flags.version), bounds("--replicas", flags.replicas)
    digest = _token_digest(flags)
    place = model_uri(flags.model)
    storage = Storage(place)
    models, name, named = within(PREFLIGHT_SECONDS, lambda: versions.models_of(place), storage.locate(""))
    name = flags.name or name
    if named is not None:
        if flags.version not in (None, named):
            raise ConfigError(f"--version {flags.version}: {storage.locate('')} is version {named}.")
        policy = Policy(0, (named,), named)
    versions.choose(models, policy.required)
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


def _token_digest(flags: Serve) -> str | None:
    """Return the SHA-256 of the token, which replicas compare, or None without authentication."""
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
                f"--auth-token: {TOKEN_VARIABLE} is not set. Set it to the token, or pass --auth-token-file."
            )
    else:
        return None
    return hashlib.sha256(token.encode()).hexdigest()


def _say(message: str) -> None:
    say(f"raytf serve: {message}", lines=True)
