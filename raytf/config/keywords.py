"""The settings of a run as keyword arguments, with their types.

`python docs/reference/write.py` writes this module from the settings' fields. Do not edit it.
"""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict


class FitSettings(TypedDict, total=False):
    """The settings that `raytf.fit` takes beside the arguments of `keras.Model.fit`."""

    run: str | None
    """Name of the run; the same name on the same storage continues where that run stopped. Default: the name of the
    program, such as mnist for jobs/mnist.py, or of the notebook's file. Without such a name, it is notebook in a
    notebook and run elsewhere."""

    new: bool
    """Start another run beside the existing runs of that name: mnist-2, mnist-3 and so on. To continue it later, pass
    its name as `run` instead."""

    storage: str | PathLike[str]
    """Where runs are kept: a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."""

    status_file: str | PathLike[str] | None
    """Write the latest status as JSON to this local file, for scripts that watch the run."""

    histograms_every: int
    """Number of steps between two histograms of gradients and weights for TensorBoard, which also gets the model's
    graph; 0 turns this off."""

    track: str | None
    """Report the run to an experiment tracker: settings, metrics of each step and epoch, the report and the model. All
    starts of the run are one run of the tracker. A FILE receives one line of JSON for each step."""

    workers: str | int | None
    """Number of workers, or the fewest and the most, such as 1:8. Default: 2, or 1 with a `strategy` that has exactly
    one worker."""

    use_gpu: bool | None
    """Compute on GPUs, one for each worker unless `gpus_per_worker` is less. Default: on if the cluster has a GPU."""

    cpus_per_worker: float | None
    """CPUs and TensorFlow threads of each worker. Default: 1 of each; a worker on a GPU has as many threads as its node
    has CPUs for each GPU, or 1 with `exact`. Another number can change the last bit of a sum."""

    gpus_per_worker: float
    """GPUs of each worker that computes on GPUs: 1, or a fraction, such as 0.5 for two workers on one GPU."""

    resize_every_seconds: float
    """Minimum seconds between two changes of the number of workers when nodes join or leave with notice."""

    max_failures: int
    """How often lost workers are replaced before the run gives up; -1 never gives up. Five storage errors in a row
    without a new step stop the run in any case."""

    hang_seconds: float
    """A worker counts as hung after this many seconds without progress, or after the time of 20 steps if that is more.
    Callbacks, saves, validation, compiling and restoring may take 10 or 20 times as long. 0 turns this check off."""

    replace_stragglers: bool
    """Move a worker that stays slower than its peers to another node, if the cluster has one."""

    mixed_gpus: bool
    """Allow GPUs of several kinds in one group of workers. By default all workers of a group use the kind of GPU on
    which most workers can run, because the last bits of a result differ between kinds."""

    warm_workers: bool
    """Keep a process with TensorFlow imported ready on each node for each worker (about 0.7 GB each), which halves the
    time to replace a lost worker. A node that would have less than 2 GiB of free memory left keeps none."""

    strategy: Literal["multi-worker-mirrored", "mirrored", "one-device", "central-storage", "parameter-server", "tpu"]
    """multi-worker-mirrored: one process for each worker, gradients summed over the network; mirrored: one worker with
    all GPUs of its machine; one-device; central-storage: weights in the host's memory, computation on all GPUs;
    parameter-server: weights on `ps` servers, workers do not wait for each other; tpu."""

    communication: Literal["auto", "ring", "nccl", "host"]
    """How multi-worker-mirrored sums gradients: ring (over gRPC), nccl (between GPUs), host (in memory within a host,
    over TCP between hosts), or auto: nccl if each worker has its own GPU, otherwise host."""

    logical_devices: int | None
    """Use this many logical CPU devices instead of GPUs, for the one worker of mirrored or central-storage. Each device
    uses one of `cpus_per_worker`."""

    show_cluster: bool
    """Show each process's node, devices, memory and TF_CONFIG whenever workers start."""

    log_device_placement: bool
    """Show the device on which each operation of the training step runs; the full list is in the run's folder.
    Parameter servers do not support this."""

    ps: int | None
    """Number of parameter servers, which hold the weights (default 1). Each of them uses one CPU, as does the process
    that assigns the work."""

    sync_replicas: bool
    """With parameter servers: update with the mean of gradients that were all computed from the same weights."""

    replicas_to_aggregate: int | None
    """With `sync_replicas`: number of equal parts of a batch. Additional workers are backups that also compute some of
    the parts, and the first result counts. Default: the maximum number of workers, without backups."""

    notices: Literal["auto", "aws", "gcp", "azure", "off"]
    """The cloud whose metadata service each node polls. auto detects the cloud, and detects none on a laptop."""

    notice_url: str | None
    """Base URL of the metadata service if it is not the cloud's own; {node_id} stands for Ray's ID of the node."""

    follow_warnings: bool
    """Also leave a node on a warning: a rebalance recommendation of AWS, or a move or pause without a restart. Without
    this flag, warnings are only shown."""

    steps: int | None
    """Length in global steps; pass it instead of `epochs`."""

    logical_shards: int | None
    """Parts of a global batch, each of which is one micro-batch of one worker. If they do not divide the batch evenly,
    some have one more example. Default: the number of the existing run; for a new run, the smallest power of two that
    is at least the maximum number of workers, and on CPUs at least 4."""

    seed: int
    """Seed of initial weights, data order, dropout and augmentation."""

    pipeline: Literal["auto", "record", "live"]
    """How to read a tf.data.Dataset, a PyDataset or a generator: record reads one pass before training and uses it for
    all epochs; live reads batches during training; auto records data that is the same in each pass."""

    scale_learning_rate: Literal["none", "linear", "sqrt"]
    """Multiply the model's learning rate by `global_batch_size` / `base_batch_size` (linear), or by the square root of
    that ratio (sqrt)."""

    base_batch_size: int
    """The global batch for which the model's learning rate was chosen."""

    warmup_epochs: float
    """Raise the learning rate linearly to its full value over this many epochs: from the model's own rate if it is
    scaled up, otherwise from 0."""

    mixed_precision: Literal["off", "bfloat16", "float16"] | None
    """Compute in 16 bits and keep variables in 32 bits, or off. Default: the dtype policy that the job set."""

    jit: bool
    """Compile the gradient function with XLA."""

    exact: bool
    """Guarantee weights that are equal to the last bit for every number of workers and every failure, or refuse."""

    reduction: Literal["fixed", "float"]
    """How gradients are summed: fixed (fixed point, the same sum in every order) or float."""

    compress_gradients: bool
    """Send gradients in 16 instead of 32 bits, in fixed point: half the bytes, and still equal sums for every number of
    workers."""

    overlap: bool
    """Sum gradients over the workers in buckets of up to 32 MiB, while others are still being computed; the bits of the
    sums do not change."""

    steps_per_call: int
    """Steps in one call into TensorFlow; 0 chooses the number from the measured step time."""

    audit_every: int | None
    """Number of steps between two audits, in which another worker recomputes one shard and compares the bits. A machine
    with wrong results is reported and excluded, and the run rolls back. 0 turns audits off. Default: 256 with `exact`
    (less than 1 % of the time), otherwise 0."""

    digests: bool
    """Record a digest of each shard's contribution to each step, so that the step can be computed again and compared.
    Float sums have no digests."""

    checkpoint_every_steps: int | None
    """Number of steps between two checkpoints."""

    checkpoint_every_seconds: float | None
    """Number of seconds between two checkpoints (default 30 if `checkpoint_every_steps` is not passed). The first
    checkpoints after a start or a restart come sooner."""

    snapshot_every_steps: int | None
    """Number of steps between two copies of the state in the memory of the run's nodes, so that a failure costs few
    steps; 0 turns this off. By default as often as possible in less than 1 % of the time."""

    keep: int
    """Number of newest complete checkpoints to keep."""

    keep_best: str | None
    """Also keep the checkpoint of the epoch with the best value of a metric, such as val_accuracy or max:val_mine."""


class Settings(FitSettings, total=False):
    """All settings of a run, for `raytf.TrainConfig`."""

    verbose: bool
    """Show the messages of TensorFlow and Ray, too."""

    epochs: int | None
    """Passes over the training data. Default: the number in the program, or 1 if it has none and `steps` is not
    passed."""

    global_batch_size: int
    """Examples in one step, over all workers together."""
