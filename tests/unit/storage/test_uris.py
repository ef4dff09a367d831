"""URIs: what is taken for a folder, what is refused, and that no secret is shown."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.config.train_config import TrainConfig
from raytf.data.image_datasets import open_splits
from raytf.errors import ConfigError, RaytfError
from raytf.inference.batch.writer import PredictionWriter
from raytf.inference.versions import models_of
from raytf.storage.storage import Storage
from raytf.storage.uris import StorageUri, is_folder, parse, shown

SECRETS = [
    "s3:KEY:hunter2@bucket/x",
    "s3:/KEY:hunter2@bucket/x",
    "s3:///KEY:hunter2@bucket/x",
    "S3://KEY:hunter2@bucket/x",
    "s3//KEY:hunter2@bucket/x",
    "s3%3A//KEY:hunter2@bucket/x",
    "s3%3a%2f%2fKEY%3Ahunter2%40bucket/x",
    "s3%253A//hunter2/x",
    " s3://KEY:hunter2@bucket/x",
    "KEY:hunter2@bucket/x",
    "folder/KEY:hunter2@bucket/x",
    "gs:/hunter2",
    "gs:hunter2",
    "https://user:hunter2@host/bucket",
    "https:/hunter2",
    "s3://KEY:hunter2@bucket/x",
    "s3://hunter2@bucket/x",
    "s3://KEY%3Ahunter2%40bucket/x",
    "s3://bucket/KEY:hunter2@x",
    "s3://bucket/KEY%3Ahunter2%40x",
    "s3://bucket/x&secret_key=hunter2",
    "s3://bucket/x/password=hunter2/y",
    "s3://bucket/x#hunter2",
    "s3://bucket/x?region=eu#hunter2",
    "s3://bucket/x?scheme=hunter2",
    "s3://bucket/x?region=hunter2/+a=",
    "s3://bucket/x?hunter2",
    "s3://bucket/x?hunter2=",
    "s3://bucket/x?Hunter2=1",
    "s3://bucket/x?aws_secret_access_key=hunter2",
    "s3://bucket/x?endpoint_override=KEY:hunter2@127.0.0.1:9000",
    "s3://bucket/x?endpoint_override=http%3A%2F%2FKEY%3Ahunter2%40127.0.0.1",
    "gs://bucket/x?project_id=a/hunter2",
    "gs://bucket/x?anonymous=hunter2!",
    "s3://hunter2 bucket/x",
    "runs\nhunter2",
]


@pytest.mark.parametrize("uri", SECRETS)
@pytest.mark.parametrize(
    "take",
    [
        parse,
        is_folder,
        Storage,
        models_of,
        open_splits,
        lambda uri: TrainConfig.of(storage=uri).check(),
        lambda uri: TrainConfig.of(storage=uri).storage_uri,
        lambda uri: PredictionWriter(f"{uri}.csv"),
    ],
    ids=["parse", "is_folder", "Storage", "models_of", "open_splits", "check", "storage_uri", "Sink"],
)
def test_what_may_be_a_secret_is_refused_and_not_shown(uri, take, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RaytfError) as refused:
        take(uri)
    assert "hunter2" not in str(refused.value).lower()
    assert "\n" not in str(refused.value)
    assert "hunter2" not in shown(uri).lower()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "uri",
    [
        "s3:/bucket",
        "s3:bucket",
        "S3://bucket",
        "GS://b",
        "s3%3A//bucket",
        "https://host/b",
        "file:///runs",
        "a:b",
        "C:\\runs",
    ],
)
def test_what_looks_like_a_uri_is_no_folder(uri):
    with pytest.raises(
        ConfigError, match="Expected a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    ):
        parse(uri)


@pytest.mark.parametrize(
    "folder",
    [
        "runs",
        "./a:b",
        "../s3:x",
        "/data/s3:/x",
        "~/a:b",
        "runs/2026",
        "a/b:c",
        "auto",
        "",
        ".",
        "100%",
        "my runs",
        "a//b",
    ],
)
def test_folders(folder):
    assert parse(folder) == StorageUri("", folder, {})
    assert shown(folder) == folder


def test_a_folder_with_a_colon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = Storage("./a:b")
    storage.put("x", b"1")
    assert (tmp_path / "a:b" / "x").read_bytes() == b"1"
    assert storage.child("run").root == f"{tmp_path}/a:b/run"
    with pytest.raises(ConfigError, match=r"as \./NAME"):
        Storage("a:b")


def test_stores():
    found = parse("s3://bucket/runs/a:b?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1")
    options = {"endpoint_override": "127.0.0.1:9000", "scheme": "http", "region": "us-east-1"}
    assert found == StorageUri("s3", "bucket/runs/a:b", options)
    assert parse("gcs://bucket?anonymous=true") == StorageUri("gs", "bucket", {"anonymous": "true"})
    assert parse("s3://b/x?endpoint_override=http://[::1]:9000/").options["endpoint_override"] == "http://[::1]:9000/"
    assert parse("s3://b/user@example.org/x").location == "b/user@example.org/x"
    assert shown("s3://bucket/runs?region=eu") == "s3://bucket/runs"


BEGINNINGS = ["", "s3:", "s3://", "s3%3A", "gs:/", "https://", "s3://b/x?", "s3://b/x#", "s3://b/"]


@given(st.text(max_size=40), st.sampled_from(BEGINNINGS))
def test_any_text_is_understood_or_refused(text, begin):
    assert "\n" not in shown(begin + text)
