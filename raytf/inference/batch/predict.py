"""Predicts on Ray Data: a pool of actors runs the model, and the driver writes the predictions in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray
import ray.data

from raytf import _process
from raytf.cluster import autoscaler_limits
from raytf.cluster.autoscaler_limits import Growth
from raytf.cluster.connect import ray_for
from raytf.config.resources import fitting
from raytf.data.sources.images import Fit
from raytf.distributed.gpu import visibility
from raytf.errors import ClusterError, ConfigError, DataError, ModelError, RaytfError, one_line
from raytf.inference import versions
from raytf.inference.batch import columns, reader
from raytf.inference.batch.columns import Options
from raytf.inference.batch.writer import PredictionWriter
from raytf.inference.signature import DEFAULT, Signature
from raytf.inference.versions import Version
from raytf.storage.storage import Storage

#: CPUs for reading, in addition to those of the workers, by Ray Data's default.
_READING_CPUS = 1.0
#: The most bytes of a saved_model.pb that protobuf can read.
_GRAPH_BYTES = 2 << 30


@dataclass(frozen=True)
class PredictionPlan:
    """The settings of a prediction for all records of a data set.

    Attributes:
        version: version of the model; None for the newest.
        workers: the fewest and the most processes that run the model.
        cpus, gpus: CPUs and GPUs of each worker.
        fit: how to adapt an image of another shape to the model.
    """

    model: str
    source: str
    output: str
    version: int | None = None
    options: Options = field(default_factory=Options)
    batch_size: int = 256
    workers: tuple[int, int] = (1, 1)
    cpus: float = 1.0
    gpus: float = 0.0
    overwrite: bool = False
    verbose: bool = False
    fit: Fit = "crop"


class Predictor:
    """Runs the model in a process of Ray Data."""

    def __init__(self, models: str, version: Version, options: Options, threads: int):
        visibility.hide_unless_given()
        _process.load_tensorflow()
        from raytf.inference.saved_model import SavedModel

        with versions.local_copy(Storage(models), version) as folder:
            self._model = SavedModel(folder, threads)
        self._signature = _signature(self._model.signatures)
        self._options = options

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        signature, options = self._signature, self._options
        chosen = columns.sources(signature, batch, options.x)
        inputs = {name: columns.tensor(chosen[name], batch, spec) for name, spec in signature.inputs.items()}
        outputs = self._model.run(signature.name, inputs)
        beside = {name: batch[name] for name in columns.kept(batch, options.keep)}
        return {**beside, **columns.named(outputs, options.classes, list(beside))}


def run(plan: PredictionPlan, show: Callable[[int, int | None], None], say: Callable[[str], None]) -> int:
    """Predict for every record, and return the number of records.

    Args:
        show: called with the number of records done, and the total if known.
        say: called with messages.

    Raises:
        RaytfError: the prediction failed and wrote no output; the message says what is wrong and how to fix it.
    """
    models, version = find(plan.model, plan.version)
    sink, source = PredictionWriter(plan.output, plan.overwrite), reader.inspect(plan.source)
    say(f"model {models.locate(version.name)}")
    if not plan.verbose:
        # Ray warns that arguments of Ray Data's actors may go out of scope; they stay in scope while it runs.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        for name in ("ray.data", "ray.data._internal"):
            logging.getLogger(name).setLevel(logging.ERROR)
    with ray_for(lambda: plan.cpus * plan.workers[1] + 1, plan.verbose) as is_local:
        _check_room(plan, is_local, say)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = plan.verbose
        context.print_on_execution_start = plan.verbose
        context.execution_options.preserve_order = True
        try:
            data, total = reader.read(source, lambda: _signature_of(models, version), plan.options, plan.fit)
            threads = max(1, round(plan.cpus))
            predicted = data.map_batches(
                Predictor,
                fn_constructor_args=[models.root if models.is_local else models.uri, version, plan.options, threads],
                batch_size=plan.batch_size,
                batch_format="numpy",
                compute=ray.data.ActorPoolStrategy(min_size=plan.workers[0], max_size=plan.workers[1]),
                num_cpus=plan.cpus,
                num_gpus=plan.gpus or None,
            )
            with sink:
                show(0, total)
                for batch in predicted.iter_batches(batch_size=None, batch_format="numpy"):
                    sink.add(batch)
                    show(sink.rows, total)
            return sink.rows
        except RaytfError:
            raise
        except Exception as error:
            raise explain(error) from error


def find(uri: str, number: int | None) -> tuple[Storage, Version]:
    """Return the folder of versions and the version to use.

    Raises:
        ConfigError: there is no such version.
    """
    models, _, named = versions.models_of(uri)
    if None not in (named, number) and named != number:
        raise ConfigError(f"--version {number}: {uri} is version {named}.")
    wanted = named if number is None else number
    good = versions.choose(models, [] if wanted is None else [wanted])
    return models, next(version for version in good if wanted in (None, version.number))


def shortage(nodes: Sequence[Mapping[str, float]], workers: int, cpus: float, gpus: float) -> str:
    """Return the resources that nodes lack for this many workers and the reading tasks; empty if they lack none.

    Args:
        nodes: the resources of each node.
        cpus, gpus: CPUs and GPUs of a worker.
    """
    for kind, wanted in (("CPU", cpus * workers + _READING_CPUS), ("GPU", gpus * workers)):
        have = sum(node.get(kind, 0) for node in nodes)
        if have < wanted:
            beside = f", {_READING_CPUS:g} of them to read the data" if kind == "CPU" else ""
            return f"{wanted:g} {kind}{beside}, and this cluster has {have:g}"
    fits = sum(fitting(node, {"CPU": cpus, "GPU": gpus}) for node in nodes)
    if fits < workers:
        return f"{workers} times {cpus:g} CPU and {gpus:g} GPU on one node, and this cluster has room for {fits}"
    return ""


def _check_room(plan: PredictionPlan, is_local: bool, say: Callable[[str], None]) -> None:
    """Refuse more workers than the cluster can run: Ray Data would wait for them forever.

    Raises:
        ClusterError: resources are missing; the message lists them.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    missing = shortage(nodes, plan.workers[0], plan.cpus, plan.gpus)
    if not missing:
        return
    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    growth = Growth.NO if is_local else autoscaler_limits.find(port)
    more = not isinstance(growth, Growth) and not shortage([*nodes, growth], plan.workers[0], plan.cpus, plan.gpus)
    if growth is Growth.UNKNOWN or more:
        say(f"waiting for nodes: {plan.workers[0]} workers need {missing}")
        return
    raise ClusterError(
        f"--workers {plan.workers[0]} needs {missing}. Use fewer --workers, --cpus-per-worker or --gpus-per-worker, "
        "or add nodes."
    )


def explain(error: BaseException) -> RaytfError:
    """Return the error for users that Ray Data wrapped in its own."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        if isinstance(at, RaytfError):
            return at
        at = getattr(at, "cause", None) or at.__cause__ or at.__context__
    for inner in reversed(seen):
        if type(inner).__module__.startswith("pyarrow") or isinstance(inner, (OSError, ValueError)):
            return DataError(f"the data cannot be read: {type(inner).__name__}: {one_line(inner, 300)}")
    inner = seen[-1]
    return ClusterError(f"Ray Data failed: {type(inner).__name__}: {one_line(inner, 400)}")


def _signature(signatures: dict[str, Signature]) -> Signature:
    signature = signatures.get(DEFAULT)
    if signature is None:
        raise ModelError(f"the model has no signature {DEFAULT}; it has {', '.join(signatures)}.")
    return signature


def _signature_of(models: Storage, version: Version) -> Signature:
    with visibility.unseen():
        _process.load_tensorflow()
    from raytf.inference.saved_model import signatures_of

    graph = next(name for name in versions.GRAPHS if name in version.sizes)
    return _signature(signatures_of(graph, models.get(f"{version.name}/{graph}", _GRAPH_BYTES)))
