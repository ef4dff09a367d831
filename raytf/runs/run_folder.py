"""Names and descriptions of the files and folders of a run, and of a search of `raytf tune`."""

from __future__ import annotations

from raytf.storage import untrusted_json

#: Folders that raytf or callbacks write below a run's folder.
FOLDERS = {
    "attempts": "`ATTEMPT.json`, in order, for each start of a worker group: size, first step, and tier of its state",
    "checkpoints": "`STEP-ATTEMPT-SERIAL/`: shares of the ranks and `MANIFEST.json`, which is written last",
    "export": "`1/`, `2/`: the model for TensorFlow Serving, at the end of the run",
    "files": "files that the job's callbacks wrote to the folder that raytf passed to them",
    "ledger": "`DRIVER-N.jsonl`: the events below, each file from one driver; `live.json`: the newest heartbeat",
    "steps": (
        "`FIRST-ATTEMPT.csv`: a row for each step with epoch, loss, learning rate and gradient norm, which "
        "`raytf.read_steps` reads. "
        "`FIRST-ATTEMPT.digests`: digests of each shard's contribution, for `raytf replay`, `bisect` and `prove`"
    ),
    "tensorboard": "event files of raytf, of `--track tensorboard` and of the callbacks",
}
#: Files that raytf writes to the run's folder.
FILES = {
    "architecture.json": "the model, for `raytf export` without the run's code",
    "callbacks.safetensors": "the state of callbacks, for the next start of the run",
    "command.json": "the command that started the run, and its folder, for people to read",
    "lease.json": "the driver that owns the run now",
    "model.keras": "the trained model, if Keras can save it",
    "program.safetensors": "the last values of the program's own variables that the step reads, for `fit`",
    "result.json": "metrics and `weights_sha256`; written last, when all steps are done. A metric that is NaN or "
    "infinite is null, which raytf reads as NaN",
    "tracking.json": "the tracker's run for this run, and the last step that was reported to it",
    "void.json": "states that an audit found to be wrong; they are never restored",
    "weights.safetensors": "the trained weights, one tensor for each variable, for `raytf.load_weights` and `fit`",
}
#: Folders that only some runs have.
SOMETIMES = {
    "data": "data that the run had to store, such as a Ray Dataset",
    "hangs": "`.txt`: stacks of workers that made no progress",
}
#: The folder of a search, the file that marks it, the folder of its trials' records, and that of the best trial.
SEARCH, SEARCH_IDENTITY, TRIALS, BEST_TRIAL = "search", "search.json", "trials", "best"
#: The prefix of trials' folders.
TRIAL = "trial-"
#: The record of a finished trial.
TRIAL_RECORD = untrusted_json.record(
    {
        "number": untrusted_json.whole,
        "parameters": untrusted_json.values(untrusted_json.anything),
        "outcome": untrusted_json.text,
    },
    {
        "value": untrusted_json.optional(untrusted_json.number),
        "epochs": untrusted_json.whole,
        "why": untrusted_json.text,
        "history": untrusted_json.each(untrusted_json.values(untrusted_json.number)),
        "metrics": untrusted_json.values(untrusted_json.number),
    },
)
