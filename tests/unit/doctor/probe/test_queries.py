"""The parts that all online checks share: questions with a limit of time, JSON over HTTP, places, and the bucket."""

import threading
import time

import pytest

from raytf.doctor.clouds.rest import RestClient, RestError
from raytf.doctor.document import Platform, parse, place_of
from raytf.doctor.finding import Severity, warning
from raytf.doctor.probe.queries import Query, bucket_parts, check_bucket, no_answer, run
from tests.support.recorded import Recorded


def explain(look, problem):
    return no_answer(look.what, problem)


def test_all_are_asked_at_once_and_found_in_order():
    meeting = threading.Barrier(3, timeout=30)

    def ask(name):
        meeting.wait()  # none of them passes before all have been asked
        yield warning(name, (), "w", "y", "m")

    looks = [Query(name, lambda name=name: ask(name)) for name in ("a", "b", "c")]
    assert [f.code for f in run(looks, explain, 30)] == ["a", "b", "c"]


def test_one_that_never_answers_is_said_and_the_others_count():
    never = threading.Event()

    def hang():
        never.wait(60)
        return []

    started = time.monotonic()
    found = run([Query("slow", hang), Query("quick", lambda: [warning("x", (), "w", "y", "m")])], explain, 0.5)
    assert time.monotonic() - started < 20
    never.set()
    assert [(f.code, "slow: not checked, no answer within 0.5 s" in f.what) for f in found] == [
        ("no-answer", True),
        ("x", False),
    ]


def test_what_was_found_before_an_exception_is_kept():
    def ask():
        yield warning("x", (), "w", "y", "m")
        raise OSError("gone")

    found = run([Query("it", ask)], explain)
    assert [f.code for f in found] == ["x", "no-answer"]
    assert "gone" in found[1].what


@pytest.mark.parametrize(
    ("provider", "config", "place"),
    [
        ("aws", "{}", Platform.AWS),
        ("gcp", "{}", Platform.GCP),
        ("azure", "{}", Platform.AZURE),
        ("local", "{}", Platform.HOSTS),
        ("external", "{InstanceType: g6.xlarge}", Platform.AWS),
        ("external", "{machineType: g2-standard-4}", Platform.GCP),
        ("external", "{acceleratorType: v5litepod-4, runtimeVersion: x}", Platform.GCP),
        ("external", "{azure_arm_parameters: {}}", Platform.AZURE),
        ("external", "{}", Platform.OTHER),
        ("vsphere", "{}", Platform.OTHER),
    ],
)
def test_the_place_of_a_file(provider, config, place):
    (document,), _ = parse(f"provider: {{type: {provider}}}\navailable_node_types: {{a: {{node_config: {config}}}}}\n")
    assert place_of(document) is place


@pytest.fixture
def server():
    made = Recorded({"/v1/x": {"a": 1}, "/v1/gone": (302, {}), "/v1/text": (200, "words")}, missing={"error": "x"})
    yield made
    made.close()


def test_rest(server):
    api = RestClient(f"{server.url}/v1", "t", (("x-goog-user-project", "p"),))
    assert api.get("/x", q="a b") == {"a": 1}
    assert api.post("/x", {"b": 2}) == {"a": 1}
    assert [(method, path, body) for method, path, _, body in server.asked] == [
        ("GET", "/v1/x?q=a+b", None),
        ("POST", "/v1/x", {"b": 2}),
    ]
    with pytest.raises(RestError) as missing:
        api.get("/y")
    assert (missing.value.status, missing.value.is_missing) == (404, True)
    with pytest.raises(RestError) as moved:  # a token follows no redirect
        api.get("/gone")
    assert moved.value.status == 302
    with pytest.raises(RestError) as away:
        RestClient("http://127.0.0.1:1", "t").get("/x")
    assert away.value.status == 0


def test_a_password_of_the_user_does_not_go_in_place_of_the_token(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server.routes["/v1/mine"] = {}
    assert RestClient(f"{server.url}/v1", "t").get("/mine") == {}
    assert server.asked[-1][2] == "Bearer t"


def test_pages(server):
    pages = {"": {"items": [1, 2], "nextPageToken": "n"}, "n": {"items": [3]}}
    server.routes["/v1/list"] = lambda query, _: pages[query.get("pageToken", [""])[0]]
    assert RestClient(f"{server.url}/v1", "t").pages("/list", "items") == [1, 2, 3]


def test_a_list_without_end_is_not_cut_in_silence(server):
    server.routes["/v1/list"] = {"items": [1], "nextPageToken": "n"}
    with pytest.raises(RestError, match="more than 20 pages"):
        RestClient(f"{server.url}/v1", "t").pages("/list", "items")


def test_a_bucket_that_denies(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server.denied = {"/raytf-denied"}
    place = server.url.removeprefix("http://")
    uri = f"s3://raytf-denied/runs?endpoint_override={place}&scheme=http&region=us-east-1"
    (found,) = check_bucket(uri)
    assert (found.code, found.severity) == ("bucket-denied", Severity.WARNING)


def test_a_bucket_is_as_it_was(s3):
    import boto3

    uri = s3("runs")
    assert list(check_bucket(uri)) == []
    name = bucket_parts(uri)[1]
    endpoint = uri.partition("endpoint_override=")[2].partition("&")[0]
    client = boto3.client("s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1")
    assert client.list_objects_v2(Bucket=name)["KeyCount"] == 0


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://b/p/q?region=x", ("s3", "b", "p/q")),
        ("gcs://b", ("gs", "b", "")),
        ("/mnt/runs", None),
        ("~/raytf-runs", None),
    ],
)
def test_parts_of_a_storage(uri, parts):
    assert bucket_parts(uri) == parts
