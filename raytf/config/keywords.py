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
    program, such as mnist for jobs/mnist.py; in a notebook the name of its file, else notebook; run for a program
    without a name."""

    new: bool
    """Start another run beside those of that name: mnist-2, mnist-3 and so on. To continue it later, pass its name as
    `run` instead."""

    storage: str | PathLike[str]
    """Where runs are kept: a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."""

    status_file: str | PathLike[str] | None
    """Keep the latest status as JSON in this local file, for scripts that watch the run."""

    histograms_every: int
    """Write histograms of gradients and weights for TensorBoard after this many steps, and the model's graph; 0 never
    does."""

    track: str | None
    """Report the run to an experiment tracker, as one of its runs for all starts of this one: settings, the metrics of
    each step and epoch, the report and the model. A FILE gets a line of JSON for each step."""

    workers: str | int | None
    """Number of workers, or the fewest and the most, such as 1:8. Default: 2, or 1 with a `strategy` that has exactly
    one worker."""

    use_gpu: bool | None
    """Compute on GPUs, one for each worker unless `gpus_per_worker` is less; by default if the cluster has any."""

    cpus_per_worker: float | None
    """CPUs and TensorFlow threads of each worker; 1 by default. A worker on a GPU then requests 1 CPU from Ray and has
    as many threads as its node has CPUs for each GPU, or 1 with `exact`. Another number can change the last bit of a
    sum."""

    gpus_per_worker: float
    """GPUs of each worker that computes on GPUs: 1, or a part, such as 0.5 for two workers on one GPU."""

    resize_every_seconds: float
    """Least number of seconds between two changes of the number of workers, when nodes join or leave with notice."""

    max_failures: int
    """How often lost workers are replaced before the run gives up; -1 never gives up. Five storage errors in a row
    without a new step stop the run in any case."""

    hang_seconds: float
    """A worker without progress for this many seconds, or for 20 steps if they take longer, counts as hung. Callbacks,
    saves, validation, compiling and restoring may take ten or twenty times as long. 0 turns this check off."""

    replace_stragglers: bool
    """Move a worker that stays slower than its peers to another node, if the cluster has one."""

    mixed_gpus: bool
    """Allow GPUs of several kinds in one group of workers. By default all workers of a group have GPUs of one kind, the
    one on which most workers can run: another kind computes other last bits."""

    warm_workers: bool
    """Keep processes that have imported TensorFlow ready on each node, one for each worker, about 0.7 GB each: a lost
    worker is replaced in half the time. A node that would have less than 2 GiB of free memory left keeps none."""

    strategy: Literal["multi-worker-mirrored", "mirrored", "one-device", "central-storage", "parameter-server", "tpu"]
    """multi-worker-mirrored: a process for each worker, gradients added over the network; mirrored: one worker with all
    GPUs of its machine; one-device; central-storage: weights in the host's memory, work on all GPUs; parameter-server:
    weights on `ps` servers, workers that do not wait for each other; tpu."""

    communication: Literal["auto", "ring", "nccl", "host"]
    """How multi-worker-mirrored adds: ring (all over gRPC), nccl (from GPU to GPU), host (workers of one host in its
    memory, hosts over TCP), or auto: nccl where each worker has a GPU of its own, else as host."""

    logical_devices: int | None
    """Use this many logical CPU devices in place of GPUs, for the one worker of mirrored or central-storage; each takes
    one of `cpus_per_worker`."""

    show_cluster: bool
    """Show each process's node, devices, memory and TF_CONFIG whenever workers start."""

    log_device_placement: bool
    """Show on which device each operation of the training step runs; the whole list is in the run's folder. Not with
    parameter servers, which do not report it."""

    ps: int | None
    """Parameter servers, over which the weights are spread (default 1). They and the process that hands out the work
    take one CPU each."""

    sync_replicas: bool
    """Parameter servers: update with the mean of gradients that were all computed from the same weights."""

    replicas_to_aggregate: int | None
    """With `sync_replicas`: equal parts of a batch whose gradients make an update. Workers beyond this number compute
    some parts a second time, and the first result counts (default: the most workers, so that there is no backup)."""

    notices: Literal["auto", "aws", "gcp", "azure", "off"]
    """The cloud whose metadata service each node asks; auto finds out which, and finds none on a laptop."""

    notice_url: str | None
    """Base URL of that service if it is not the cloud's own; {node_id} stands for Ray's id of the node."""

    follow_warnings: bool
    """Leave a node on a warning, too: a rebalance recommendation of AWS, or a move or pause without a restart. Without
    this flag, warnings are only shown."""

    steps: int | None
    """Global steps, instead of epochs."""

    logical_shards: int | None
    """Parts of a global batch, each of which is one micro-batch of one worker. If they do not divide the batch, some
    have one example more. Default: that of an existing run, otherwise a power of two, at least 4 and at least the most
    workers."""

    seed: int
    """Seed of initial weights, data order, dropout and augmentation."""

    pipeline: Literal["auto", "record", "live"]
    """Batches of a tf.data.Dataset, a PyDataset or a generator: record reads one pass before training and uses it for
    all epochs, live makes them while the run trains; auto records what is the same in each pass."""

    scale_learning_rate: Literal["none", "linear", "sqrt"]
    """Multiply the model's learning rate by `global_batch_size` / `base_batch_size` (linear), or by the root of that
    (sqrt)."""

    base_batch_size: int
    """The global batch for which the model's learning rate was chosen."""

    warmup_epochs: float
    """Raise the rate linearly over this many epochs to its full value: from the model's own where it is scaled up, else
    from 0."""

    mixed_precision: Literal["off", "bfloat16", "float16"] | None
    """Compute in 16 bits and keep variables in 32, or off. The default is the dtype policy that the job has set."""

    jit: bool
    """Compile the gradient function with XLA."""

    exact: bool
    """Promise the same weights to the last bit for every number of workers and every failure, or refuse and say why."""

    reduction: Literal["fixed", "float"]
    """How gradients are added: fixed (fixed point, the same for every order of addition) or float."""

    compress_gradients: bool
    """Send gradients as 16 instead of 32 bits, in fixed point: half the bytes, and still the same for every number of
    workers."""

    overlap: bool
    """Add gradients over the workers in buckets of up to 32 MiB, each as soon as it is known, while others are still
    computed; the sums have the same bits."""

    steps_per_call: int
    """Steps run by one call into TensorFlow; 0 picks it from the measured step time."""

    audit_every: int | None
    """Have another worker compute one shard of every so many steps again, and compare the bits. A machine that computes
    wrongly is reported and left out, and the run rolls back. 0 never does; the default is 256 with `exact` (less than 1
    % of the time) and 0 without."""

    digests: bool
    """Record a digest of what each shard adds in each step, so that the step can be computed again and compared. Sums
    of floats have none."""

    checkpoint_every_steps: int | None
    """Save after this many steps."""

    checkpoint_every_seconds: float | None
    """Save after this many seconds (default 30 if `checkpoint_every_steps` is not passed either); the first steps of a
    run, and those after a restart, are saved sooner."""

    snapshot_every_steps: int | None
    """Copy the state into the memory of the run's nodes after this many steps, so that a failure costs few steps; 0
    never does. By default as often as possible in less than 1 % of the time."""

    keep: int
    """How many of the newest complete checkpoints are kept."""

    keep_best: str | None
    """Also keep the checkpoint of the epoch with the best value of a metric, such as val_accuracy or max:val_mine."""


class Settings(FitSettings, total=False):
    """All settings of a run, for `raytf.TrainConfig`."""

    verbose: bool
    """Show the messages of TensorFlow and Ray, too."""

    epochs: int | None
    """Passes over the training data. Default: the program's number; 1 if it has none and `steps` is not passed
    either."""

    global_batch_size: int
    """Examples in one step, over all workers together."""
