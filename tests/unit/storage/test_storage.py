"""Storage: the same behavior on a folder and on S3, and errors that say what is wrong."""

import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raytf.errors import ConfigError, StorageError
from raytf.storage import local_files
from raytf.storage.refusals import classify
from raytf.storage.storage import PREFLIGHT_SECONDS, Storage, within
from raytf.testing import StorageProxy
from raytf.testing import storage_proxy as storage_module
from tests.support.data_files import put_tree


@pytest.fixture(params=["folder", "s3", "gcs", "azure"])
def storage(request, tmp_path):
    if request.param == "folder":
        return Storage(str(tmp_path / "runs"))
    if request.param in ("gcs", "azure"):
        return Storage(request.getfixturevalue(request.param))
    return Storage(request.getfixturevalue("s3")("runs"))


def s3_at(port, path="bucket/runs"):
    return f"s3://{path}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


# What works everywhere.


def test_put_get(storage):
    storage.put("a/b/file", b"one")
    storage.put("a/b/file", memoryview(b"two"))
    assert storage.get("a/b/file") == b"two"


def test_an_empty_file_is_a_file(storage):
    storage.put("empty", b"")
    assert storage.exists("empty")
    assert storage.get("empty") == b""


def test_a_large_file(storage):
    data = os.urandom(1 << 20) * 12  # more than one part of an S3 upload
    storage.put("large", data)
    assert storage.get("large") == data


def test_exists_is_about_files(storage):
    storage.put("a/file", b"x")
    assert storage.exists("a/file")
    assert not storage.exists("a")
    assert not storage.exists("b")


def test_get_or_none(storage):
    storage.put("file", b"x")
    assert storage.get_or_none("file") == b"x"
    assert storage.get_or_none("other") is None


class Vanishing(Storage):
    """Storage in which another process deletes a file as soon as it was looked up."""

    def exists(self, name):
        there = super().exists(name)
        self.delete(name)
        return there


def test_get_or_none_does_not_look_first(s3):
    storage = Vanishing(s3("runs"))
    storage.put("file", b"x")
    assert storage.get_or_none("file") == b"x"
    assert storage.exists("file")
    assert storage.get_or_none("file") is None


def test_get_of_what_is_not_there(storage):
    with pytest.raises(StorageError, match=r"cannot read .*nope") as missing:
        storage.get("nope")
    assert missing.value.kind == "missing"
    assert "bucket or" not in str(missing.value)  # the bucket is there; only the file is not


def test_create_leaves_what_is_there(storage):
    assert storage.create("lease", b"first")
    assert not storage.create("lease", b"second")
    assert storage.get("lease") == b"first"


def test_swap_writes_over_the_version_that_was_read_alone(storage):
    assert storage.get_version("a/file") is None
    assert not storage.swap("a/file", b"x", "any")
    storage.put("a/file", b"one")
    data, version = storage.get_version("a/file")
    assert data == b"one"
    assert storage.swap("a/file", b"two", version)
    assert not storage.swap("a/file", b"three", version)
    data, newer = storage.get_version("a/file")
    assert (data, newer != version) == (b"two", True)
    assert storage.swap("a/file", b"three", newer)
    assert storage.list("a") == ["file"]


def test_nothing_of_swaps_stays_behind_a_deleted_file(tmp_path):
    storage = Storage(str(tmp_path))
    storage.put("lease", b"one")
    assert storage.swap("lease", b"two", storage.get_version("lease")[1])
    storage.delete("lease")
    assert os.listdir(tmp_path) == []


def test_swaps_stay_alone_while_locks_are_deleted(tmp_path):
    storage, over, counted = Storage(str(tmp_path)), threading.Event(), 30
    storage.put("number", b"0")

    def count() -> None:
        done = 0
        while done < counted:
            data, version = storage.get_version("number")
            done += storage.swap("number", str(int(data) + 1).encode(), version)

    def delete() -> None:
        while not over.is_set():
            local_files.drop_lock(str(tmp_path / "number"))

    threading.Thread(target=delete, daemon=True).start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: count(), range(4)))
    over.set()
    assert storage.get("number") == str(4 * counted).encode()


