"""The state of callbacks, which rank 0 sends to checkpoints, other ranks and the program, to load it into their copies.

The state contains every object that callbacks can reach and have changed since training began: attributes of callbacks,
and lists, dicts, arrays, variables and globals that they share with each other or with the program. A process that
loads the state changes its own copies of these objects in place.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from raytf import _keras
from raytf.checkpoint import codec
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage
from raytf.training.user import later_files, object_graph
from raytf.training.user.object_codec import Content, Reader, Writer

#: The file with the state in the run's folder, and the name of the part with the values that are not arrays.
STATE_FILE, _VALUES = "callbacks.safetensors", "values"
#: Parts of the values: changed objects that the program has, too, and new objects.
OBJECTS, _NEW = "objects", "new"
#: Packages whose objects contain no state of the program, or only in variables.
_QUIET = frozenset({"keras", "tensorflow", "numpy", "raytf", "ray", "builtins", "absl"})
#: Modules of the standard library whose objects change with use.
_STATEFUL = frozenset({"itertools", "queue", "_queue"})


class KeptObjects:
    """The objects that callbacks can reach, with their contents before training and before Keras's `set_model`. The
    variables of the model and of its optimizer are left out, because they are restored separately."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model):
        self._callbacks = callbacks
        self._others = {id(v) for v in (*model.variables, *getattr(model.optimizer, "variables", ()))}
        parts = _parts_of(model)
        #: By label: the objects whose changes are kept, and these objects together with the parts of the model.
        self._objects = object_graph.labelled(list(callbacks))
        self._known = self._objects | parts
        self._labels = {id(value): label for label, value in self._known.items()}
        mine = {id(part) for part in parts.values()}
        self._objects = {label: value for label, value in self._objects.items() if id(value) not in mine}
        large = {label: value for label, value in self._objects.items() if object_graph.is_large(value)}
        self._items = {label: object_graph.items_of(value) for label, value in large.items()}
        writer = self._writer()
        #: The contents before training of the objects that can change, by label.
        self._before: dict[str, Content] = {}
        for label, value in self._objects.items():
            content = {} if label in large else writer.content(label, value)
            if content:
                self._before[label] = content
        self._lost_before = writer.lost

    def _writer(self) -> Writer:
        return Writer(self._labels, self._others)

    @property
    def unsent(self) -> list[str]:
        """Return the place and class of each object whose changes cannot be sent."""
        opaque = {label: type(value).__name__ for label, value in self._objects.items() if _is_opaque(value)}
        lost = {label: kind for label, kind in self._lost_before.items() if not self._is_of_keras(label)}
        return [f"{label} ({kind})" for label, kind in (opaque | lost).items()]

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the changes that callbacks have made, as JSON values and arrays."""
        values, arrays, _ = self._changes()
        return values, arrays

    def lost(self) -> list[str]:
        """Return the place and class of each object that callbacks have set and that cannot be sent."""
        return [f"{label} ({kind})" for label, kind in self._changes()[2].items()]

    def _changes(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
        later_files.flush()
        writer = self._writer()
        objects: dict[str, Content] = {}
        for label, value in self._objects.items():
            if label in self._items and _are_same(self._items[label], value):
                continue
            if label in self._before or label in self._items:
                changed = _changed(self._before.get(label, {}), writer.content(label, value))
                if changed:
                    writer.take_arrays(changed, value)
                    objects[label] = changed
        lost = {k: v for k, v in writer.lost.items() if k not in self._lost_before and not self._is_of_keras(k)}
        return ({OBJECTS: objects, _NEW: writer.new} if objects else {}), writer.arrays, lost

    def load(self, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[str]:
        """Apply the changes that `state` returned; return the labels of the objects for which this failed."""
        objects = values.get(OBJECTS, {})
        try:
            reader = Reader(self._known, values.get(_NEW, {}), arrays, self._others)
        except Exception:  # the state is damaged, or the program had other classes
            return sorted(objects)
        failed = []
        for label, content in objects.items():
            try:
                reader.fill(self._objects[label], content)
            except Exception:  # for the same reasons
                failed.append(label)
        return failed

    def _is_of_keras(self, label: str) -> bool:
        """Return whether an object belongs to one of Keras's own callbacks, which recreate their objects."""
        place = label.partition("]")[0].removeprefix("callbacks[")
        return place.isdigit() and type(self._callbacks[int(place)]).__module__.startswith("keras.")


