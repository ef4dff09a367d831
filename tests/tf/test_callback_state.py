"""What callbacks keep and share with the program comes back as it would be after Keras's own `fit`."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from raytf import _tensorflow
from raytf.driver import preflight
from raytf.errors import ConfigError, ModelError
from raytf.storage.storage import Storage
from raytf.training.job import UserCode
from raytf.training.user import callbacks as training_callbacks
from raytf.training.user import later_files
from raytf.training.user.callbacks import Callbacks, foreseen
from raytf.training.user.user_code import Parcel
from tests.tf.ranks import Alone
from tests.unit.driver import test_epochs as epochs

PARAMS = {"verbose": 0, "epochs": 2, "steps": 3}

PROGRAM = '''
import collections, dataclasses, datetime, enum, random
import keras, numpy as np

class Mode(enum.Enum):
    SLOW = 1
    FAST = 2

@dataclasses.dataclass
class Record:
    epoch: int
    loss: float
    more: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: float

Pair = collections.namedtuple("Pair", "a b")

class Log:
    """A user's logger, which two callbacks share."""
    def __init__(self):
        self.rows, self.best = [], {"loss": None}
    def write(self, row):
        self.rows.append(row)

log, losses, table, calls, seen = Log(), [], {}, 0, set()
window = collections.deque([0.0], maxlen=3)
buffer = np.zeros(4, "float32")
raw = bytearray(b"a")

class Keeper(keras.callbacks.Callback):
    def __init__(self, start=0.0, history=None, log=None):
        super().__init__()
        self.start, self.history, self.log = start, history, log
        self.array, self.by_number, self.records = None, {}, []
        self.counter, self.grouped = collections.Counter(), collections.defaultdict(list)
        self.loop = [self]
        self.stale = 1

    def on_epoch_end(self, epoch, logs=None):
        loss = logs["loss"]
        self.start = loss
        self.history = [*(self.history or []), loss]
        self.array = np.arange(3.0) + epoch
        self.big = 10**30 + epoch
        self.half = np.array([1.5, epoch], "float16")
        self.names = np.array(["a", "bc"])
        self.scalar = np.float32(loss)
        self.by_number[epoch] = {"w": np.full((2, 2), epoch), (epoch, "x"): {1, 2}}
        self.records.append(Record(epoch, loss, self.records))
        self.mixed = (Pair(1, [2]), frozenset({3}), b"x\\x00", 1j, None, Mode.FAST, float("nan"), Point(0.5))
        self.when, self.took = datetime.datetime(2020, 1, 1 + epoch), datetime.timedelta(seconds=epoch)
        self.counter[epoch] += 2
        self.grouped["a"].append(epoch)
        self.op = keras.ops.less
        self.numpy_op = np.greater
        self.bound = self.on_epoch_end
        self.points = {Point(1.0), Point(2.0)}
        self.ordered = collections.OrderedDict(b=1, a=2)
        self.model_too = self.model
        self.log.write(loss)
        self.log.best["loss"] = self.array
        self.again = self.array
        if hasattr(self, "stale"):
            del self.stale

class Other(keras.callbacks.Callback):
    def __init__(self, log):
        super().__init__()
        self.log, self.draws, self.generator = log, [], np.random.default_rng(3)
        self.seen = keras.Variable(0.0, name="seen")
        self.mean = keras.metrics.Mean()

    def on_train_batch_end(self, batch, logs=None):
        self.log.write(batch)
        self.draws.append(float(self.generator.random()) + random.random() * 0)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.assign(epoch + 1.0)
        self.mean.update_state(epoch + 2.0)

def count(batch, logs):
    global calls
    calls += 1
    window.append(float(batch))
    buffer[batch % 4] += 1
    raw.extend(b"b")

def counter():
    number, inside = 0, []
    def hook(epoch, logs):
        nonlocal number
        number += 1
        inside.append(logs["loss"])
    return hook, lambda: (number, inside)

