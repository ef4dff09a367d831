"""`raytf.fit` in the cells of a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from raytf.testing import environment
from raytf.testing.processes import wait_until
from tests.ray.conftest import manifests
from tests.ray.test_resume import attempts

PATIENCE = 300.0
NOTEBOOK = Path(__file__).parents[2] / "docs" / "getting-started" / "notebook.ipynb"
FIRST = """
    import keras, numpy as np, ray, raytf

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    x = np.random.default_rng(0).random((256, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential([keras.Input((4,)), Twice(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    config = raytf.TrainConfig.of(storage=STORAGE, workers="1", checkpoint_every_steps=100)
    first = raytf.fit(model, x, y, batch_size=32, epochs=2, config=config.replace(run="first"))
    print("TOLD", len(first.history["loss"]))
    node = ray.nodes()[0]["NodeID"]
"""
SECOND = """
    scale = 2.0
    reference = keras.models.clone_model(model)
    model.compile("adam", loss=lambda a, b: scale * keras.ops.mean(keras.ops.square(reference(a * x[0]) * 0 + a - b)))
    second = raytf.fit(model, x, y, batch_size=32, epochs=2, config=config.replace(run="second"))
    print("TOLD", ray.nodes()[0]["NodeID"] == node, len(second.epoch))
"""
LONG = """
    model.compile("adam", "mse")
    third = raytf.fit(model, x, y, batch_size=32, epochs=EPOCHS, config=config.replace(run="third"))
    print("TOLD", third.document["restarts"], third.epoch[-1])
"""


class Cell:
    """What a cell has shown.

    Attributes:
        text: that it printed, and its error.
        widgets: HTML, the latest for each place.
    """

    def __init__(self) -> None:
        self.text, self.status = "", ""
        self.widgets: dict[str, str] = {}

    def hear(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            self.text += content["text"]
        elif message["msg_type"] == "error":
            self.text += f"{content['ename']}: {content['evalue']}"
        elif message["msg_type"] in ("display_data", "update_display_data"):
            place = content.get("transient", {}).get("display_id", "")
            self.widgets[place] = content["data"].get("text/html", "")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Callable[..., Cell]]:
    """kernel(code, NAME=value): a cell, run to its end, with values in place of names; its manager is an attribute."""
    manager = KernelManager()
    manager.kernel_spec.argv[0] = sys.executable  # this environment's, whatever is installed beside it
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(KERAS_BACKEND="tensorflow", HOME=os.environ["HOME"], PATH=path)
    manager.start_kernel(cwd=str(tmp_path), env=env)
    client = manager.client()
    client.start_channels()

    def run(code: str, **names: Any) -> Cell:
        for name, value in names.items():
            code = code.replace(name, repr(value))
        cell = Cell()
        reply = client.execute_interactive(textwrap.dedent(code), timeout=PATIENCE, output_hook=cell.hear)
        cell.status = reply["content"]["status"]
        return cell

    run.manager = manager  # type: ignore[attr-defined]
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def test_cells_train_share_ray_and_are_stopped_and_gone_on_with(kernel: Any, tmp_path: Path):
    first = kernel(FIRST, STORAGE=str(tmp_path / "runs"))
    assert first.status == "ok", first.text
    assert "TOLD 2" in first.text
    (widget,) = [html for html in first.widgets.values() if "finished: 16 steps" in html]
    assert "epoch 2: loss" in widget
    assert "/16, " in widget  # the bar's line
    assert "run first in" not in first.text  # it is in the widget

    second = kernel(SECOND)
    assert second.status == "ok", second.text
    assert "TOLD True 2" in second.text

    def stop() -> None:
        wait_until(lambda: manifests(tmp_path / "runs" / "third"), "the run has saved", PATIENCE)
        kernel.manager.interrupt_kernel()

    stopping = threading.Thread(target=stop)
    stopping.start()
    stopped = kernel(LONG, EPOCHS=100_000)
    stopping.join()
    assert stopped.status == "error"
    assert "KeyboardInterrupt" in stopped.text
    assert any("interrupted: saved step " in html for html in stopped.widgets.values())
    at = manifests(tmp_path / "runs" / "third")[-1]

    again = kernel(LONG, EPOCHS=at // 8 + 2)
    assert again.status == "ok", again.text
    assert f"TOLD 1 {at // 8 + 1}" in again.text
    assert [attempt["from_step"] for attempt in attempts(tmp_path / "runs" / "third")] == [0, at]


def test_the_notebook_of_the_docs_trains_once(kernel: Any, tmp_path: Path):
    assert kernel("import os; os.environ['HOME'] = FOLDER", FOLDER=str(tmp_path)).status == "ok"
    every = json.loads(NOTEBOOK.read_text())["cells"]
    code = {cell["id"]: "".join(cell["source"]) for cell in every if cell["cell_type"] == "code"}
    shown: dict[str, list[str]] = {name: [] for name in code}
    for name in [*code, "fit", "result"]:
        cell = kernel(code[name])
        assert cell.status == "ok", cell.text
        shown[name].append(cell.text)
    assert "finished: 460 steps" in shown["show"][0]
    first, again = shown["result"]
    assert first == again
    assert first.startswith("steps: 460\n")
    assert float(first.rpartition(" ")[2]) > 0.9
    assert len(attempts(tmp_path / "raytf-runs" / "digits-notebook")) == 1
