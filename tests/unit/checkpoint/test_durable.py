"""Saving: what fails or hangs is given up, never complete, and never in the way of the next save."""

import threading
import time
import zlib

import numpy as np
import pytest

from raytf.checkpoint import durable, manifest, naming, verify
from raytf.checkpoint.commit import Commit, Event, Votes
from raytf.checkpoint.durable import DurableSave, DurableTier, Keep
from raytf.checkpoint.manifest import FOLDER, CheckpointDocument
from raytf.checkpoint.naming import GroupAttempt
from raytf.config.objective import MetricObjective
from raytf.errors import CheckpointError, RunInUseError
from raytf.storage.storage import Storage
from raytf.testing import StorageProxy

ATTEMPT = "20260101T000000.000-aaaaaa"
DOCUMENT = CheckpointDocument(
    identity={"model": "a"},
    history=[{"epoch": 0, "step": 7, "loss": 0.5}],
    train_seconds=1.5,
    imbalance_seconds=0.5,
    stopped_early=True,
    best=("loss", 0.5),
    world_size=2,
    callbacks={"0": {"wait": 3}},
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Ranks:
    """All ranks of a group in this process; their votes are added as the gradients' sum would."""

    def __init__(self, run, world_size=2, keep=3, goal=None, attempt=ATTEMPT, earlier=(), **more):
        self.said, self.clock = [], Clock()
        more = {"say": self.said.append, "clock": self.clock, **more}
        attempts = [GroupAttempt(attempt, rank, world_size, tuple(earlier)) for rank in range(world_size)]
        self.tiers = [DurableTier(run, own, Keep(keep, goal), **more) for own in attempts]
        self.commits = [Commit(tier, world_size) for tier in self.tiers]

    def begin(self, step, document=None, **more):
        for rank, commit in enumerate(self.commits):
            tensors = {f"w{rank}": np.full(10, step, np.float32)}
            commit.begin(DurableSave(step, tensors, document or CheckpointDocument(), **more))

    def advance(self):
        """One step of the protocol, on every rank."""
        votes = sum((commit.votes() for commit in self.commits), Votes())
        (event,) = {commit.advance(votes) for commit in self.commits}
        return event

    def finish(self, settle=True):
        """How the save under way ends, and what retention does then."""
        while True:
            event = self.advance()
            if event in (Event.DONE, Event.FAILED):
                if settle:
                    self.tiers[0].settle(60)
                return event
            time.sleep(0.01)

    def save(self, step, document=None, **more):
        self.begin(step, document, **more)
        return self.finish()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fail(message):
    def call():
        raise OSError(message)

    return call


@pytest.fixture
def run(tmp_path):
    return Storage(str(tmp_path / "run"))


class SlowToDelete(Storage):
    """Storage whose deletions take until `go` is set."""

    def __init__(self, uri):
        super().__init__(uri)
        self.go, self.is_waiting = threading.Event(), threading.Event()

    def delete(self, name):
        self.is_waiting.set()
        assert self.go.wait(60)
        super().delete(name)


class SlowToList(SlowToDelete):
    """Storage whose lists of folders take until `go` is set, and say then what there is."""

    def list(self, name=""):
        self.is_waiting.set()
        assert self.go.wait(60)
        return super().list(name)


def folders(run):
    return [n.rstrip("/") for n in run.list(FOLDER) if n.endswith("/")]


def test_what_is_saved_is_read(run):
    ranks = Ranks(run)
    assert ranks.save(7, DOCUMENT) is Event.DONE
    found = durable.load(run, ranks.tiers[0].name)
    assert (found.step, found.document) == (7, DOCUMENT)
    assert {name: value.tolist() for name, value in found.tensors.items()} == {"w0": [7] * 10, "w1": [7] * 10}
    assert ranks.said == []


def test_ranks_without_tensors_write_nothing(run):
    ranks = Ranks(run, world_size=20)
    for rank, commit in enumerate(ranks.commits):
        tensors = {f"w{rank}": np.full(10, rank, np.float32)} if rank < 18 else {}
        commit.begin(DurableSave(7, tensors, writers=18))
    assert ranks.finish() is Event.DONE
    name = ranks.tiers[0].name
    files = [f"share-{rank:05d}.{kind}" for rank in range(18) for kind in ("json", "safetensors")]
    assert run.list(f"{FOLDER}/{name}") == [manifest.FILE, *files]
    assert [share["names"] for share in manifest.read(run, name)["shares"]] == [[f"w{rank}"] for rank in range(18)]
    assert len(durable.load(run, name).tensors) == 18


def test_a_failed_save_is_removed_and_said_once(run):
    ranks = Ranks(run)
    assert ranks.save(1) is Event.DONE
    for step in (2, 3, 4):
        assert ranks.save(step, before=fail("the disk is full")) is Event.FAILED
    assert sorted(ranks.said) == ["rank 0: the disk is full", "rank 1: the disk is full"][: len(ranks.said)]
    assert ranks.said
    until(lambda: len(folders(run)) == 1)
    assert ranks.save(5) is Event.DONE
    assert ranks.save(6, before=fail("again")) is Event.FAILED
    assert "again" in ranks.said[-1]
    assert [naming.split_name(n)[0] for n in manifest.list_complete(run)] == [5, 1]


def test_a_state_with_nan_is_not_saved(run):
    ranks = Ranks(run, world_size=1)
    ranks.commits[0].begin(DurableSave(1, {"w": np.array([1, np.nan])}, finite=["w"]))
    assert ranks.finish() is Event.FAILED
    assert "w has NaN" in ranks.said[0]


def test_a_store_that_hangs_is_not_waited_for(s3, s3_endpoint):
    """The first save hangs in a store that answers no more; the next one goes past it."""
    direct = Storage(s3("run"))
    with StorageProxy(s3_endpoint) as proxy:
        ended = threading.Event()
        ranks = Ranks(Storage(s3("run").replace(s3_endpoint, proxy.endpoint)), late=ended.set)
        proxy.delay(4)
        ranks.begin(1)
        ranks.clock.now = durable.DEADLINE_SECONDS - 1
        assert ranks.advance() is Event.NOTHING
        ranks.clock.now = durable.DEADLINE_SECONDS + 1
        assert ranks.advance() is Event.FAILED
        assert "did not store the checkpoint within 120 s" in ranks.said[0]
        proxy.delay(0)
        assert ranks.save(2) is Event.DONE
        assert ended.wait(60)
        assert [naming.split_name(n)[0] for n in manifest.list_complete(direct)] == [2]


def test_a_manifest_that_comes_late_makes_no_checkpoint(s3, s3_endpoint):
    direct = Storage(s3("run"))
    with StorageProxy(s3_endpoint) as proxy:
        ended = threading.Event()
        ranks = Ranks(Storage(s3("run").replace(s3_endpoint, proxy.endpoint)), world_size=1, late=ended.set)
        ranks.begin(1)
        until(lambda: ranks.commits[0].votes().written)
        proxy.delay(2)
        assert ranks.advance() is Event.COMMIT
        ranks.clock.now = durable.DEADLINE_SECONDS + 1
        assert ranks.advance() is Event.FAILED
        assert not ended.is_set()
        proxy.delay(0)
        assert ended.wait(60)
        assert manifest.list_complete(direct) == []


def test_saves_that_hang_take_a_bounded_memory(run):
    ended, release = [], threading.Event()
    ranks = Ranks(run, world_size=1, late=lambda: ended.append(True))
    for step in (1, 2):
        ranks.begin(step, before=lambda: release.wait(60))
        ranks.clock.now += durable.DEADLINE_SECONDS + 1
        assert ranks.advance() is Event.FAILED
    ranks.begin(3)
    assert ranks.advance() is Event.FAILED  # at once: nothing was begun
    assert "2 earlier writes still hang" in str(ranks.tiers[0].failure)
    release.set()
    until(lambda: len(ended) == 2)
    assert ranks.save(4) is Event.DONE
    assert [naming.split_name(n)[0] for n in manifest.list_complete(run)] == [4]


def test_a_store_known_to_be_slow_is_given_more_time(run):
    ranks = Ranks(run, world_size=1)
    ranks.begin(1)
    ranks.clock.now = 50
    assert ranks.finish() is Event.DONE
    release = threading.Event()
    ranks.begin(2, before=lambda: release.wait(60))
    ranks.clock.now += 499
    assert ranks.advance() is Event.NOTHING
    ranks.clock.now += 2
    assert ranks.advance() is Event.FAILED
    release.set()


def steps(run):
    return [naming.split_name(n)[0] for n in manifest.list_complete(run)]


def test_the_best_is_kept_beside_the_newest(run):
    ranks = Ranks(run, keep=2, goal=MetricObjective("val_accuracy", True))
    history = []
    for epoch, accuracy in enumerate([0.5, 0.9, 0.7, 0.9, float("nan"), 0.8]):
        history.append({"step": 10 * epoch + 10, "val_accuracy": accuracy})
        assert ranks.save(10 * epoch + 10, CheckpointDocument(history=list(history))) is Event.DONE
        assert ranks.save(10 * epoch + 15, CheckpointDocument(history=list(history))) is Event.DONE  # within an epoch
    assert steps(run) == [65, 60, 20]
    other = Ranks(run, keep=1, attempt="20260102T000000.000-bbbbbb", goal=MetricObjective("val_accuracy", False))
    other.save(70)
    assert steps(run) == [70, 60]


def damage_newest(run, how):
    name = manifest.list_complete(run)[0]
    share = f"{FOLDER}/{name}/share-00000.safetensors"
    if how == "cut":
        run.put(share, run.get(share)[:-1])
    elif how == "deleted":
        run.delete(share)
    elif how == "not JSON":
        run.put(f"{FOLDER}/{name}/{manifest.FILE}", b"{")
    elif how == "another save's":
        older = manifest.list_complete(run)[1]
        run.put(share, run.get(f"{FOLDER}/{older}/share-00000.safetensors"))
    elif how == "another save's manifest":
        older = manifest.list_complete(run)[1]
        run.put(f"{FOLDER}/{name}/{manifest.FILE}", run.get(f"{FOLDER}/{older}/{manifest.FILE}"))
    return name


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "share-00000.safetensors has [0-9]+ of [0-9]+ bytes"),
        ("deleted", "share-00000.safetensors is missing"),
        ("not JSON", "the manifest cannot be read"),
        ("another save's", "share-00000.safetensors has a wrong checksum"),
        ("another save's manifest", "the manifest belongs to another checkpoint"),
    ],
)
def test_damage_is_reported_in_one_line(run, how, words):
    ranks = Ranks(run)
    for step in (1, 2):
        ranks.save(step)
    name = damage_newest(run, how)
    with pytest.raises(CheckpointError, match=words) as damaged:
        durable.load(run, name)
    assert name in str(damaged.value)
    assert "\n" not in str(damaged.value)
    assert durable.load(run, manifest.list_complete(run)[1]).step == 1


