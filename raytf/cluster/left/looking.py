"""Where to look for what is left of a cluster, by its file."""

from __future__ import annotations

from raytf.cluster.check import kuberay
from raytf.cluster.check.document import parse
from raytf.cluster.check.files import placeholders
from raytf.cluster.check.finding import place as text_of
from raytf.cluster.check.surroundings import Surroundings
from raytf.cluster.left import aws, azure, gcp, kube, ssh
from raytf.cluster.left.things import Left
from raytf.cluster.place import Place, place_of
from raytf.errors import ConfigError

_LOOK = {Place.AWS: aws.look, Place.GCP: gcp.look, Place.AZURE: azure.look, Place.HOSTS: ssh.look}


def look(name: str, text: str, here: Surroundings) -> Left:
    """What is left of the cluster of a file.

    Args:
        name: of the file, for messages.
        text: the file that `ray up` or `kubectl apply` was called with.
        here: this machine.

    Raises:
        ConfigError: the file says of no cluster, or there is nothing to look with.
    """
    documents, found = parse(text)
    if not documents or any(f.code == "yaml-syntax" for f in found):
        raise ConfigError(f"{name} is no YAML of a cluster. `raytf check --offline {name}` says what is wrong.")
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    if manifests:
        return kube.look(manifests, here)
    document = documents[0]
    asks = _LOOK.get(place_of(document))
    if asks is None:
        kind = document.get("provider", "type")
        raise ConfigError(
            f"{name}: raytf cannot look for what provider {kind!r} left. Expected aws, gcp, azure, local."
        )
    for f in placeholders(document):
        if f.path[0] in ("provider", "cluster_name", "auth"):
            raise ConfigError(f"{name}: {text_of(f.path)} is not filled in. Expected the value that `ray up` had.")
    return asks(document, here)
