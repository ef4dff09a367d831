"""What a run's folder holds: its files and folders, by name, with what each is for."""

from __future__ import annotations

#: Folders that raytf or callbacks write below a run's folder.
FOLDERS = {
    "attempts": "`ATTEMPT.json`, in order, for each start of a worker group: its size, where it began, from which tier",
    "checkpoints": "`STEP-ATTEMPT-SERIAL/`: shares of the ranks and `MANIFEST.json`, which is written last",
    "export": "`1/`, `2/`: the model for TensorFlow Serving, at the end of the run",
    "files": "what the job's callbacks have written into the folder that they were given",
    "ledger": "`DRIVER-N.jsonl`: the events below, in files of one driver each; `live.json`: the newest sign of life",
    "steps": (
        "`FIRST-ATTEMPT.csv`: a row for each step with epoch, loss, learning rate and gradient norm, which "
        "`raytf.read_steps` reads. "
        "`FIRST-ATTEMPT.digests`: what each shard added, for `raytf replay`, `bisect` and `prove`"
    ),
    "tensorboard": "event files of raytf, of `--track tensorboard` and of the callbacks",
}
#: Files that raytf writes there.
FILES = {
    "architecture.json": "the model, for `raytf export` of a run without its code",
    "callbacks.safetensors": "what callbacks keep in themselves, for the next start of the run",
    "command.json": "the command that started the run, and where, for people to read",
    "lease.json": "which driver owns the run now",
    "model.keras": "the trained model, where Keras can save it",
    "program.safetensors": "the last values of the program's own variables that the step reads, for `fit`",
    "result.json": "metrics and `weights_sha256`; written last, when all steps are done. A metric that is NaN or "
    "infinite is null, which raytf reads as NaN",
    "tracking.json": "which run of a tracker belongs to this one, and how far it was told",
    "void.json": "states that an audit found wrong, which nothing restores",
    "weights.safetensors": "the trained weights, one tensor for each variable, for `raytf.load_weights` and `fit`",
}
#: Folders that only some runs have.
SOMETIMES = {
    "data": "data that the run had to write down, such as a Ray Dataset",
    "hangs": "`.txt`: stacks of workers that made no progress",
}