hook, read = counter()
callbacks = [
    Keeper(log=log), Other(log),
    keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (losses.append(logs["loss"]), seen.add(batch), count(batch, logs)),
        on_epoch_end=lambda epoch, logs: table.update({epoch: logs}),
    ),
    keras.callbacks.LambdaCallback(on_epoch_end=hook),
    keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=3, restore_best_weights=True),
]
'''


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    made.compile(keras.optimizers.SGD(0.1), "mse")
    made.optimizer.build(made.trainable_variables)
    return made


def program(source: str = PROGRAM) -> dict[str, Any]:
    """A program that ran up to its `fit`; its classes and functions are pickled by value, as those of a script."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "program.py", "exec"), names)
    return names


def sent(names: dict[str, Any]) -> list[keras.callbacks.Callback]:
    """The callbacks of a program as a worker gets them."""
    return type(parcel := Parcel(names["callbacks"])).__reduce__(parcel)[0](parcel.__reduce__()[1][0]).get()


def started(given: list[keras.callbacks.Callback], folder: Path, epoch: int | None = None, said=None) -> Callbacks:
    say = (said if said is not None else []).append
    made = Callbacks(given, model(), Alone(), say, str(folder), PARAMS, epoch)
    made.run("on_train_begin")
    return made


def run_epoch(hooks: Any, epoch: int) -> None:
    call = hooks.run if isinstance(hooks, Callbacks) else lambda name, *args: getattr(hooks, name)(*args)
    batch = hooks.run_batch if isinstance(hooks, Callbacks) else call
    call("on_epoch_begin", epoch)
    for step in range(3):
        batch("on_train_batch_end", step, {"loss": float(step)})
    call("on_epoch_end", epoch, {"loss": 2.0 - epoch})


def plainly(names: dict[str, Any], epochs: int) -> dict[str, Any]:
    """The program after the same hooks in its own process."""
    hooks = keras.callbacks.CallbackList(names["callbacks"], model=model(), **PARAMS)
    hooks.on_train_begin()
    for epoch in range(epochs):
        run_epoch(hooks, epoch)
    return names


def shape(value: Any, seen: dict[int, int] | None = None) -> Any:
    """A value as text that shows contents, kinds and what is one object at several places."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, (bool, int, float, str, complex, bytes)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (keras.Model, type)) or (callable(value) and not isinstance(value, keras.callbacks.Callback)):
        if isinstance(value, (keras.Metric, keras.Variable)):
            return [np.asarray(v).tolist() for v in getattr(value, "variables", [value])]
        return getattr(value, "__name__", type(value).__name__)
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, keras.Variable):
        return np.asarray(value).tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    name = type(value).__name__
    if isinstance(value, dict):
        return [name, [(shape(k, seen), shape(v, seen)) for k, v in value.items()]]
    if isinstance(value, (set, frozenset)):
        return [name, sorted(map(repr, value))]
    if isinstance(value, (list, tuple, collections.deque, bytearray)):
        return [name, [shape(each, seen) for each in value]]
    own = getattr(value, "__dict__", None) or {}
    own = own if own else {s: getattr(value, s) for s in getattr(type(value), "__slots__", ())}
    left = {k: shape(v, seen) for k, v in sorted(own.items()) if k not in ("_model", "model_too", "params")}
    return [name, left or repr(value)]


LOOKED_AT = ("log", "losses", "table", "calls", "seen", "window", "buffer", "raw", "callbacks")


def looked_at(names: dict[str, Any]) -> dict[str, Any]:
    seen: dict[int, int] = {}
    return {name: shape(names[name], seen) for name in LOOKED_AT} | {"read": shape(names["read"](), seen)}


def given_back(names: dict[str, Any], theirs: Callbacks, folder: Path) -> keras.Model:
    run, trained = Storage(str(folder / "run")), model()
    theirs.keep(run)
    training_callbacks.give_back(run, names["callbacks"], trained, PARAMS)
    return trained


def test_a_program_and_its_callbacks_are_as_after_keras_s_fit(tmp_path: Path):
    names, said = program(), []
    theirs = started(sent(names), tmp_path, said=said)
    for epoch in range(2):
        run_epoch(theirs, epoch)
    assert names["losses"] == []
    trained = given_back(names, theirs, tmp_path)
    assert looked_at(names) == looked_at(plainly(program(), 2))
    keeper = names["callbacks"][0]
    assert keeper.model is keeper.model_too is trained
    assert keeper.params == PARAMS
    assert keeper.op is keras.ops.less
    assert keeper.records[0].more is keeper.records
    assert type(keeper.mixed[0]) is names["Pair"]
    assert said == []


def test_it_is_so_after_a_resume_from_a_checkpoint(tmp_path: Path):
    names = program()
    first = started(sent(names), tmp_path)
    run_epoch(first, 0)
    values, arrays = first.state()
    values = json.loads(json.dumps(values))
    second = started(sent(program()), tmp_path, epoch=1)
    second.load_state(values, arrays)
    run_epoch(second, 1)
    given_back(names, second, tmp_path)
    assert looked_at(names) == looked_at(plainly(program(), 2))


def test_nothing_is_kept_of_callbacks_that_change_nothing(tmp_path: Path):
    theirs = started(sent(program("import keras\ncallbacks = [keras.callbacks.History()]")), tmp_path)
    assert theirs.state()[0].keys() <= {"objects", "new"}
    theirs.keep(Storage(str(tmp_path / "run")))


def test_a_state_of_older_versions_is_restored(tmp_path: Path):
    source = """
import keras
class Old(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen, self.weights = [], None
callbacks = [Old()]
"""
    theirs = started(sent(program(source)), tmp_path, epoch=1)
    values = {"callback/000/Old": {"seen": [1.0, [2]], "weights": {"arrays": 1}}}
    theirs.load_state(values, {"callback/000/Old/weights/00000": np.ones(2)})
    old = theirs._list[0]
    assert old.seen == [1.0, [2]]
    assert old.weights[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "damage",
    [
        {"objects": {"callbacks[0] Keeper": {"attributes": {"start": ["library", "os:system"]}}}, "new": {}},
        {"objects": {"callbacks[0] Keeper": {"attributes": {"start": ["nothing", 1]}}}, "new": {}},
        {"objects": {"callbacks[0] Keeper": {"attributes": {"start": ["#", 7]}}}, "new": {}},
        {"objects": {"callbacks[7] Gone": {"items": []}}, "new": {}},
        {"objects": {"callbacks[0] Keeper": {}}, "new": {"0": {"class": ["=", "os:system"]}}},
    ],
)
def test_a_damaged_state_is_named_and_runs_nothing(tmp_path: Path, damage: dict[str, Any]):
    said: list[str] = []
    theirs = started(sent(program()), tmp_path, epoch=1, said=said)
    theirs.load_state(damage, {})
    if "library" in str(damage):
        assert theirs._list[0].start is None
    else:
        assert any("could not be restored: callbacks[" in line for line in said)


def test_what_cannot_come_back_is_named_before_training_and_at_its_end(tmp_path: Path):
    source = """
import itertools, keras
class Odd(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()
    def on_epoch_end(self, epoch, logs=None):
        self.best = keras.models.clone_model(self.model)
callbacks = [Odd()]
"""
    said: list[str] = []
    theirs = started(sent(program(source)), tmp_path, said=said)
    assert [line.partition(": ")[2].rpartition(": ")[2] for line in said] == ["callbacks[0] Odd.numbers (count)"]
    run_epoch(theirs, 0)
    theirs.keep(Storage(str(tmp_path / "run")))
    assert said[1].endswith("cannot be sent back: callbacks[0] Odd.best (Sequential)")


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("self.model.compile('adam', 'mae')", "has compiled the model again"),
        ("self.model.optimizer = keras.optimizers.SGD(0.1)", "has replaced the optimizer"),
        ("self.model.loss = 'mae'", "has replaced the loss"),
        ("self.model.add(keras.layers.Dense(1))", "has replaced the layers"),
        ("self.model.layers[0].enable_lora(1)", "of the model"),
    ],
)
def test_a_callback_that_replaces_what_the_step_uses_is_refused(tmp_path: Path, change: str, named: str):
    source = f"""
import keras
class Changes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        {change}
callbacks = [Changes()]
"""
    theirs = started(sent(program(source)), tmp_path)
    with pytest.raises(ModelError, match=r"Compile before `fit`, and call `fit` twice") as caught:
        theirs.run("on_epoch_begin", 0)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("self.model.compile('adam', 'mae')", "compiles the model again"),
        ("model = self.model; model.compile('adam')", "compiles the model again"),
        ("self.model.optimizer = None", "replaces the model's optimizer"),
        ("self.model.optimizer.learning_rate = 0.1", ""),
        ("re.compile('x')", ""),
    ],
)
def test_what_will_be_refused_is_foreseen_from_a_hook_s_code(code: str, named: str):
    names: dict[str, Any] = {"Base": keras.callbacks.Callback}
    exec(f"class Changes(Base):\n    def on_epoch_end(self, epoch, logs=None):\n        {code}", names)
    exec(f"def hook(epoch, logs, self=None):\n    {code}", names)
    plain = keras.callbacks.EarlyStopping()
    for callback in names["Changes"](), keras.callbacks.LambdaCallback(on_epoch_end=names["hook"]):
        lines = foreseen([plain, callback])
        assert len(lines) == bool(named)
        assert all(f"{type(callback).__name__}.on_epoch_end {named}" in line for line in lines)
    assert not foreseen(None)
    assert not foreseen(lambda files: [plain])


def test_layers_frozen_by_a_callback_return_frozen_and_the_step_is_the_same(tmp_path: Path):
    source = """
import keras
class Freeze(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.before = self.model.layers[0].trainable
        self.model.layers[0].trainable = False
callbacks = [Freeze()]
"""
    names = program(source)
    theirs = started(sent(names), tmp_path)
    run_epoch(theirs, 0)
    assert len(theirs._model.trainable_variables) == 2
    resumed = started(sent(names), tmp_path, epoch=1)
    resumed.load_state(*theirs.state())
    run_epoch(resumed, 1)
    trained = given_back(names, resumed, tmp_path)
    assert names["callbacks"][0].before is False
    assert not trained.layers[0].trainable
    assert trained.trainable_variables == []


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_have_what_callbacks_add_and_hooks_see_vectors_as_arrays(tmp_path: Path):
    source = """
import keras, numpy as np
class Adds(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.vector = logs["f1_score"]
        logs["f1"], logs["name"], logs["array"] = np.float32(0.5), "x", keras.ops.ones(2)
        logs["epoch"], logs["odd"] = 3, object()
callbacks = [Adds(), keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)]
"""
    said: list[str] = []
    theirs = started(sent(program(source)), tmp_path, said=said)
    theirs.run("on_epoch_begin", 0)
    logs = theirs.end_epoch(0, {"f1_score": [0.5, 0.25], "loss": 1.0})
    wanted = {"f1_score": [0.5, 0.25], "loss": 1.0, "f1": 0.5, "name": "x", "array": [1.0, 1.0], "learning_rate": 0.25}
    assert logs == wanted
    assert list(logs) == list(wanted)
    assert theirs._list[0].vector.tolist() == [0.5, 0.25]
    assert [line.partition(", which")[0] for line in said] == [
        "WARNING: the history leaves out 'epoch'",
        "WARNING: the history leaves out 'odd'",
    ]


# -- files -------------------------------------------------------------------------------------------------------------

WRITING = """
import keras, tensorflow as tf
writer = tf.summary.create_file_writer("logs/metrics")
tf.summary.create_file_writer("logs/default").set_as_default()
file, raw = open("log.txt", "w"), open("raw.bin", "wb")
file.write("before\\n")
class Writes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with writer.as_default():
            tf.summary.scalar("mine", logs["loss"], step=epoch)
        tf.summary.scalar("default", logs["loss"], step=epoch)
        print(f"epoch {epoch} \\u00e4", file=file)
        raw.write(bytes([epoch]))
callbacks = [Writes()]
"""


def in_a_thread(work: Callable[[], Any]) -> Any:
    """The default writer is one of a thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_files_and_writers_of_the_program_are_opened_where_callbacks_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, files = Storage(str(tmp_path / "run")), str(tmp_path / "run" / "files")
    with _tensorflow.noted_writers():
        names, default = in_a_thread(lambda: (program(WRITING), _tensorflow.default_writer()))
    parcel = Parcel((names["callbacks"], default))
    closed, body = parcel.__reduce__()

    def train() -> None:
        given, default = closed(*body).get()
        later_files.take_default(*default)
        first = Callbacks(given, model(), Alone(), print, files, PARAMS, None)
        first.run("on_train_begin")
        run_epoch(first, 0)
        values = json.loads(json.dumps(first.state()[0]))
        run_epoch(first, 1)  # which a restart does again
        again, default = closed(*body).get()
        later_files.take_default(*default)
        second = Callbacks(again, model(), Alone(), print, files, PARAMS, 1)
        second.load_state(values, {})
        run_epoch(second, 1)
        second.keep(run)

    in_a_thread(train)
    later_files.give_back(run, parcel.files())
    names["file"].write("after\n")
    names["file"].close()
    names["raw"].close()
    assert (tmp_path / "log.txt").read_text() == "before\nepoch 0 ä\nepoch 1 ä\nafter\n"
    assert (tmp_path / "raw.bin").read_bytes() == b"\x00\x01"
    for folder, tag in (("metrics", b"mine"), ("default", b"default")):
        texts = [each.read_bytes() for each in (tmp_path / "logs" / folder).glob("events.out.tfevents*")]
        assert any(tag in text for text in texts), folder


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("socket.socket()", r"callbacks\[0\] Holds\.tools\['it'\] is a socket"),
        ("csv.writer(io.StringIO())", r"callbacks\[0\] Holds\.tools\['it'\] is a writer"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(value: str, named: str):
    source = f"""
import csv, io, socket, keras
class Holds(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.tools = {{"it": {value}}}
callbacks = [Holds()]
"""
    names = program(source)
    job = dataclasses.replace(epochs.job(0, 2), code=Parcel(UserCode(lambda: None, names["callbacks"])))
    with pytest.raises(ConfigError, match=named + r", which cannot be sent to the workers .*on_train_begin"):
        preflight.check_job_can_be_sent(job, print)


def test_locks_and_closed_files_are_no_reason_to_refuse_a_callback(tmp_path: Path):
    source = """
import threading, keras
class Guarded(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.lock, self.again, self.rows = threading.Lock(), threading.RLock(), []
        self.file = open("/dev/null", "w")
        self.file.close()
    def on_epoch_end(self, epoch, logs=None):
        with self.lock, self.again:
            self.rows.append(epoch)
callbacks = [Guarded()]
"""
    names, said = program(source), []
    theirs = started(sent(names), tmp_path, said=said)
    run_epoch(theirs, 0)
    given_back(names, theirs, tmp_path)
    assert (names["callbacks"][0].rows, said) == ([0], [])
