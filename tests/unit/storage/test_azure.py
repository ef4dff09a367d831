"""Azure Blob Storage: what the tests of all stores do not ask, against Azurite."""

import os
import pickle
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import pyarrow.fs as pafs
import pytest

from raytf.errors import ConfigError, StorageError
from raytf.storage.azure import Azure
from raytf.storage.storage import Storage
from tests.support.recorded import Recorded


def test_of_several_writers_one_wins(azure):
    storage = Storage(azure)
    assert storage.is_conditional()
    assert storage.list() == []
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda i: Storage(azure).create("lease", b"%d" % i), range(8))) == 1
        _, version = storage.get_version("lease")
        assert sum(pool.map(lambda i: Storage(azure).swap("lease", b"%d" % i, version), range(8))) == 1


def test_a_reader_never_sees_half_a_file(azure):
    storage = Storage(azure)
    storage.put("file", b"0" * 300_000)
    is_over = threading.Event()

    def write():
        for number in range(1, 8):
            storage.put("file", b"%d" % number * 300_000)
            time.sleep(0.01)
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_over.is_set():
        data = storage.get("file")
        assert (len(data), len(set(data))) == (300_000, 1)
    writer.join()


@pytest.mark.parametrize("name", ["a b", "a%20b", "ä", "a+b", "a?b", "a#b", "a&b=c", "x" * 200])
def test_names_come_back_as_they_were(azure, name):
    storage = Storage(azure)
    storage.put(f"folder/{name}", b"x")
    assert storage.list("folder") == [name]
    assert [file.name for file in storage.files()] == [f"folder/{name}"]
    assert storage.get(f"folder/{name}") == b"x"
    storage.delete("folder")
    assert storage.list() == []


def test_ranges_and_limits(azure):
    storage = Storage(azure)
    storage.put("file", bytes(range(256)) * 4096)
    assert storage.get_range("file", 255, 3) == bytes([255, 0, 1])
    assert len(storage.get_range("file", 256 * 4096 - 2, 10)) == 2
    with pytest.raises(StorageError) as large:
        storage.get("file", most=1000)
    assert large.value.kind == "damaged"


def test_libraries_read_through_pyarrow(azure):
    storage = Storage(azure)
    storage.put("folder/file", b"abc")
    system, path = storage.arrow("folder/file")
    for one in (system, pickle.loads(pickle.dumps(system))):
        with one.open_input_file(path) as file:
            assert (file.size(), file.read(), file.read_at(2, 1)) == (3, b"abc", b"bc")
    assert system.get_file_info(storage.arrow("folder")[1]).type == pafs.FileType.Directory
    assert system.get_file_info(storage.arrow("nope")[1]).type == pafs.FileType.NotFound
    with pytest.raises(FileNotFoundError):
        system.get_file_info(pafs.FileSelector(storage.arrow("nope")[1]))


def at(endpoint, container="raytf"):
    return Storage(f"az://{container}/runs?endpoint_override={endpoint}&scheme=http")


@pytest.mark.parametrize("act", [lambda s: s.put("a", b"x"), lambda s: s.preflight(), lambda s: s.create("a", b"x")])
def test_a_missing_container(azure_endpoint, act):
    with pytest.raises(StorageError, match=r"no container nobody\b.* Create the bucket") as missing:
        act(at(azure_endpoint, "nobody"))
    assert missing.value.kind == "missing"


@pytest.mark.parametrize(
    "act", [lambda s: s.put("a", b"x"), lambda s: s.get("a"), lambda s: s.list(), lambda s: s.get_version("a")]
)
def test_a_wrong_key(azure_endpoint, monkeypatch, act):
    monkeypatch.setenv("AZURE_STORAGE_KEY", "AAAA")
    with pytest.raises(StorageError, match="Check the credentials") as denied:
        act(at(azure_endpoint))
    assert denied.value.kind == "denied"


def test_a_key_that_is_renewed_serves_a_run_under_way(azure_endpoint, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("AZURE_STORAGE_KEY", "AAAA")
        storage = at(azure_endpoint)
        with pytest.raises(StorageError):
            storage.put("renewed", b"x")
        storage._renewed_at = float("-inf")
    storage.put("renewed", b"x")
    assert storage.get("renewed") == b"x"


def test_a_store_that_is_not_there(azure_endpoint):
    with pytest.raises(StorageError, match="Check the endpoint") as unreachable:
        at("127.0.0.1:1").put("a", b"x")
    assert unreachable.value.kind == "unreachable"


def test_an_account_is_needed(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="Set AZURE_STORAGE_ACCOUNT"):
        Storage("az://raytf/runs")
    assert Azure.of({"account_name": "mine"}).client.__self__.account == "mine"
    with pytest.raises(ConfigError, match="3 to 24 small letters"):
        Storage("az://raytf/runs?account_name=Mine")


def test_on_a_machine_with_one_identity_nothing_has_to_be_configured(monkeypatch):
    """Ray gives each machine on Azure one user-assigned identity, which the metadata service takes by default."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "IDENTITY_", "MSI_"))]:
        monkeypatch.delenv(name)
    token = {"access_token": "token-of-the-node", "expires_in": "3600", "token_type": "Bearer"}
    imds = Recorded({"/metadata/identity/oauth2/token": token})
    try:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", imds.url)
        credential = Azure("account")._credential()
        assert credential.get_token("https://storage.azure.com/.default").token == "token-of-the-node"
    finally:
        imds.close()
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(imds.asked[-1][1]).query)
    assert (query["resource"], "client_id" in query) == (["https://storage.azure.com"], False)
