"""Folders of runs as raytf itself writes them, without training: for tests that damage them."""

from __future__ import annotations

import json
import os
import tempfile

import numpy as np

from raytf.checkpoint import codec, manifest
from raytf.checkpoint.naming import name_of
from raytf.config.identity import batch_identity
from raytf.config.train_config import TrainConfig
from raytf.inference import versions
from raytf.runs import ledger, run_log
from raytf.runs.lease import LEASE_FILE
from raytf.storage.storage import Storage
from tests.support.runs import BEGIN, a_run

RECORDS, STEPS = 640, (100, 200, 300)
_ATTEMPTS = ("20270115T080000.000-aaaaaa", "20270115T080100.000-bbbbbb")
_ARCHITECTURE = {"version": 1, "keras": "3.15.0", "inputs": {"__array__": ["float32", [4]]}, "problem": "no get_config"}


def make(run: Storage, is_finished: bool) -> None:
    """A run with everything that one leaves: two attempts, three checkpoints, losses, a ledger, an export."""
    ledger_of = ledger.Ledger(run, "000000-20270115T080000.000-aaaaaa")
    ledger_of.add(a_run().events)
    assert ledger_of.flush()
    for number, attempt in enumerate(_ATTEMPTS):
        run_log.write_attempt(
            run, attempt, 2 - number, (150 * number, "memory" if number else "new"), BEGIN + 60 * number
        )
        log = run_log.StepLog(run, attempt)
        steps = np.arange(150 * number, 300 if number else 180)
        log.add(int(steps[0]) + 1, 0, 1.0 / (1.0 + steps), np.full(len(steps), 0.01))
        log.write(log.take())
    identity = batch_identity(TrainConfig(), RECORDS) | {"model layers": "dense", "class weights": "[]"}
    for serial, step in enumerate(STEPS):
        checkpoint(run, step, serial, identity)
    run.put("architecture.json", json.dumps(_ARCHITECTURE, indent=1).encode())
    run.put("files/log.csv", b"epoch,loss\n0,0.5\n1,0.25\n")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("saved_model.pb", "variables/variables.index", "assets/words.txt"):
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as out:
                out.write(name.encode())
        versions.publish(folder, run.child("export"), {"run": "r", "step": 300, "weights_sha256": "0" * 64})
    if is_finished:
        metrics = {"loss": 0.25, "val_accuracy": 0.75}
        result = {"run": "r", "status": "finished", "metrics": metrics, "steps": 300, "epochs": 3.0, "samples": 1920}
        result |= {"stopped_early": False, "wall_seconds": 100.0, "train_seconds": 80.0, "samples_per_second": 640.0}
        result |= {"world_sizes": [1, 2], "restarts": 1, "weights_sha256": "0" * 64, "history": history(300)}
        run.put(run_log.RESULT, json.dumps({**result, "export": {"saved_model": "export/1"}}, indent=1).encode())
    else:
        owner = {"id": "f" * 32, "host": "here", "boot": _boot(), "pid": 2**22 - 1, "started": "1", "beat": 3}
        run.put(LEASE_FILE, json.dumps(owner).encode())


def history(step: int) -> list[dict[str, float]]:
    epochs = range(step // 100)
    return [{"epoch": e, "step": 100 * (e + 1), "loss": 0.5 / (e + 1), "val_accuracy": 0.25 * (e + 1)} for e in epochs]


def checkpoint(run: Storage, step: int, serial: int, identity: dict[str, str]) -> str:
    """Write a checkpoint of two shares; its name."""
    name, shares = name_of(step, _ATTEMPTS[0], serial), []
    for rank in range(2):
        data = codec.encode({f"model/{rank}": np.full((3, 5), step + rank, np.float32)})
        file = f"share-{rank:05d}.safetensors"
        share = {"file": file, "bytes": len(data), "crc32c": codec.checksum([data]), "names": [f"model/{rank}"]}
        run.put(f"{manifest.FOLDER}/{name}/{file}", data)
        run.put(f"{manifest.FOLDER}/{name}/share-{rank:05d}.json", manifest.dump(share))
        shares.append(share)
    document = {"train_seconds": 8.0, "imbalance_seconds": 0.0, "stopped_early": False, "best": ["val_accuracy", 0.5]}
    document |= {"identity": identity, "history": history(step), "callbacks": {}, "world_size": 2}
    manifest.write(run, name, step, shares, document)
    return name


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