def _parts_of(model: keras.Model) -> dict[str, Any]:
    """Return the parts of the model that callbacks can reach, by label: layers, the optimizer, and variables."""
    layers = {f"model.layer {i}": layer for i, layer in enumerate(_keras.layers_within(model))}
    variables = {f"model.variable {i}": variable for i, variable in enumerate(model.variables)}
    return {**layers, **variables, "model.optimizer": model.optimizer, "model": model}


def keep(run: Storage, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write the state at the end of a run to the run's folder, for `kept`."""
    if values:
        text = np.frombuffer(json.dumps(values).encode(), np.uint8)
        run.put(STATE_FILE, codec.encode({**arrays, _VALUES: text}))


def kept(run: Storage) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the values and arrays that `keep` wrote; empty if it wrote none.

    Raises:
        CheckpointError, DamagedFileError: the file is damaged.
    """
    data = run.get_or_none(STATE_FILE)
    tensors = {} if data is None else codec.decode(data)
    if _VALUES not in tensors:
        return {}, tensors
    shape = untrusted_json.values(untrusted_json.values(untrusted_json.anything))
    return untrusted_json.parse(tensors.pop(_VALUES).tobytes(), run.locate(STATE_FILE), shape), tensors


def load_old(
    callbacks: Sequence[keras.callbacks.Callback], values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Restore a state in the format of raytf 0.1 and earlier: attributes of callbacks, by place and class."""
    for i, callback in enumerate(callbacks):
        key = f"callback/{i:03d}/{type(callback).__name__}"
        if key not in values:
            continue
        own = dict(values[key])
        for name, value in values[key].items():
            if isinstance(value, dict) and set(value) == {"arrays"}:
                names = [f"{key}/{name}/{j:05d}" for j in range(value["arrays"])]
                if set(names) <= arrays.keys():
                    own[name] = [arrays[each] for each in names]
                else:
                    del own[name]
        if hasattr(callback, "set_state"):
            callback.set_state(own)
        else:
            vars(callback).update(own)


def _changed(before: Content, now: Content) -> Content:
    """Return the parts of an object's content that have changed; attributes are compared one by one."""
    apart = ("attributes", "names")
    parts = {key: value for key, value in now.items() if key not in apart and _differs(before, key, value)}
    attributes = before.get("attributes", {})
    own = {name: v for name, v in now.get("attributes", {}).items() if _differs(attributes, name, v)}
    gone = sorted(set(before.get("names", ())) - set(now.get("names", ())))
    return parts | ({"attributes": own} if own else {}) | ({"gone": gone} if gone else {})


def _differs(before: Mapping[str, Any], name: str, now: Any) -> bool:
    # New objects are only numbers here, which do not show whether their contents changed.
    return name not in before or before[name] != now or _has_new(now)


def _has_new(value: Any) -> bool:
    if not isinstance(value, list) or object_graph.has_scalars_only(value):
        return isinstance(value, list) and value[:1] == ["#"]
    return any(_has_new(each) for each in value)


def _are_same(before: list[Any], container: Any) -> bool:
    now = object_graph.items_of(container)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _is_opaque(value: Any) -> bool:
    """Return whether an object has a state that may change but cannot be sent."""
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    if root in _QUIET or (root in sys.stdlib_module_names and root not in _STATEFUL):
        return False
    return not object_graph.is_record(value) and object_graph.same_kind(value) is None and not isinstance(value, type)