@pytest.mark.parametrize("how", ["cut", "deleted", "not JSON", "another save's manifest"])
def test_the_last_good_one_outlives_a_newer_one_that_is_damaged(run, how):
    first = Ranks(run)
    for step in (1, 2):
        first.save(step)
    name = damage_newest(run, how)
    later = Ranks(run, keep=2, attempt="20260102T000000.000-bbbbbb")
    later.save(3)
    assert steps(run) == [3, 1]
    assert any(name in text and "the checkpoint is ignored" in text for text in later.said)


class Forgetful(Storage):
    """Storage that has lost a share by the time that the manifest is there."""

    def put(self, name, data):
        super().put(name, data)
        if name.endswith(manifest.FILE):
            self.delete(name.replace(manifest.FILE, "share-00001.safetensors"))


def test_what_was_lost_while_it_was_written_lets_nothing_go(run):
    """The checkpoint before it is worth more than ever."""
    Ranks(run).save(1)
    ranks = Ranks(Forgetful(run.uri), keep=1, attempt="20260102T000000.000-bbbbbb")
    for step in (2, 3):
        ranks.save(step)
        assert steps(run) == [1]
    assert any("share-00001.safetensors is missing; the checkpoint is ignored" in text for text in ranks.said)


def as_version_one(run, name):
    """Write a checkpoint's manifest as older raytf did, with zlib's CRC-32 of each share."""
    body = manifest.read(run, name)
    for share in body["shares"]:
        del share["crc32c"]
        share["crc32"] = zlib.crc32(run.get(f"{FOLDER}/{name}/{share['file']}"))
    body["version"] = 1
    run.put(f"{FOLDER}/{name}/{manifest.FILE}", manifest.dump({"body": body, "crc32": zlib.crc32(manifest.dump(body))}))


