"""Where to look for what is left of a cluster, by its file."""

from __future__ import annotations

from functools import partial

from raytf.cluster.check import kuberay
from raytf.cluster.check.document import parse
from raytf.cluster.check.finding import place as text_of
from raytf.cluster.check.local_environment import Surroundings
from raytf.cluster.check.local_files import placeholders
from raytf.cluster.check.run import ODD
from raytf.cluster.clouds.platform import Platform, place_of
from raytf.cluster.leftovers import aws, azure, gcp, kube, ssh
from raytf.cluster.leftovers.resource import Leftovers
from raytf.errors import ConfigError, RaytfError, one_line

_LOOK = {Platform.AWS: aws.look, Platform.GCP: gcp.look, Platform.AZURE: azure.look}


def look(name: str, text: str, here: Surroundings, trust: bool = False) -> Leftovers:
    """What is left of the cluster of a file.

    Args:
        name: of the file, for messages.
        text: the file that `ray up` or `kubectl apply` was called with.
        here: this machine.
        trust: run what the file wants to be run on this machine.

    Raises:
        ConfigError: the file says of no cluster, or there is nothing to look with.
    """
    documents, found = parse(text)
    if not documents or any(f.code == "yaml-syntax" for f in found):
        raise ConfigError(f"{name} is not YAML of a cluster. `raytf check --offline {name}` says what is wrong.")
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    if manifests:
        return kube.look(manifests, here)
    document = documents[0]
    of_hosts = place_of(document) is Platform.HOSTS
    asks = partial(ssh.look, trust=trust) if of_hosts else _LOOK.get(place_of(document))
    if asks is None:
        kind = document.get("provider", "type")
        raise ConfigError(
            f"{name}: raytf cannot look for what provider {kind!r} left. Expected aws, gcp, azure, local."
        )
    for f in placeholders(document):
        if f.path[0] in ("provider", "cluster_name", "auth"):
            raise ConfigError(f"{name}: {text_of(f.path)} is not filled in. Expected the value that `ray up` had.")
    try:
        return asks(document, here)
    except RaytfError:
        raise
    except ODD as problem:
        raise ConfigError(
            f"{name}: a value is of a kind that nobody expected there ({type(problem).__name__}: "
            f"{one_line(problem, 200)}). `raytf check --offline {name}` says more."
        ) from None
