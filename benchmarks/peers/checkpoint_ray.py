"""Benchmark 4's peer: ray.train.report with a checkpoint, SYNC and ASYNC.

After Ray's guide "Saving and Loading Checkpoints": the model is saved into a temporary directory, as its TensorFlow
example does with `model.save("my_model.keras")`, and reported. With CheckpointUploadMode.ASYNC the directory is the
program's to make and Ray's to delete. Durable is when Ray has registered it: get_all_reported_checkpoints waits until
then.
The controller looks every 0.2 s and not every 2 s (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S), so that it holds up nothing.

    python benchmarks/peers/checkpoint_ray.py ADDRESS FOLDER
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"

import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

from benchmarks.harness import gpus, importable


def train(config: dict[str, Any]) -> None:
    from benchmarks.peers.checkpoint_model import Watch, build, folder_bytes
    from benchmarks.turns import follow

    megabytes, model, update = 0, None, None
    for _, answer in follow(config["address"], 0):
        if answer["megabytes"] != megabytes:
            model = update = None
            megabytes = answer["megabytes"]
            model, update = build(megabytes)
        assert model is not None
        assert update is not None
        watch = Watch(update)
        if answer["what"] == "SYNC":
            with tempfile.TemporaryDirectory(dir=answer["folder"]) as folder:
                model.save(os.path.join(folder, "my_model.keras"))
                written = folder_bytes(folder)
                ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))
        else:
            folder = tempfile.mkdtemp(dir=answer["folder"])
            model.save(os.path.join(folder, "my_model.keras"))
            written = folder_bytes(folder)
            ray.train.report(
                {},
                checkpoint=Checkpoint.from_directory(folder),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=True,
            )
        watch.goes_on()
        ray.train.get_all_reported_checkpoints()
        watch.is_durable(2 * written)  # locally, and to storage
        answer.update(watch.answer)


if __name__ == "__main__":
    address, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="raytf-ray-") as own:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=own,
            runtime_env={"env_vars": {"PYTHONPATH": importable()["PYTHONPATH"]}},
        )
        TensorflowTrainer(
            train,
            train_loop_config={"address": address},
            scaling_config=ScalingConfig(num_workers=1, use_gpu=bool(gpus())),
            run_config=RunConfig(storage_path=folder, name="peer", checkpoint_config=CheckpointConfig(num_to_keep=1)),
        ).fit()
        ray.shutdown()
    os._exit(0)
