"""A long run of real workers that audit every step, undisturbed: no alarm, and the weights of a run without audits.

python -m tests.stress.every_step_audited --steps 100000 --workers 3
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import numpy as np

import raytf
from raytf.runs import ledger, run_log
from raytf.storage.storage import Storage

RECORDS, BATCH, SHARDS = 4096, 24, 12


def build():
    """A network whose step takes so little time that there are many in an hour."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    return model


def main() -> None:
    """Run the command; exits with 1 where there was an alarm, or the weights differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=3)
    flags = parser.parse_args()
    draw = np.random.default_rng(0)
    x = draw.normal(size=(RECORDS, 16)).astype(np.float32)
    y = np.argmax(x[:, :4] + draw.normal(size=(RECORDS, 4)), 1)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "steps": flags.steps,
            "global_batch_size": BATCH,
            "logical_shards": SHARDS,
            "storage": folder,
        }
        settings |= {"exact": True, "warm_workers": False}
        began = time.monotonic()
        config = raytf.TrainConfig.of(**settings, run="audited", workers=str(flags.workers), audit_every=1)
        audited = raytf.fit(build, x, y, config=config)
        took = time.monotonic() - began
        alone = raytf.fit(build, x, y, config=config.replace(run="alone", workers="1", audit_every=0))
        run = Storage(folder).child("audited")
        alarms = [event for event in ledger.read(run) if event["kind"] == "audit"]
        starts = len(run_log.attempt_names(run))
    is_same = audited.weights_sha256 == alone.weights_sha256
    print(
        f"{flags.steps} steps of {flags.workers} workers in {took:.0f} s, each of them audited: {len(alarms)} alarms, "
        f"{starts} start; the weights of a run without audits: {'the same' if is_same else 'DIFFERENT'}"
    )
    raise SystemExit(bool(alarms) or starts != 1 or not is_same)


if __name__ == "__main__":
    main()
