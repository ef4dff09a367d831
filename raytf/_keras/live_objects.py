"""Pickles live Keras objects attribute by attribute: models, layers, optimizers, metrics and tensors.

Keras pickles an object through a `.keras` file. The object's class needs a `get_config`, and attributes that were set
later are lost. But programs freeze models, add optimizers and trackers to them, and share layers. Here all attributes
are pickled, except those that belong to the process: traced functions, strategies, and keys made of addresses, which
are created again. Loading creates variables, so only a process that computes with the objects may load the pickle.
Nothing is imported in a process without Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

#: Methods that a layer's constructor wraps in each object.
_WRAPPED = ("build", "quantize")
#: Functions that `fit`, `evaluate` and `predict` trace at their first call.
_TRACED = ("train_function", "test_function", "predict_function")

#: Calls to make once a pickle is loaded, which complete objects that refer to others by address.
_unfinished: list[Callable[[], None]] = []

#: The tuple that `object.__reduce__` returns, with a function that sets the state as its last item.
Reduced = tuple[Callable[..., Any], tuple[Any, ...], Any, None, None, Callable[[Any, Any], None]]


def loaded() -> None:
    """Complete the objects of a loaded pickle. Call this before any of them is used."""
    while _unfinished:
        _unfinished.pop()()


def registered() -> dict[str, Any]:
    """Return the classes and functions that the program has registered with Keras for loading models, by name."""
    if "keras" not in sys.modules:
        return {}
    import keras

    return dict(keras.saving.get_custom_objects())


def register(known: dict[str, Any]) -> None:
    """Register the classes and functions that `registered` returned in another process."""
    if not known:
        return
    import keras

    for name, item in known.items():
        package, _, own = name.rpartition(">")
        if package:
            keras.saving.register_keras_serializable(package, own)(item)
        else:
            keras.saving.get_custom_objects()[name] = item


# -- objects -----------------------------------------------------------------------------------------------------------


def _plain(item: Any) -> Reduced:
    return _by_state(item, dict(vars(item)), _set_state)


def _by_state(item: Any, state: Any, set_state: Callable[[Any, Any], None]) -> Reduced:
    return _bare, (type(item),), state, None, None, set_state


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _set_state(item: Any, state: dict[str, Any]) -> None:
    # Bypass `__setattr__`, with which Keras would track and wrap each value again.
    vars(item).update(state)


def _optimizer(optimizer: Any) -> Reduced:
    return _by_state(optimizer, dict(vars(optimizer)), _set_optimizer)


def _set_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    _set_state(optimizer, state)
    _unfinished.append(lambda: _find_weights(optimizer))


def _find_weights(optimizer: Any) -> None:
    places = {optimizer._var_key(v): place for place, v in enumerate(optimizer._trainable_variables)}
    vars(optimizer)["_trainable_variables_indices"] = places


def _layer(layer: Any) -> Reduced:
    state = dict(vars(layer))
    for name in _WRAPPED:
        if getattr(state.get(name), "__module__", None) == "keras.src.layers.layer":
            del state[name]
    state.update({name: None for name in _TRACED if name in state})
    if "_distribute_strategy" in state:  # the model then uses the strategy whose scope is current
        state["_distribute_strategy"] = None
    if "_losses" in state:  # of the last call, whose graph may no longer exist
        state.update(_loss_ids=set(), _losses=[])
    return _by_state(layer, state, _set_layer)


def _set_layer(layer: Any, state: dict[str, Any]) -> None:
    _set_state(layer, state)
    if "_nodes_by_depth" in state:
        _unfinished.append(lambda: _find_nodes(layer))


def _find_nodes(graph: Any) -> None:
    from keras.src.ops.function import make_node_key

    nodes = [node for level in graph._nodes_by_depth.values() for node in level]
    places = [(node.operation, node.operation._inbound_nodes.index(node)) for node in nodes]
    vars(graph)["_nodes"] = {make_node_key(*place) for place in places}


def _variable(variable: Any) -> Reduced:
    state = dict(vars(variable))
    state["_value"] = None if state.get("_value") is None else variable.numpy()
    return _by_state(variable, state, _set_variable)


def _set_variable(variable: Any, state: dict[str, Any]) -> None:
    _set_state(variable, {**state, "_value": None})
    if state["_value"] is not None:
        variable._initialize(state["_value"])


# -- trackers of variables and layers ----------------------------------------------------------------------------------


def _tracker(tracker: Any) -> Reduced:
    return _by_state(tracker, dict(vars(tracker)), _set_tracker)


def _set_tracker(tracker: Any, state: dict[str, Any]) -> None:
    _set_state(tracker, state)
    _unfinished.append(lambda: _find_tracked(tracker))


def _find_tracked(tracker: Any) -> None:
    tracker.stored_ids = {name: {id(one) for one in store} for name, (_, store) in tracker.config.items()}


def _collection(collection: Any) -> Reduced:
    items = dict(collection) if isinstance(collection, dict) else list(collection)
    return _by_state(collection, (vars(collection), items), _set_collection)


def _set_collection(collection: Any, state: tuple[dict[str, Any], Any]) -> None:
    vars(collection)["tracker"] = None  # so that no item is tracked again
    if isinstance(collection, list):
        list.extend(collection, state[1])
    else:
        collection.update(state[1])
    vars(collection).update(state[0])


def _dynamic_backend(backend: Any) -> Any:
    return type(backend), (backend.name,)


#: Dotted name of a class -> the function that pickles its objects and those of derived classes. Imports nothing.
REDUCERS: dict[str, Callable[[Any], Any]] = {
    "keras.src.layers.layer.Layer": _layer,
    "keras.src.ops.function.Function": _layer,
    "keras.src.backend.common.variables.Variable": _variable,
    "keras.src.optimizers.base_optimizer.BaseOptimizer": _optimizer,
    "keras.src.saving.keras_saveable.KerasSaveable": _plain,
    "keras.src.utils.backend_utils.DynamicBackend": _dynamic_backend,
    "keras.src.utils.tracking.TrackedDict": _collection,
    "keras.src.utils.tracking.TrackedList": _collection,
    "keras.src.utils.tracking.TrackedOrderedDict": _collection,
    "keras.src.utils.tracking.TrackedSet": _collection,
    "keras.src.utils.tracking.Tracker": _tracker,
}