def test_a_checkpoint_of_format_1_is_read_and_verified(run):
    ranks = Ranks(run)
    ranks.save(7)
    name = ranks.tiers[0].name
    as_version_one(run, name)
    loaded = durable.load(run, name)
    assert loaded.step == 7
    np.testing.assert_array_equal(loaded.tensors["w1"], np.full(10, 7, np.float32))
    assert [finding.state for finding in verify.verify(run)] == [verify.Worth.WHOLE]

    path = f"{FOLDER}/{name}/share-00001.safetensors"
    data = bytearray(run.get(path))
    data[-1] ^= 1
    run.put(path, bytes(data))
    with pytest.raises(CheckpointError, match="wrong checksum"):
        durable.load(run, name)


def test_a_checkpoint_of_a_newer_raytf_is_left_alone(run):
    body = {"version": manifest.VERSION + 1}
    newer = naming.name_of(0, "20250101T000000.000-cccccc")
    data = manifest.dump({"body": body, "crc32": zlib.crc32(manifest.dump(body))})
    run.put(f"{FOLDER}/{newer}/{manifest.FILE}", data)
    ranks = Ranks(run, keep=2)
    ranks.save(1)
    assert steps(run) == [1, 0]


def test_orphans_are_collected(run):
    past = "20250101T000000.000-cccccc"
    for name in (naming.name_of(99, past), naming.name_of(0, past), naming.name_of(99, "20270101T000000.000-dddddd")):
        run.put(f"{FOLDER}/{name}/share-00000.safetensors", b"half")
    ranks = Ranks(run, earlier=[past])
    ranks.save(5)
    assert folders(run) == [ranks.tiers[0].name, naming.name_of(99, "20270101T000000.000-dddddd")]


