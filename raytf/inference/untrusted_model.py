"""Finds parts of a model's configuration that, when Keras loads it, run code from the file or read other files.

Keras's safe mode refuses most of them, and calls all of them unsafe. To decide whether to trust a run, a user needs to
know more: the job's author wrote the code of a Lambda layer, but a path is read on the machine that exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Layers that take a vocabulary, which may be the path of a file.
_LOOKUPS = ("StringLookup", "IntegerLookup", "TextVectorization", "IndexLookup")
#: Class -> the code that runs when it is created. A Lambda layer of a named function contains no code.
_CODE = {
    "__lambda__": "Python code",
    "TorchModuleWrapper": "a pickled PyTorch module, which is code",
    "JaxLayer": "functions for JAX",
    "FlaxLayer": "a Flax module and its functions",
}
#: Packages whose classes and functions Keras finds by name.
_KERAS = ("keras", "keras_hub", "keras_cv", "keras_nlp", "builtins")


@dataclass(frozen=True)
class UntrustedPart:
    """A part of a configuration that runs code or reads files.

    Attributes:
        what: the layer and what it would do, as part of a sentence.
        fix: what the job's author can do; empty if it is enough to trust the run.
    """

    what: str
    fix: str = ""

    @property
    def reads_files(self) -> bool:
        return bool(self.fix)


def find(config: Any) -> list[UntrustedPart]:
    """Return all untrusted parts, also in nested models, wrappers and losses; parts that read files come first.

    Args:
        config: a model's configuration as Keras serializes it; JSON values.
    """
    parts = dict.fromkeys(part for value, near in _objects(config) for part in _inspect(value, near))
    return sorted(parts, key=lambda part: not part.reads_files)


def foreign(config: Any) -> list[str]:
    """Return the names of classes and functions outside Keras, which must be registered because none is imported."""
    names: dict[str, None] = {}
    for part, _ in _objects(config):
        module = part.get("module")
        if isinstance(module, str) and module.partition(".")[0] not in _KERAS:
            name = part["config"] if part["class_name"] == "function" else part["class_name"]
            names[f"{module}.{name}"] = None
    return list(names)


def _objects(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each serialized object with its name for users, or the name of the nearest enclosing named object."""
    waiting: list[tuple[Any, str]] = [(config, "")]
    while waiting:
        value, near = waiting.pop()
        if isinstance(value, list):
            waiting += [(inner, near) for inner in reversed(value)]
        elif isinstance(value, dict):
            if isinstance(value.get("class_name"), str):
                own = value.get("config")
                name = own.get("name") if isinstance(own, dict) else None
                near = f"{value['class_name']} layer {_short(name)}" if isinstance(name, str) else near
                yield value, near
            waiting += [(inner, near) for inner in reversed(value.values())]


def _inspect(part: dict[str, Any], near: str) -> Iterator[UntrustedPart]:
    kind, config = part["class_name"], part.get("config")
    config = config if isinstance(config, dict) else {}
    layer = near or f"a {kind}"
    if kind == "TFSMLayer":
        place = f" in {_short(config.get('filepath'))}"
        fix = "Build that layer from layers of Keras, or let the run finish, which exports the model as it is."
        yield UntrustedPart(f"{layer}, which loads code from a SavedModel{place}", fix)
    elif kind in _LOOKUPS and isinstance(config.get("vocabulary"), str):
        fix = "Pass the vocabulary to the layer as a list, which is saved with the model."
        yield UntrustedPart(f"{layer}, which reads its vocabulary from the file {_short(config['vocabulary'])}", fix)
    elif kind in _CODE:
        yield UntrustedPart(f"{layer}, whose configuration holds {_CODE[kind]}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
