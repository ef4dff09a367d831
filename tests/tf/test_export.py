"""Any checkpoint becomes a model again: the weights to the last bit, and the same predictions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from google.protobuf import text_format
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

from raytf.checkpoint import codec, manifest, variables
from raytf.checkpoint.naming import name_of
from raytf.checkpoint.variables import weights_sha256
from raytf.errors import CheckpointError, ConfigError, ModelError
from raytf.inference import architecture, export, versions
from raytf.inference.saved_model import SavedModel, signatures_of
from raytf.inference.signature import DEFAULT
from raytf.storage.storage import Storage

RANDOM = np.random.default_rng(0)
X = RANDOM.random((6, 4), np.float32)
Y = RANDOM.random((6, 2), np.float32)


@keras.saving.register_keras_serializable("raytf-tests")
class Doubling(layers.Layer):
    def call(self, x):
        return 2 * x


class Unregistered(layers.Layer):
    def call(self, x):
        return 3 * x


class Secretive(layers.Layer):
    """With an argument that no configuration can hold, and without get_config."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def call(self, x):
        return x if self.by else -x


@keras.saving.register_keras_serializable("raytf-tests")
class Own(keras.Model):
    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first, self.last = layers.Dense(5, "relu"), layers.Dense(units)

    def call(self, x):
        return self.last(self.first(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def sequential(*middle: layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(5), *middle, layers.Dense(2)])


def two_inputs() -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    joined = layers.Concatenate()([layers.Dense(3)(a), layers.Dense(3)(b)])
    return keras.Model({"a": a, "b": b}, {"sum": layers.Dense(2, name="sum")(joined), "max": layers.Dense(1)(joined)})


def trained(model: keras.Model, x=X, optimizer="adam", loss="mse") -> keras.Model:
    """A model after some steps, as a run has it."""
    model.compile(optimizer, loss)
    y = {"sum": Y, "max": Y[:, :1]} if isinstance(x, dict) else Y
    for _ in range(3):
        model.train_on_batch(x, y)
    return model


def checkpoint(run: Storage, model: keras.Model, step: int, history=(), best=None) -> None:
    """What a run of one worker writes."""
    named = variables.variables(model)
    data = codec.encode(variables.Copies(variables.Variables(named, list(named))).take())
    name = name_of(step, "a")
    run.put(f"{manifest.FOLDER}/{name}/share-00000.safetensors", data)

    share = {
        "file": "share-00000.safetensors",
        "bytes": len(data),
        "crc32c": codec.checksum([data]),
        "names": sorted(named),
    }
    manifest.write(run, name, step, [share], {"history": list(history), "best": best})


def a_run(tmp_path: Path, model: keras.Model, x=X) -> Storage:
    run = Storage(str(tmp_path / "run"))
    run.put(architecture.FILE, architecture.describe(model, x))
    return run


MODELS: dict[str, tuple[Callable[[], keras.Model], object]] = {
    "sequential": (sequential, X),
    "batch norm and dropout": (lambda: sequential(layers.BatchNormalization(), layers.Dropout(0.5)), X),
    "two inputs and outputs": (two_inputs, {"a": X, "b": X + 1}),
    "a registered layer": (lambda: sequential(Doubling()), X),
    "a registered model": (Own, X),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_becomes_a_version_with_the_same_bits_and_predictions(tmp_path: Path, kind):
    make, x = MODELS[kind]
    model = trained(make(), x)
    run = a_run(tmp_path, model, x)
    checkpoint(run, model, 3)
    done = export.export_run(run.root, step="3")
    assert (done.version, done.step, done.is_new) == (1, 3, True)
    (version,) = versions.inspect(run.child("export"))
    assert version.notes["weights_sha256"] == weights_sha256(model)
    served = SavedModel(done.place)
    inputs = served.signatures[DEFAULT].inputs
    found = served.run(DEFAULT, x if isinstance(x, dict) else {next(iter(inputs)): x})
    expected = model(x, training=False)
    for name, value in expected.items() if isinstance(expected, dict) else [(next(iter(found)), expected)]:
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    of_the_end = SavedModel(export.export(model, Storage(str(tmp_path / "other")), 3)["saved_model"])
    assert of_the_end.signatures[DEFAULT] == served.signatures[DEFAULT], "clients find the same names in every version"
    graph = (Path(done.place) / "saved_model.pb").read_bytes()
    assert signatures_of("saved_model.pb", graph)[DEFAULT] == served.signatures[DEFAULT]


def test_averaged_weights_are_what_the_end_of_the_run_would_have_exported(tmp_path: Path):
    model = trained(sequential(), optimizer=keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5))
    run = a_run(tmp_path, model)
    checkpoint(run, model, 3)
    raw = weights_sha256(model)
    done = export.export_run(run.root)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    found = versions.inspect(run.child("export"))[0].notes["weights_sha256"]
    assert found == weights_sha256(model) != raw
    assert done.is_new


def test_the_same_weights_are_exported_once_and_others_are_a_new_version(tmp_path: Path):
    model = trained(sequential())
    run = a_run(tmp_path, model)
    checkpoint(run, model, 3)
    first, again = export.export_run(run.root), export.export_run(run.root)
    assert (again.place, again.is_new, first.is_new) == (first.place, False, True)
    model.train_on_batch(X, Y)
    checkpoint(run, model, 4)
    assert export.export_run(run.root).version == 2
    assert export.export_run(run.root, step="3").version == 3, "an older step is a version too, the newest one"


def test_the_end_of_a_run_exports_version_1_and_goes_on_counting(tmp_path: Path):
    model = trained(sequential())
    run = a_run(tmp_path, model)
    written = export.export(model, run, 3)
    assert written == {"saved_model": run.locate("export/1"), "keras": run.locate("model.keras")}
    assert export.export(model, run, 3) == written, "a run that died at its end exports once"
    run.put("result.json", json.dumps({"steps": 3, "weights_sha256": weights_sha256(model)}).encode())
    assert not export.export_run(run.root).is_new
    copy = export.export_run(run.root, to=str(tmp_path / "models"))
    assert (copy.version, copy.step, copy.place) == (1, 3, str(tmp_path / "models" / "1"))
    model.train_on_batch(X, Y)
    assert export.export(model, run, 4)["saved_model"] == run.locate("export/2")


def test_a_keras_file_is_the_model(tmp_path: Path):
    model = trained(sequential())
    run = a_run(tmp_path, model)
    checkpoint(run, model, 3)
    done = export.export_run(run.root, kind="keras", to=str(tmp_path / "files"))
    assert done.place == str(tmp_path / "files" / "model-3.keras")
    assert weights_sha256(keras.saving.load_model(done.place)) == weights_sha256(model)


def test_onnx_gives_the_same_predictions(tmp_path: Path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("tf2onnx")
    reference = pytest.importorskip("onnx.reference")
    model = trained(sequential(layers.BatchNormalization()))
    run = a_run(tmp_path, model)
    checkpoint(run, model, 3)
    done = export.export_run(run.root, kind="onnx")
    assert done.place.endswith("export/model-3.onnx")
    session = reference.ReferenceEvaluator(onnx.load(done.place))
    np.testing.assert_allclose(session.run(None, {session.input_names[0]: X})[0], model(X), rtol=1e-4, atol=1e-5)


def test_the_best_checkpoint_is_that_of_the_metric_that_was_kept(tmp_path: Path):
    model = trained(sequential())
    run = a_run(tmp_path, model)
    history = [{"epoch": e, "step": 10 * (e + 1), "val_mine": v} for e, v in enumerate([0.5, 0.9, 0.7])]
    for i in range(3):
        model.train_on_batch(X, Y)
        checkpoint(
            run, model, 10 * (i + 1), history[: i + 1], ["val_mine", max(h["val_mine"] for h in history[: i + 1])]
        )
    assert export.export_run(run.root, step="best").step == 20


@pytest.mark.parametrize(
    ("step", "text"),
    [("7", "Checkpoints: 3"), ("newest", "expected a number of steps, last or best. Checkpoints: 3")],
)
def test_steps_that_there_are_not(tmp_path: Path, step, text):
    model = trained(sequential())
    run = a_run(tmp_path, model)
    checkpoint(run, model, 3)
    with pytest.raises(ConfigError, match=text):
        export.export_run(run.root, step=step)


def test_best_without_a_metric_is_refused(tmp_path: Path):
    run = a_run(tmp_path, model := trained(sequential()))
    checkpoint(run, model, 3)
    with pytest.raises(ConfigError, match="no metric yet"):
        export.export_run(run.root, step="best")


def test_a_damaged_checkpoint_is_no_version(tmp_path: Path):
    run = a_run(tmp_path, model := trained(sequential()))
    checkpoint(run, model, 3)
    (share,) = (tmp_path / "run" / "checkpoints").glob("*/share*")
    data = bytearray(share.read_bytes())
    data[-1] ^= 1
    share.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        export.export_run(run.root)
    share.write_bytes(bytes(data[:-1]))
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        export.export_run(run.root)
    assert versions.inspect(run.child("export")) == []


def test_a_layer_that_is_not_registered_asks_for_its_module(tmp_path: Path):
    run = a_run(tmp_path, model := trained(sequential(Unregistered())))
    checkpoint(run, model, 3)
    document = json.loads(run.get(architecture.FILE))
    text = json.dumps(document).replace(__name__, "a_job_of_mine")  # that of a job is not on the path
    run.put(architecture.FILE, text.encode())
    with pytest.raises(ModelError, match=r"--module jobs/mine\.py"):
        export.export_run(run.root)
    with pytest.raises(ConfigError, match="cannot be imported"):
        export.export_run(run.root, modules=(str(tmp_path / "not.py"),))


def test_the_module_of_a_job_makes_its_layers_known(tmp_path: Path):
    (tmp_path / "mine_for_export.py").write_text(
        "import keras\n\n\n@keras.saving.register_keras_serializable('mine')\nclass Halving(keras.layers.Layer):\n"
        "    def call(self, x):\n        return x / 2\n"
    )
    architecture._import(str(tmp_path / "mine_for_export.py"))
    halving = keras.saving.get_registered_object("mine>Halving")
    run = a_run(tmp_path, model := trained(sequential(halving())))
    checkpoint(run, model, 3)
    keras.saving.get_custom_objects().pop("mine>Halving")
    import sys

    sys.modules.pop("mine_for_export")
    with pytest.raises(ModelError, match="--module"):
        export.export_run(run.root)
    assert export.export_run(run.root, modules=(str(tmp_path / "mine_for_export.py"),)).version == 1
    keras.saving.get_custom_objects().pop("mine>Halving")  # later tests send all that is registered


def test_a_model_that_keras_cannot_describe_says_so_and_what_to_do(tmp_path: Path):
    run = a_run(tmp_path, model := trained(sequential(Secretive(object()))))
    checkpoint(run, model, 3)
    with pytest.raises(ModelError, match=r"get_config\(\).*let the run finish"):
        export.export_run(run.root)
    written = export.export(model, run, 3)
    assert SavedModel(written["saved_model"]).signatures


def test_a_lambda_layer_is_run_only_when_it_is_trusted(tmp_path: Path):
    run = a_run(tmp_path, model := trained(sequential(layers.Lambda(lambda x: x * 2))))
    checkpoint(run, model, 3)
    with pytest.raises(ModelError, match="--trust"):
        export.export_run(run.root)
    assert export.export_run(run.root, trust=True).version == 1


def test_a_run_of_an_older_raytf_says_how_to_go_on(tmp_path: Path):
    run = Storage(str(tmp_path / "run"))
    checkpoint(run, trained(sequential()), 3)
    with pytest.raises(ModelError, match="Start the run again to write it"):
        export.export_run(run.root)


def test_a_graph_in_text_is_a_model_as_well(tmp_path: Path):
    made = export.export(sequential(), Storage(str(tmp_path / "run")), 3)["saved_model"]
    before = SavedModel(made)
    binary, text = Path(made) / "saved_model.pb", Path(made) / "saved_model.pbtxt"
    text.write_text(text_format.MessageToString(saved_model_pb2.SavedModel.FromString(binary.read_bytes())))
    binary.unlink()
    after = SavedModel(made)
    assert after.signatures == before.signatures == signatures_of(text.name, text.read_bytes())
    given = {next(iter(before.signatures[DEFAULT].inputs)): X}
    found, expected = (list(model.run(DEFAULT, given).values()) for model in (after, before))
    np.testing.assert_array_equal(found, expected)


def test_what_is_no_saved_model_cannot_be_loaded(tmp_path: Path):
    (tmp_path / "saved_model.pb").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot be loaded"):
        SavedModel(str(tmp_path))