def test_half_uploads_are_aborted(s3, s3_endpoint):
    import boto3

    uri, past = s3("run"), "20250101T000000.000-cccccc"
    bucket = uri.split("/")[2]
    client = boto3.client("s3", endpoint_url=f"http://{s3_endpoint}", region_name="us-east-1")
    for attempt in (past, ATTEMPT):
        key = f"run/{FOLDER}/{naming.name_of(3, attempt)}/share-00000.safetensors"
        client.create_multipart_upload(Bucket=bucket, Key=key)
    # Of an attempt that died before its first file was there, and of somebody else.
    client.create_multipart_upload(Bucket=bucket, Key="run/attempts/20250102T000000.000-dddddd.json")
    client.create_multipart_upload(Bucket=bucket, Key="run/export/1/saved_model.pb")
    ranks = Ranks(Storage(uri), world_size=1, earlier=[past])
    assert ranks.save(5) is Event.DONE
    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]
    assert sorted(left) == [
        f"run/{FOLDER}/{naming.name_of(3, ATTEMPT)}/share-00000.safetensors",
        "run/export/1/saved_model.pb",
    ]
    assert ranks.said == []


def test_a_run_that_was_taken_over_is_not_written(run):
    ranks = Ranks(run, keep=1)
    ranks.save(1)

    def fence():
        raise RunInUseError("the run belongs to process 7 on far now.")

    fenced = Ranks(run, keep=1, fence=fence, attempt="20260102T000000.000-bbbbbb")
    assert fenced.save(2) is Event.FAILED
    assert fenced.said == ["rank 0: the run belongs to process 7 on far now."]
    assert steps(run) == [1]