def test_which_stores_have_conditions(tmp_path, s3, gcs):
    places = [Storage(uri) for uri in (str(tmp_path), s3("runs"), gcs)]
    assert [place.is_conditional() for place in places] == [True, True, False]
    assert [place.list() for place in places] == [[], [], []]


def test_list(storage):
    for name in ("b/2", "b/c/3", "a"):
        storage.put(name, b"x")
    assert storage.list() == ["a", "b/"]
    assert storage.list("b") == ["2", "c/"]
    assert [f.name for f in storage.files("b")] == ["2", "c/3"]
    assert storage.list("nope") == []


def test_files(storage):
    for name, data in (("b/2", b"22"), ("b/c/3", b"333"), ("a", b"1"), ("bb/4", b"")):
        storage.put(name, data)
    assert [(f.name, f.bytes) for f in storage.files()] == [("a", 1), ("b/2", 2), ("b/c/3", 3), ("bb/4", 0)]
    assert [f.name for f in storage.files("b")] == ["2", "c/3"]
    assert storage.files("nope") == []
    assert all(f.modified > 1.7e9 for f in storage.files())


def test_delete_a_file_and_a_folder(storage):
    for name in ("a", "b/2", "b/c/3", "bb/4"):
        storage.put(name, b"x")
    storage.delete("a")
    storage.delete("b")
    storage.delete("nope")
    assert [f.name for f in storage.files()] == ["bb/4"]


def test_child(storage):
    child = storage.child("run-1")
    child.put("file", b"x")
    assert storage.get("run-1/file") == b"x"
    assert child.locate("file") == storage.locate("run-1/file")


def test_trees(storage, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "one").write_bytes(b"1")
    (source / "sub" / "two").write_bytes(b"2")
    put_tree(storage, str(source), "tree")
    storage.get_tree("tree", str(target))
    assert (target / "one").read_bytes() == b"1"
    assert (target / "sub" / "two").read_bytes() == b"2"


def test_preflight_leaves_nothing_behind(storage):
    storage.preflight()
    assert [f.name for f in storage.files()] == []


def test_arrow(storage):
    storage.put("a/file", b"x")
    filesystem, path = storage.arrow("a/file")
    assert filesystem.open_input_stream(path).read() == b"x"


# Folders.


def test_home_and_relative_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Storage("~/runs").root == f"{tmp_path}/runs"
    assert Storage("runs").root == f"{tmp_path}/runs"


def test_one_of_many_creators_wins(tmp_path):
    storage, go = Storage(str(tmp_path)), threading.Barrier(8)
    won = []

    def create(i):
        go.wait()
        if storage.create("lease", str(i).encode()):
            won.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.get("lease") == str(won[0]).encode()
    assert os.listdir(tmp_path) == ["lease"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    storage, done = Storage(str(tmp_path)), threading.Event()
    small, large = b"a" * 10, b"b" * 3_000_000
    storage.put("file", small)
    seen = set()

    def read():
        while not done.is_set():
            seen.add(storage.get("file"))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        storage.put("file", large)
        storage.put("file", small)
    done.set()
    reader.join()
    assert seen <= {small, large}


def test_files_under_way_are_not_listed(tmp_path):
    (tmp_path / "file.tmp-0123abcd").write_bytes(b"half")
    assert Storage(str(tmp_path)).list() == []


@pytest.mark.parametrize("act", ["put", "create", "preflight", "get"])
def test_a_folder_that_cannot_be(tmp_path, act):
    (tmp_path / "file").write_text("in the way")
    storage = Storage(str(tmp_path / "file" / "runs"))
    calls = {
        "put": lambda: storage.put("a", b"x"),
        "create": lambda: storage.create("a", b"x"),
        "preflight": storage.preflight,
        "get": lambda: storage.get("a"),
    }
    with pytest.raises(StorageError) as refused:
        calls[act]()
    assert str(tmp_path / "file" / "runs") in str(refused.value)
    assert "Not a directory" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError) as refused:
        Storage(str(tmp_path / "runs")).preflight()
    assert refused.value.kind == "denied"


