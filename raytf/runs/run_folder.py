"""Files and folders of a run and of a search of `raytf tune`: their names, and what each is for."""

from __future__ import annotations

from raytf.storage import untrusted_json

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
#: The folder of a search, what makes a folder one, and where what became of its trials is; the folder of the best.
SEARCH, SEARCH_IDENTITY, TRIALS, BEST_TRIAL = "search", "search.json", "trials", "best"
#: How the folders of trials begin.
TRIAL = "trial-"
#: The record of a trial that is over.
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
