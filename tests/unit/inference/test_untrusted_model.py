"""What a model's configuration would do beside computing, by its JSON alone."""

import re

import pytest

from raytf.inference import untrusted_model


def layer(kind, name="x", module="keras.layers", **config):
    return {"module": module, "class_name": kind, "config": {"name": name, **config}, "registered_name": None}


CODE = {"class_name": "__lambda__", "config": {"code": "4wEAAAA=", "defaults": None, "closure": None}}
NAMED = {"module": "builtins", "class_name": "function", "config": "relu", "registered_name": "relu"}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (layer("Lambda", "double", function=CODE), "Lambda layer 'double', whose configuration holds Python code"),
        (layer("Dense", "d", activation=CODE), "Dense layer 'd', whose configuration holds Python code"),
        (layer("TorchModuleWrapper", "t", module="gASV"), "TorchModuleWrapper layer 't', whose .* pickled PyTorch"),
        (layer("JaxLayer", "j", call_fn=NAMED), "JaxLayer layer 'j', whose configuration holds functions for JAX"),
        (layer("FlaxLayer", "f"), "FlaxLayer layer 'f', whose configuration holds a Flax module"),
        ({"a": [{"b": CODE}]}, "a __lambda__, whose configuration holds Python code"),
    ],
)
def test_code(config, what):
    (found,) = untrusted_model.find(config)
    assert not found.reads_files
    assert re.match(what, found.what)


@pytest.mark.parametrize("kind", ["StringLookup", "IntegerLookup", "TextVectorization"])
def test_a_vocabulary_that_is_a_path(kind):
    (found,) = untrusted_model.find(layer(kind, "words", vocabulary="/etc/passwd"))
    assert found.what == f"{kind} layer 'words', which reads its vocabulary from the file '/etc/passwd'"
    assert "as a list" in found.fix
    assert not untrusted_model.find(layer(kind, "words", vocabulary=["a", "b"]))


def test_a_saved_model_within_a_layer():
    (found,) = untrusted_model.find(layer("TFSMLayer", "sm", filepath="/tmp/evil"))
    assert found.what == "TFSMLayer layer 'sm', which loads code from a SavedModel in '/tmp/evil'"
    assert found.reads_files


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: layer("TimeDistributed", "t", layer=inner),
        lambda inner: layer("Bidirectional", "b", layer=layer("RNN", "r", cell=inner)),
        lambda inner: layer("Functional", "m", layers=[layer("Dense"), layer("Sequential", "n", layers=[inner])]),
        lambda inner: layer("Dense", "d", kernel_initializer=inner),
        lambda inner: layer("Dense", "d", kernel_regularizer={"class_name": "L1", "config": {"x": [inner]}}),
        lambda inner: {**layer("Sequential", "m"), "compile_config": {"loss": inner}},
        lambda inner: {**layer("Sequential", "m"), "build_config": {"a": {"b": [[inner]]}}},
        lambda inner: [layer("Adam", "a", learning_rate=inner)],
    ],
)
def test_wherever_it_is(around):
    reads = layer("StringLookup", "words", vocabulary="s3://bucket/words")
    assert untrusted_model.find(around(reads)) == untrusted_model.find(reads)
    assert untrusted_model.find(around({"class_name": "Lambda", "config": {"function": CODE}}))


def test_what_reads_files_comes_first():
    found = untrusted_model.find(
        [layer("Lambda", function=CODE), layer("StringLookup", vocabulary="a"), layer("TFSMLayer")]
    )
    assert [suspect.reads_files for suspect in found] == [True, True, False]


def test_nothing_is_suspected_of_a_usual_model():
    usual = [layer("Dense", activation="relu"), layer("Lambda", function=NAMED), layer("StringLookup", vocabulary=None)]
    assert not untrusted_model.find(layer("Sequential", layers=usual))
    assert not untrusted_model.foreign(layer("Sequential", layers=usual))


def test_names_that_keras_does_not_know():
    config = [{"module": "os", "class_name": "system", "config": {"command": "id"}}, layer("Mine", module="job>mine")]
    config.append({"module": "subprocess", "class_name": "function", "config": "run"})
    assert untrusted_model.foreign(config) == ["os.system", "job>mine.Mine", "subprocess.run"]


@pytest.mark.parametrize(
    "config", [None, 7, "x", [], {}, {"class_name": 7}, {"class_name": "Lambda"}, [[[{"a": None}]]]]
)
def test_what_is_no_model_is_no_suspect(config):
    assert untrusted_model.find(config) == []


def test_a_deep_configuration_is_walked_without_recursion():
    config = layer("Lambda", function=CODE)
    for _ in range(100_000):
        config = [config]
    assert len(untrusted_model.find(config)) == 1