def test_a_failed_put_leaves_nothing(tmp_path):
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "child").write_text("x")
    with pytest.raises(StorageError):
        Storage(str(tmp_path)).put("name", b"x")
    assert os.listdir(tmp_path) == ["name"]


# URIs.


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("ftp://host/runs", ["ftp://", "s3://BUCKET/PREFIX", "gs://"]),
        ("S4://bucket/runs", ["S4://"]),
        ("://bucket", ["scheme is empty"]),
        ("s3://", ["names no bucket", "s3://BUCKET/PREFIX"]),
        ("s3:///runs", ["names no bucket"]),
        ("gs://?anonymous=true", ["names no bucket"]),
        ("s3://bucket/runs?colour=red", ["unknown option 'colour'", "endpoint_override", "region"]),
        ("gs://bucket/runs?region=eu", ["unknown option 'region'", "project_id"]),
        ("s3://bucket/runs?scheme=ftp&region=us-east-1", ["scheme", "http or https"]),
        ("s3://key:secret@bucket/runs", ["credentials", "environment"]),
        ("s3://key@bucket/runs", ["credentials", "environment"]),
        ("s3:/bucket/runs", ["s3:/...", "s3://BUCKET/PREFIX"]),
    ],
)
def test_uris_that_cannot_be_understood(uri, words):
    with pytest.raises(ConfigError) as refused:
        Storage(uri)
    assert [w for w in words if w not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    ["s3://key:hunter2@bucket/runs", "s3://bucket/runs?access_key=k&secret_key=hunter2", "s3://?secret_key=hunter2"],
)
def test_a_secret_in_a_uri_is_not_shown(uri):
    with pytest.raises(ConfigError) as refused:
        Storage(uri)
    assert "hunter2" not in str(refused.value)


def test_options_are_no_part_of_what_people_see():
    assert Storage(s3_at(1)).locate("a") == "s3://bucket/runs/a"
    assert Storage(s3_at(1)).child("a").uri == s3_at(1, "bucket/runs/a")


def test_an_endpoint_from_the_environment(s3, s3_endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3_endpoint}")
    storage = Storage(s3("runs").partition("?")[0])
    storage.put("a", b"x")
    assert Storage(s3("runs")).get("a") == b"x"


# What can be wrong with an object store.


def test_a_missing_bucket(s3):
    with pytest.raises(StorageError, match=r"none-such.*Create the bucket or correct its name") as refused:
        Storage(s3("runs", bucket="none-such")).preflight()
    assert refused.value.kind == "missing"
    assert "\n" not in str(refused.value)


def test_a_put_into_a_missing_bucket(s3):
    with pytest.raises(StorageError) as refused:
        Storage(s3("runs", bucket="none-such")).put("a", b"x")
    assert refused.value.kind == "missing"


def test_an_endpoint_that_refuses(s3_endpoint):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(StorageError, match="Check the endpoint") as refused:
        Storage(s3_at(port)).preflight()
    assert refused.value.kind == "unreachable"
    assert time.monotonic() - started < 20


def test_an_endpoint_that_never_answers(s3_endpoint):
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        with pytest.raises(
            StorageError, match=r"s3://bucket/runs did not answer within 2 s. Check the endpoint"
        ) as refused:
            Storage(s3_at(server.getsockname()[1])).preflight(seconds=2)
        assert time.monotonic() - started < 10
    assert refused.value.kind == "unreachable"
    for thread in set(threading.enumerate()) - before:
        thread.join(20)  # ends now that the endpoint is gone


def test_a_preflight_is_bounded():
    assert PREFLIGHT_SECONDS < 20


def test_within_hands_on_what_was_raised():
    def fail():
        raise StorageError("no", "denied")

    with pytest.raises(StorageError, match=r"^no$"):
        within(10, fail, "here")


