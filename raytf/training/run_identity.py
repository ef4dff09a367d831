"""The identity of a run, as texts that can be compared: settings, data, model. Does not use TensorFlow.

There are three kinds of keys. Keys that all versions write must be equal, or the run cannot be resumed. Keys that newer
versions added are compared if both sides have them. Keys that concern only the result (validation and test data,
compiled metrics, code of the job's own classes) may change when a run is resumed. For a finished run, they decide
whether its result still applies.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raytf.config.canonical_text import plainly
from raytf.config.identity import batch_identity, differences
from raytf.data import tree
from raytf.data.sources import ArraySource, Source, fingerprint
from raytf.distributed.gpu import determinism
from raytf.training.job import Sources, TrainingJob

STRUCTURE, ARCHITECTURE = "model structure", "model architecture"
CODE = "code of the model"
DATA = {"contents of the training data": "train", "validation data": "validation", "test data": "test"}
_LATER = (STRUCTURE, "model loss weights", "contents of the training data")
METRICS = "model compiled metrics"
_ANSWERS = ("validation data", "test data", METRICS, CODE)
#: Keys that only workers can compute, because they depend on the machine. For a finished run they are not compared: its
#: result applies to any machine.
FIRST_GRADIENTS = "arithmetic (a hash of the first gradients on this kind of machine)"
FIRST_STEP = "arithmetic (a hash of the first step on this kind of GPU)"
_OF_WORKERS = (FIRST_GRADIENTS, FIRST_STEP, determinism.TF32, determinism.CUDNN, "updates")
#: Arrays of at most this many bytes are hashed as a whole.
_WHOLE_BYTES = 128 << 20
#: Of larger arrays, at most this many parts of about this many bytes are hashed.
_PARTS, _PART_BYTES = 512, 128 << 10


def of_run(job: TrainingJob, sources: Sources) -> dict[str, str]:
    """Return the part of the identity that does not depend on the model."""
    settings = {} if job.settings is None else job.settings.identity()
    unshuffled = {} if job.shuffle else {"shuffle": "off"}
    return (
        batch_identity(job.config, job.plan.records, job.precision)
        | unshuffled
        | settings
        | {
            "training data": fingerprint(sources.train),
            "contents of the training data": contents(sources.train),
            "validation data": contents(sources.validation),
            "test data": contents(sources.test),
            "class weights": json.dumps(sorted((job.class_weight or {}).items())),
            "augmentation": str(job.augment is not None),
        }
    )


def of_model(described: Mapping[str, str], code: str) -> dict[str, str]:
    """Return the part of the identity that depends on the model.

    Args:
        described: the result of `raytf.training.model.model.describe`.
        code: the result of `raytf.training.model.model.code`.
    """
    return {f"model {key}": value for key, value in described.items()} | {CODE: code}


def contents(source: Source | None) -> str:
    """Return a text that identifies the contents of data, wherever they are stored. Small arrays are hashed as a whole,
    and large ones in part. Other sources are identified by their fingerprint."""
    if source is None:
        return "none"
    kinds = [f"{path or 'x'} {leaf.dtype}{list(leaf.shape)}" for path, leaf in tree.flatten(source.spec)]
    if not isinstance(source, ArraySource):
        return f"{fingerprint(source)}, {'; '.join(kinds)}"
    crc = 0
    for leaf in source.leaves:
        crc = _crc(leaf, crc)
    return f"{source.records} records, CRC-32 {crc:08x}, {'; '.join(kinds)}"


def _crc(leaf: np.ndarray, crc: int) -> int:
    rows = len(leaf) if leaf.nbytes <= _WHOLE_BYTES else max(1, _PART_BYTES * len(leaf) // leaf.nbytes)
    last = len(leaf) - rows
    parts = 1 if last == 0 else max(2, min(_PARTS, _WHOLE_BYTES * len(leaf) // (rows * leaf.nbytes)))
    starts = np.unique(np.linspace(0, last, parts).astype(np.int64))
    for start in starts:
        crc = zlib.crc32(np.ascontiguousarray(leaf[start : start + rows]).reshape(-1).view(np.uint8).data, crc)
    return crc


def resume_mismatch(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return why a run cannot be resumed, as text for the user; empty if it can."""
    return _differences(before, now, _ANSWERS)


def result_mismatch(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return how a finished run differs from the requested one, as text for the user; empty if it does not."""
    both = {key for key in _ANSWERS if key in before and key in now}
    return _differences(before, now, [*_OF_WORKERS, *(key for key in _ANSWERS if key not in both)])


def _differences(before: Mapping[str, str], now: Mapping[str, str], left_out: Any) -> str:
    skipped = {*left_out, *(key for key in _LATER if key not in before or key not in now)}
    if STRUCTURE not in skipped:
        skipped.add(ARCHITECTURE)  # also contains the numbers that Keras assigns to layers, which may differ
    plain = [{k: plainly(v) for k, v in side.items() if k not in skipped} for side in (before, now)]
    return differences(*plain)