class Emptied(Storage):
    """Storage in which later workers delete what this one saves, just before it writes the manifest."""

    def put(self, name, data):
        if name.endswith(manifest.FILE):
            manifest.delete(self, name.split("/")[1])
        super().put(name, data)


def test_a_manifest_in_a_folder_that_was_emptied_makes_no_checkpoint(tmp_path):
    """Rank 0 was frozen between its last look at who may write and the manifest; its workers were replaced."""
    ranks = Ranks(Emptied(str(tmp_path)))
    assert ranks.save(7) is Event.FAILED
    assert "the save of step 7 was deleted while it was written" in ranks.said[0]
    assert manifest.list_complete(Storage(str(tmp_path))) == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_save_that_was_given_up_too_late_is_deleted_by_the_owner_alone(tmp_path, is_taken):
    """Rank 0 was frozen after it had written the manifest; another driver may have begun from the checkpoint."""

    class Thawing(Storage):
        def exists(self, name):
            ranks.tiers[0].drop()
            owners.append("another" if is_taken else "this")
            return super().exists(name)

    def fence():
        if owners[-1] == "another":
            raise RunInUseError("the run belongs to process 7 on far now.")

    owners = ["this"]
    ranks = Ranks(Thawing(str(tmp_path)), world_size=1, fence=fence)
    assert ranks.save(7) is Event.FAILED
    assert steps(Storage(str(tmp_path))) == ([7] if is_taken else [])


def test_a_store_that_is_slow_to_delete_costs_no_checkpoint(tmp_path):
    run = SlowToDelete(str(tmp_path / "run"))
    ranks = Ranks(run, keep=1)
    assert ranks.save(1) is Event.DONE
    ranks.begin(2)
    assert ranks.finish(settle=False) is Event.DONE  # the first one is still being deleted
    assert run.is_waiting.wait(60)
    ranks.clock.now += 10 * durable.DEADLINE_SECONDS
    ranks.begin(3, before=fail("storage is away"))
    assert ranks.finish(settle=False) is Event.FAILED
    assert manifest.list_complete(run)[0] == naming.name_of(2, ATTEMPT, 2)
    run.go.set()
    ranks.tiers[0].settle(60)
    until(lambda: folders(run) == [naming.name_of(2, ATTEMPT, 2)])


@pytest.mark.parametrize("kind", [SlowToDelete, SlowToList])
def test_what_is_written_while_others_are_deleted_stays(tmp_path, kind):
    run = kind(str(tmp_path / "run"))
    ranks = Ranks(run, keep=1)
    ranks.begin(1)
    assert ranks.finish(settle=False) is Event.DONE
    ranks.begin(2)
    assert ranks.finish(settle=False) is Event.DONE
    assert run.is_waiting.wait(60)
    ranks.begin(3)
    until(lambda: all(commit.votes().written for commit in ranks.commits))
    run.go.set()
    ranks.tiers[0].settle(60)
    assert ranks.finish() is Event.DONE
    assert durable.load(run, naming.name_of(3, ATTEMPT, 3)).step == 3
    assert folders(run) == [naming.name_of(3, ATTEMPT, 3)]
