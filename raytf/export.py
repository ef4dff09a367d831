"""The model's life after training: a SavedModel for TensorFlow Serving and a .keras file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile

import keras

from raytf.errors import JobError
from raytf.model import run_user_code
from raytf.storage import Storage

SAVED_MODEL, KERAS_FILE = "export/1", "model.keras"


def export(model: keras.Model, run: Storage) -> dict[str, str]:
    """Write `export/1/` (TensorFlow Serving's layout, signature `serving_default`) and `model.keras`.

    Returns:
        What was written, name -> location.

    Raises:
        JobError: the model cannot be saved, for instance because a custom layer is not serializable.
        StorageError: storage refuses.
    """
    with tempfile.TemporaryDirectory(prefix="raytf-export-") as folder:
        saved, file = os.path.join(folder, "saved_model"), os.path.join(folder, KERAS_FILE)
        with quiet():
            run_user_code("model.export", lambda: model.export(saved, format="tf_saved_model", verbose=False))
        run.delete(SAVED_MODEL)
        run.put_tree(saved, SAVED_MODEL)
        written = {"saved_model": run.locate(SAVED_MODEL)}
        # A model without get_config can be served all the same.
        with contextlib.suppress(JobError):
            run_user_code("model.save", lambda: model.save(file))
            with open(file, "rb") as stream:
                run.put(KERAS_FILE, stream.read())
            written["keras"] = run.locate(KERAS_FILE)
        return written


@contextlib.contextmanager
def quiet():
    """Keras's export prints and TensorFlow logs; neither tells a user of raytf anything."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