def test_within_gives_up():
    release = threading.Event()
    try:
        with pytest.raises(StorageError, match="here did not answer"):
            within(0.05, lambda: release.wait() and None, "here")
    finally:
        release.set()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOENT, "x"), "missing"),
        (PermissionError(errno.EACCES, "x"), "denied"),
        (OSError(errno.EROFS, "x"), "denied"),
        (OSError(errno.ENOSPC, "x"), "full"),
        (OSError(errno.EDQUOT, "x"), "full"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "unreachable"),
        (OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation"), "missing"),
        (OSError("AWS Error ACCESS_DENIED during PutObject operation"), "denied"),
        (OSError("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation"), "denied"),
        (OSError("AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation"), "denied"),
        (
            OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 28, Timeout was reached"),
            "unreachable",
        ),
        (OSError("cannot allocate"), "other"),
    ],
)
def test_classify(error, kind):
    assert classify(error) == kind


def write_keys(home, access_key):
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = secret\n"
    )


@pytest.fixture
def keys_in_a_file(s3, tmp_path, monkeypatch):
    """A home with credentials in a file, and none in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_keys(tmp_path, "OLD")
    return tmp_path


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken"])
def test_credentials_that_expire_are_read_anew(s3, s3_endpoint, keys_in_a_file, code):
    now = [0.0]
    with StorageProxy(s3_endpoint) as proxy:
        storage = Storage(s3("runs").replace(s3_endpoint, proxy.endpoint), lambda: now[0])
        proxy.accept_only("OLD", code)
        storage.put("file", b"old")
        assert storage.create("lease", b"mine")
        proxy.accept_only("NEW", code)
        began = time.monotonic()
        for act in (storage.get, storage.exists, storage.list, storage.get_version, storage.delete):
            with pytest.raises(StorageError, match="Check the credentials") as refused:
                act("file")
            assert refused.value.kind == "denied"
            assert "\n" not in str(refused.value)
        assert time.monotonic() - began < 20, "what is refused is tried on and on"
        write_keys(keys_in_a_file, "NEW")
        now[0] += 4
        with pytest.raises(StorageError):  # read again a moment ago
            storage.put("file", b"new")
        now[0] += 2
        assert storage.exists("file")
        storage.put("file", b"new")
        assert storage.get("file") == b"new"
        data, version = storage.get_version("lease")
        assert storage.swap("lease", data, version)


def test_credentials_in_the_environment_are_read_at_every_request(s3, s3_endpoint, monkeypatch):
    with StorageProxy(s3_endpoint) as proxy:
        storage = Storage(s3("runs").replace(s3_endpoint, proxy.endpoint))
        storage.put("file", b"old")
        proxy.accept_only("NEW")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")
        storage.put("file", b"new")
        assert storage.get("file") == b"new"


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda s: s.create("file", b"x"), "missing"),
        (lambda s: s.swap("file", b"x", '"0"'), "missing"),
    ],
)
def test_conditional_writes_to_a_missing_bucket(s3, act, kind):
    with pytest.raises(StorageError, match="Create the bucket") as missing:
        act(Storage(s3("runs", bucket="no-such-bucket")))
    assert missing.value.kind == kind


def test_conditional_writes_without_a_store_or_credentials(s3, keys_in_a_file):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(StorageError, match="Check the endpoint") as unreachable:
            Storage(s3_at(closed.getsockname()[1])).create("file", b"x")
    assert unreachable.value.kind == "unreachable"
    (keys_in_a_file / ".aws" / "credentials").unlink()
    with pytest.raises(StorageError, match="No credentials: Unable to locate") as denied:
        Storage(s3("runs")).create("file", b"x")
    assert denied.value.kind == "denied"


def test_a_conditional_write_goes_past_single_failures(s3, s3_endpoint):
    with StorageProxy(s3_endpoint, hold_seconds=0) as proxy:
        storage = Storage(s3("runs").replace(s3_endpoint, proxy.endpoint))
        proxy.fail_writes(1)
        assert storage.create("file", b"x")
        assert not storage.create("file", b"y")
        assert storage.get("file") == b"x"


# Stores that lack something.


def test_uploads_come_without_checksums_where_a_store_refuses_them(proxy, behind):
    proxy.lack(chunks=False)
    other = Storage(behind.uri)
    data = os.urandom(12_000_000)
    behind.put("file", data)
    assert behind.get("file") == data
    assert os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] == "when_required"  # for what this process starts
    other.put("another", b"x")  # made before that was known
    before = proxy.writes
    Storage(behind.uri).put("third", b"x")
    assert proxy.writes == before + 1


def test_threads_find_out_about_checksums_at_the_same_time(proxy, behind):
    proxy.lack(chunks=False)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: behind.put(f"{i}", b"x"), range(8)))
    assert behind.list() == [str(i) for i in range(8)]


def test_an_upload_that_is_refused_anyhow_changes_no_setting(proxy, behind):
    proxy._unknown = lambda request: "Nothing is supported." if request.command in ("PUT", "POST") else ""
    with pytest.raises(StorageError, match="does not know this request") as refused:
        behind.put("file", b"x")
    assert refused.value.kind == "unsupported"
    assert "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ


@pytest.mark.parametrize("batches", [True, False])
def test_a_folder_is_deleted_in_batches_where_a_store_can_do_that(s3, s3_endpoint, proxy, behind, batches):
    straight = Storage(s3("runs"))
    names = [f"many/{i:03d} & <{i}>" for i in range(120)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: straight.put(name, b""), [*names, "manyfold", "many.more"]))
    asked = []
    proxy.lack(batches=batches)
    unknown = proxy._unknown
    proxy._unknown = lambda request: asked.append(request.command) or unknown(request)
    behind.delete("many")
    assert [f.name for f in straight.files()] == ["many.more", "manyfold"]
    assert asked.count("POST") <= 3
    assert asked.count("DELETE") == 1 if batches else asked.count("DELETE") >= 120


def test_what_cannot_be_deleted_is_named(s3, behind, proxy):
    for name in ("a/1", "a/2", "a/kept"):
        behind.put(name, b"x")
    proxy.lack(batches=False)
    forward = proxy._handle

    def handle(request):
        if request.command == "DELETE" and request.path.endswith("kept"):
            storage_module._refuse(request, 403, "AccessDenied", "retained")
        else:
            forward(request)

    proxy._handle = handle
    with pytest.raises(StorageError, match=r"a/kept.*AccessDenied") as refused:
        behind.delete("a")
    assert refused.value.kind == "denied"
    assert behind.list("a") == ["kept"]


# Names that lead elsewhere.

HOSTILE = ["../x", "/etc/x", "a//b", "a/./b", "a/../../x", "n\\b", "C:x", "\x01c"]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_object_whose_name_leads_elsewhere_is_refused(s3, tmp_path, name):
    import boto3

    storage = Storage(s3("runs"))
    storage.put("tree/ok", b"x")
    endpoint = storage.uri.partition("endpoint_override=")[2].partition("&")[0]
    client = boto3.client("s3", endpoint_url=f"http://{endpoint}")
    client.put_object(Bucket=storage.root.partition("/")[0], Key=f"runs/tree/{name}", Body=b"hostile")
    target = tmp_path / "base" / "target"
    target.mkdir(parents=True)
    with pytest.raises(StorageError, match="not a plain relative name") as refused:
        storage.get_tree("tree", str(target))
    assert refused.value.kind == "refused"
    assert ascii(name) in str(refused.value)
    assert "runs/tree" in str(refused.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    storage.delete("tree")
    assert storage.files("tree") == []


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "a//b", "./a", "a\0"])
def test_no_storage_takes_a_name_that_leads_elsewhere(storage, name):
    calls = [
        storage.get,
        storage.exists,
        storage.delete,
        storage.child,
        storage.list,
        storage.files,
        storage.get_version,
    ]
    for call in [*calls, lambda name: storage.put(name, b"x"), lambda name: storage.create(name, b"x")]:
        with pytest.raises(StorageError, match="not a plain relative name"):
            call(name)
