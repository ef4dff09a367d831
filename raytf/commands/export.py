"""`raytf export RUN`: export a checkpoint of a run for TensorFlow Serving, as a .keras file or as ONNX."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

import tyro

from raytf import _process
from raytf.commands._places import filled_run
from raytf.config.terminal_text import say
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class Export:
    """Export the model of a run as the next version folder of TensorFlow Serving, a .keras file or ONNX.

    A version appears whole or not at all, so a server can poll the folder during the export. If the newest version
    holds the same weights, nothing is written.
    """

    run: tyro.conf.Positional[str]
    """Folder of the run: STORAGE/NAME, such as s3://bucket/runs/mnist, or the name of a run in ~/raytf-runs. The run
    may still be training."""
    step: str = "last"
    """The weights to export: last (the end of a finished run, otherwise the newest checkpoint), best (the checkpoint
    with the best value of --keep-best, or of the run's metric), or the step of a checkpoint."""
    to: str | None = None
    """Folder for versions, such as s3://bucket/models/mnist; by default export/ in the run's folder."""
    format: Literal["saved_model", "keras", "onnx"] = "saved_model"
    """saved_model writes TO/1, TO/2, ...; keras and onnx write the file TO/model-STEP.FORMAT."""
    module: tuple[str, ...] = ()
    """Files or modules that register the model's own layers, imported before the model is loaded."""
    trust: bool = False
    """Allow code in the configuration of the run's model, such as Lambda layers. Layers that read files are always
    refused."""
    json: bool = False
    """Print JSON instead of text."""


def main(flags: Export) -> None:
    """Run the command."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # weights are only copied, and a GPU may be in use for training
    uri = filled_run(flags.run).uri
    if flags.to is not None:
        Storage(flags.to).preflight()
    _process.load_tensorflow()
    from raytf.inference import export  # TensorFlow is not needed for --help

    if flags.format == "onnx":
        export.check_onnx()
    report = (lambda text: None) if flags.json else (lambda text: say(f"exporting {text}"))
    done = export.export_run(uri, flags.to, flags.step, flags.format, flags.module, flags.trust, report)
    if flags.json:
        print(json.dumps(asdict(done), indent=1))
    elif done.is_new:
        say(f"{done.place}" + (f" is version {done.version}" if done.version is not None else ""))
    else:
        say(f"{done.place}, version {done.version}, holds these weights already; nothing to do")
