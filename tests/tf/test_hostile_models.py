"""architecture.json that is damaged, or made by somebody who wants harm: one line, and nothing is run or read."""

from __future__ import annotations

import base64
import json
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from raytf.errors import DamagedFileError, JobError, ModelError, RaytfError
from raytf.inference import architecture, trained_model
from raytf.storage.storage import Storage
from tests.laws.mutations import _change

CASES = 60


def a_model() -> keras.Model:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3, "relu"), layers.BatchNormalization()])
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(2)(layers.Concatenate()([inner(x), layers.Rescaling(0.5)(x)])))
    model.compile(keras.optimizers.Adam(1e-3, use_ema=True), "mse")
    return model


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(architecture.describe(a_model(), np.zeros((1, 4), np.float32)))


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "run"))


def refused(run: Storage, data: bytes, trust: bool = False) -> str:
    """What is said of a file, in a line; empty where it is a model."""
    run.put(architecture.FILE, data)
    try:
        model, _ = architecture.rebuild(run, (), trust)
    except JobError:
        raise AssertionError("a command shows its traceback") from None
    except RaytfError as error:
        return " NEXT LINE ".join(str(error).splitlines())
    assert isinstance(model, keras.Model)
    return ""


def test_the_model_itself(run, document):
    assert refused(run, json.dumps(document).encode()) == ""
    assert architecture.rebuild(run)[1] is not None


def test_cut_off_at_any_place(run, document):
    data = json.dumps(document).encode()
    for end in random.Random(0).sample(range(len(data) - 1), 20):
        said = refused(run, data[:end])
        assert "architecture.json is damaged: it is " in said
        assert said.endswith("Start the run again to rewrite it.")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "null", '"x"', "[" * 5000, '{"a":' * 5000, "\0", '{"version": "1"}', '{"version": 9e999}']
    + ['{"config": [], "inputs": 1}', '{"config": {}, "inputs": 1}', '{"config": {"class_name": 7}, "inputs": []}']
    + ['{"config": {"class_name": "Dense", "module": "keras.layers", "config": {"units": 1}}, "inputs": []}'],
)
def test_another_shape(run, text):
    assert refused(run, text.encode())


@pytest.mark.parametrize(
    "inputs",
    [None, 7, "x", [7], {"__array__": []}, {"__array__": ["float32", 4]}, {"__array__": ["float32", [10**12]]}]
    + [{"__array__": ["object", [4]]}, {"__array__": [[], [4]]}, {"__array__": ["float32", [-4]]}, {}, {"a": {}}],
)
def test_inputs_that_are_none(run, document, inputs):
    assert refused(run, json.dumps({**document, "inputs": inputs}).encode())


def test_whatever_is_changed(run, document):
    rng = random.Random(15)
    # Without those that are large on purpose: what a model is made of may be large, too.
    for _ in range(CASES):
        text, what = _change(rng, json.dumps(document))
        if not any(size in what for size in ("2147483648", "9007199254740992", "9223372036854775808", "900000000000")):
            refused(run, text.encode(errors="surrogatepass"), trust=rng.random() < 0.5)


class Touch:
    """What a pickle runs when it is read."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


def within(document: dict[str, Any], part: dict[str, Any]) -> bytes:
    """The model's file with a layer more, in the nested model."""
    text = json.loads(json.dumps(document))
    inner = next(layer for layer in text["config"]["config"]["layers"] if layer["class_name"] == "Sequential")
    inner["config"]["layers"].append(part)
    return json.dumps(text).encode()


def serialized(kind: str, module: str = "keras.layers", **config: Any) -> dict[str, Any]:
    return {"module": module, "class_name": kind, "config": {"name": "evil", **config}, "registered_name": None}


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kind", ["StringLookup", "IntegerLookup", "TextVectorization"])
def test_a_layer_that_reads_a_file_is_refused_whatever_is_trusted(run, document, kind, trust):
    said = refused(run, within(document, serialized(kind, vocabulary="/etc/passwd")), trust)
    assert f"{kind} layer 'evil', which reads its vocabulary from the file '/etc/passwd'" in said
    assert "Pass the vocabulary to the layer as a list" in said
    assert "--trust" not in said


@pytest.mark.parametrize("trust", [False, True])
def test_a_saved_model_is_refused_whatever_is_trusted(run, document, trust):
    said = refused(run, within(document, serialized("TFSMLayer", filepath="/tmp/evil")), trust)
    assert "TFSMLayer layer 'evil', which loads code from a SavedModel in '/tmp/evil'" in said
    assert "Lambda" not in said


def test_code_is_called_what_it_is_and_does_not_run(run, document, tmp_path):
    mark = tmp_path / "mark"
    pickled = base64.b64encode(pickle.dumps(Touch(mark))).decode()
    code = keras.saving.serialize_keras_object(layers.Lambda(lambda x: x.open("mark")))["config"]["function"]
    said = refused(run, within(document, serialized("TorchModuleWrapper", module_=pickled)))
    assert "TorchModuleWrapper layer 'evil', whose configuration holds a pickled PyTorch module" in said
    said = refused(run, within(document, serialized("Lambda", function=code)))
    assert "Lambda layer 'evil', whose configuration holds Python code" in said
    assert "--trust" in said
    said = refused(run, within(document, serialized("Dense", units=1, activation=code)))
    assert "Dense layer 'evil', whose configuration holds Python code" in said
    assert not mark.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_what_a_file_names_is_not_imported(run, document, tmp_path, trust):
    mark = tmp_path / "mark"
    evil = {"module": "os", "class_name": "system", "config": {"command": f"touch {mark}"}, "registered_name": None}
    said = refused(run, within(document, evil), trust)
    assert "(os.system)" in said
    assert "imports nothing just because a file names it" in said
    assert not mark.exists()


def test_a_keras_file_that_reads_another_is_refused(run, tmp_path):
    config = serialized("Sequential", layers=[serialized("StringLookup", vocabulary="/etc/passwd")])
    file = tmp_path / "run" / architecture.KERAS_FILE
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
    with pytest.raises(ModelError, match="reads its vocabulary from the file"):
        trained_model.load(run)
    for data in (b"", b"PK", b"x" * 1000, file.read_bytes()[:-30]):
        file.write_bytes(data)
        with pytest.raises(DamagedFileError, match=r"not a \.keras file"):
            trained_model.load(run)
