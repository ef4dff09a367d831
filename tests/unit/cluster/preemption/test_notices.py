"""The clouds' protocols, against a server that refuses what the clouds refuse; and what a watch makes of notices."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from raytf.cluster.preemption import notices, watcher
from raytf.cluster.preemption.notices import AwsNotices, AzureNotices, Endpoint, GcpNotices, MetadataError
from raytf.config.flags import NoticeSection
from raytf.errors import ClusterError, ConfigError
from raytf.testing import MetadataServer, metadata_server, processes

AWS_ACTION = "/latest/meta-data/spot/instance-action"
TOKEN = "/latest/api/token"
CLIENTS = {"aws": AwsNotices, "gcp": GcpNotices, "azure": AzureNotices}


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as running:
        yield running


def client(cloud: str, url: str, timeout: float = 5.0):
    return CLIENTS[cloud](Endpoint(url, timeout))


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """What the service answers to somebody who may not know the protocol."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request(method, parts.path + path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


# -- the server refuses what the clouds refuse -------------------------------------------------------------------------


def test_aws_wants_a_token_of_a_valid_length(server):
    url = server.add("aws", "a").url
    assert ask(url, AWS_ACTION)[0] == 401
    assert ask(url, AWS_ACTION, X_aws_ec2_metadata_token="invented")[0] == 401
    assert ask(url, TOKEN)[0] == 405
    for seconds in ("", "0", "21601", "soon"):
        assert ask(url, TOKEN, "PUT", X_aws_ec2_metadata_token_ttl_seconds=seconds)[0] == 400
    assert ask(url, TOKEN, "PUT", X_aws_ec2_metadata_token_ttl_seconds="60", X_Forwarded_For="1.2.3.4")[0] == 403
    status, token = ask(url, TOKEN, "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    assert status == 200
    assert ask(url, AWS_ACTION, X_aws_ec2_metadata_token=token)[0] == 404
    assert ask(url, AWS_ACTION, "POST", X_aws_ec2_metadata_token=token)[0] == 405


def test_gcp_wants_its_header_and_no_proxy(server):
    url, path = server.add("gcp", "a").url, "/computeMetadata/v1/instance/preempted"
    assert ask(url, path)[0] == 403
    assert ask(url, path, Metadata_Flavor="google")[0] == 403
    assert ask(url, path, Metadata_Flavor="Google", X_Forwarded_For="1.2.3.4")[0] == 403
    assert ask(url, path, Metadata_Flavor="Google") == (200, "FALSE")
    assert ask(url, "/computeMetadata/v1/instance/other", Metadata_Flavor="Google")[0] == 404


def test_azure_wants_its_header_and_a_version_that_exists(server):
    url, path = server.add("azure", "a").url, "/metadata/scheduledevents"
    assert ask(url, f"{path}?api-version=2020-07-01")[0] == 400
    assert ask(url, path, Metadata="true")[0] == 400
    assert ask(url, f"{path}?api-version=1999-01-01", Metadata="true")[0] == 400
    assert ask(url, f"{path}?api-version=2020-07-01", Metadata="true", X_Forwarded_For="1.2.3.4")[0] == 400
    assert ask(url, f"{path}?api-version=2020-07-01", "POST", Metadata="true")[0] == 405
    status, body = ask(url, f"{path}?api-version=2020-07-01", Metadata="true")
    assert (status, json.loads(body)) == (200, {"DocumentIncarnation": 1, "Events": []})
    assert ask(url, "/metadata/instance/compute/name?api-version=2021-02-01", Metadata="true")[0] == 400


# -- the clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cloud", CLIENTS)
def test_nothing_is_announced_before_the_notice_and_it_stays(server, cloud):
    machine = server.add(cloud, "a")
    source = client(cloud, machine.url)
    assert list(source.poll()) == []
    machine.notice(30)
    for _ in range(2):
        (notice,) = source.poll()
        assert (notice.cloud, notice.leaves) == (cloud, True)
        assert 25 <= notice.seconds <= 31


@pytest.mark.parametrize("cloud", ["aws", "azure"])
@pytest.mark.parametrize("skew", [3, 3600, -3600])
def test_the_time_that_is_left_is_by_the_clock_of_the_service(server, cloud, skew, monkeypatch):
    machine = server.add(cloud, "a")
    skewed = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + skew})
    for module in (metadata_server, http.server):
        monkeypatch.setattr(module, "time", skewed)
    machine.notice(30)
    (notice,) = client(cloud, machine.url).poll()
    assert 27 <= notice.seconds <= 31


@pytest.mark.parametrize(("cloud", "seconds"), [("aws", notices.AWS_SECONDS), ("azure", None)])
def test_a_service_that_sends_no_date_is_believed_no_time(server, cloud, seconds, monkeypatch):
    machine = server.add(cloud, "a")
    machine.notice(30)
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "date_time_string", lambda self, timestamp=None: "soon")
    (notice,) = client(cloud, machine.url).poll()
    assert notice.seconds == seconds


def test_only_the_own_cloud_is_detected(server):
    for cloud in CLIENTS:
        url = server.add(cloud, cloud).url
        assert notices.detect(url, 5.0) == cloud
        assert [name for name in CLIENTS if client(name, url).is_here()] == [cloud]


def test_each_action_of_aws_and_its_time(server):
    for action in ("terminate", "stop", "hibernate"):
        machine = server.add("aws", action)
        machine.notice(120, action)
        (notice,) = client("aws", machine.url).poll()
        assert (notice.kind, notice.leaves) == (f"instance-action {action}", True)
        assert 115 <= notice.seconds <= 121


def test_a_rebalance_recommendation_is_a_warning_after_the_interruption(server):
    machine = server.add("aws", "a")
    machine.recommend_rebalance()
    source = client("aws", machine.url)
    (notice,) = source.poll()
    assert (notice.leaves, notice.seconds) == (False, None)
    machine.notice(60)
    assert [notice.leaves for notice in source.poll()] == [True, False]


def test_aws_token_is_used_again_and_renewed_before_it_expires(server):
    machine, now = server.add("aws", "a"), [0.0]
    source = AwsNotices(Endpoint(machine.url, 5.0), clock=lambda: now[0])
    for moment in (0.0, 10.0, 21500.0):
        now[0] = moment
        assert list(source.poll()) == []
    assert [path for _, path, _ in machine.requests].count(TOKEN) == 1
    now[0] = 21599.0
    assert list(source.poll()) == []
    assert [path for _, path, _ in machine.requests].count(TOKEN) == 2
    assert 401 not in {status for _, _, status in machine.requests}


def test_aws_token_that_the_service_has_forgotten_is_renewed_at_once(server):
    machine = server.add("aws", "a")
    source = client("aws", machine.url)
    assert list(source.poll()) == []
    machine.expire_tokens()
    machine.notice(100)
    assert [notice.leaves for notice in source.poll()] == [True]
    assert [status for _, _, status in machine.requests].count(401) == 1


@pytest.mark.parametrize(
    ("event", "leaves"), [("TERMINATE_ON_HOST_MAINTENANCE", True), ("MIGRATE_ON_HOST_MAINTENANCE", False)]
)
def test_maintenance_of_gcp(server, event, leaves):
    machine = server.add("gcp", "a")
    machine.maintain(event)
    (notice,) = client("gcp", machine.url).poll()
    assert (notice.kind, notice.leaves) == (f"maintenance-event {event}", leaves)
    assert (notice.seconds is None) is not leaves
    machine.maintain("NONE")
    assert list(client("gcp", machine.url).poll()) == []


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"])
def test_events_of_azure(server, kind):
    machine = server.add("azure", "vm_0")
    machine.notice(60, kind)
    (notice,) = client("azure", machine.url).poll()
    assert notice.kind.startswith(f"{kind} ")
    assert notice.leaves is (kind != "Freeze")
    if notice.leaves:
        assert 55 <= notice.seconds <= 61


def test_azure_events_of_other_machines_are_theirs(server):
    machine = server.add("azure", "vm_0")
    machine.notice(60, resources=("vm_1", "vm_00"))
    source = client("azure", machine.url)
    assert list(source.poll()) == []
    machine.notice(60, resources=("vm_1", "VM_0"))  # names are the same in upper and lower case
    assert len(list(source.poll())) == 1


def test_an_azure_event_leaves_no_time_once_started_and_is_none_once_over(server):
    machine = server.add("azure", "a")
    machine.notice(60, status="Completed")
    assert list(client("azure", machine.url).poll()) == []
    machine.notice(60, status="Started")
    (notice,) = client("azure", machine.url).poll()
    assert notice.seconds == 0.0


def test_azure_is_never_acknowledged(server):
    machine = server.add("azure", "a")
    machine.notice(60)
    assert len(list(client("azure", machine.url).poll())) == 1
    assert {method for method, _, _ in machine.requests} == {"GET"}


@pytest.mark.parametrize("cloud", CLIENTS)
@pytest.mark.parametrize("garbage", ["", "<html>login</html>", "[]", "null", "\x00\xff"])
def test_garbage_is_an_error_and_no_notice(server, cloud, garbage):
    machine = server.add(cloud, "a")
    machine.notice(60)
    machine.garbage = garbage
    look = client(cloud, machine.url).poll()
    with pytest.raises(MetadataError):
        next(look)


@pytest.mark.parametrize("page", ["", "<html>login</html>", "[]"])
def test_a_page_that_answers_to_everything_is_no_cloud(server, page):
    machine = server.add("aws", "a")
    machine.garbage = page
    assert notices.detect(machine.url, 5.0) is None


def test_a_time_that_cannot_be_read_is_taken_as_the_cloud_s_usual_one(server):
    machine = server.add("aws", "a")
    machine.notice(60)
    source = client("aws", machine.url)
    machine._action["time"] = "in a minute"
    (notice,) = source.poll()
    assert notice.seconds == notices.AWS_SECONDS


@pytest.mark.parametrize("cloud", CLIENTS)
def test_a_service_that_is_down_or_hangs_is_an_error_within_the_time_limit(server, cloud):
    machine = server.add(cloud, "a")
    machine.delay_seconds = 30.0
    began = time.monotonic()
    with pytest.raises(MetadataError):
        list(client(cloud, machine.url, timeout=0.3).poll())
    assert not client(cloud, machine.url, timeout=0.3).is_here()
    assert time.monotonic() - began < 10
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(MetadataError):
            list(client(cloud, url).poll())
        assert notices.detect(url) is None


def test_no_proxy_of_the_environment_sees_the_requests(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    machine = server.add("gcp", "a")
    assert list(client("gcp", machine.url).poll()) == []


# -- the watch ---------------------------------------------------------------------------------------------------------


class Heard:
    """What a watch told whom, and a Ray that may be away."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[dict] = []
        self.drains: list[tuple[str, float | None]] = []
        self.is_ray_away = False

    def drain(self, reason: str, seconds: float | None) -> None:
        if self.is_ray_away:
            raise ClusterError("Ray does not answer")
        self.drains.append((reason, seconds))

    def watch(self, source, follow_warnings: bool = False, clock: Callable[[], float] = time.monotonic):
        event = lambda **fields: self.events.append(fields)  # noqa: E731
        return watcher.NoticeWatch(source, "10.0.0.7", self.lines.append, event, self.drain, follow_warnings, clock)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.mark.parametrize("cloud", CLIENTS)
def test_a_notice_is_told_once_to_the_user_the_ledger_and_ray(server, heard, cloud):
    machine = server.add(cloud, "a")
    watcher = heard.watch(client(cloud, machine.url))
    watcher.poll()
    assert (heard.lines, heard.events, heard.drains) == ([], [], [])
    machine.notice(30)
    for _ in range(3):
        watcher.poll()
    ((reason, seconds),) = heard.drains
    assert reason.startswith(f"{cloud}: ")
    assert 25 <= seconds <= 31
    (line,) = heard.lines
    assert line.startswith("notice for node 10.0.0.7: ")
    (event,) = heard.events
    assert (event["cloud"], event["leaves"]) == (cloud, True)
    assert event["deadline_seconds"] == seconds


def test_a_warning_is_told_and_followed_only_on_demand(server, heard):
    machine = server.add("aws", "a")
    machine.recommend_rebalance()
    heard.watch(client("aws", machine.url)).poll()
    assert heard.drains == []
    assert "rebalance" in heard.lines[0]
    assert heard.events[0]["leaves"] is False
    heard.watch(client("aws", machine.url), follow_warnings=True).poll()
    assert heard.drains == [("aws: rebalance recommendation", None)]


def test_ray_is_told_again_until_it_hears_and_the_user_is_told_once(server, heard):
    machine = server.add("gcp", "a")
    machine.notice()
    watcher = heard.watch(client("gcp", machine.url))
    heard.is_ray_away = True
    for _ in range(3):
        watcher.poll()
    assert heard.drains == []
    assert [line for line in heard.lines if "Ray does not answer" in line] == heard.lines[1:]
    assert len(heard.lines) == 2
    heard.is_ray_away = False
    watcher.poll()
    watcher.poll()
    assert len(heard.drains) == 1


def test_a_failing_service_is_reported_once_and_watched_until_it_is_back(server, heard):
    machine, now = server.add("azure", "a"), [0.0]
    watcher = heard.watch(client("azure", machine.url), clock=lambda: now[0])
    machine.garbage = "nonsense"
    for now[0] in range(0, 170, 10):
        watcher.poll()
    assert heard.lines == []
    for now[0] in range(170, 1000, 10):
        watcher.poll()
    (line,) = heard.lines
    assert "cannot be read" in line
    machine.garbage = None
    machine.notice(60)
    watcher.poll()
    assert len(heard.drains) == 1


def test_an_urgent_notice_is_followed_though_the_next_request_fails(server, heard):
    machine = server.add("gcp", "a")
    machine.notice()
    machine.maintain("SOMETHING_NEW")
    heard.watch(client("gcp", machine.url)).poll()
    assert [reason for reason, _ in heard.drains] == ["gcp: preempted"]


def test_find_tries_a_few_times_and_gives_up_without_a_word(server):
    pauses: list[float] = []
    assert watcher.find("auto", server.add("aws", "a").url, pauses.append).cloud == "aws"
    assert watcher.find("auto", f"{server.url}/nothing", pauses.append) is None
    assert pauses[0] == 0
    assert watcher.find("gcp", f"{server.url}/nothing", pauses.append).cloud == "gcp"


def wait_for(condition: Callable[[], object]) -> None:
    processes.wait_until(condition, "the watch has told", 60)


def test_a_thread_watches_the_service_of_its_node(server, heard):
    machine = server.add("azure", "ab12")
    machine.notice(40)
    section = NoticeSection(notice_url=f"{server.url}/{{node_id}}")
    event = lambda **fields: heard.events.append(fields)  # noqa: E731
    thread = watcher.start(section, "ab12", "n", heard.lines.append, event, heard.drain)
    wait_for(lambda: heard.drains)
    assert thread.daemon
    assert watcher.start(NoticeSection(notices="off"), "ab12", "n", heard.lines.append, event, heard.drain) is None


def test_one_process_of_a_node_watches_and_the_next_one_when_it_has_ended(server, heard):
    machine = server.add("gcp", "ab12")
    section, other = NoticeSection(notice_url=machine.url), Heard()
    code = f"""
import time
from raytf.cluster.preemption import watcher
from raytf.config.flags import NoticeSection
nothing = lambda *_, **__: print("told", flush=True)
watcher.start(NoticeSection(notice_url={machine.url!r}), "ab12", "n", nothing, nothing, nothing, among="{server.url}")
time.sleep(600)
"""
    machine.notice()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "told\n"
            for name, listener in ((server.url, heard), ("another run", other)):
                watcher.start(section, "ab12", "n", listener.lines.append, lambda **_: None, listener.drain, among=name)
            wait_for(lambda: other.drains)
            assert heard.drains == []
        finally:
            first.kill()
    wait_for(lambda: heard.drains)


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:80", "https://host", "http://", "http://host:port", "http://host:0", "http://h/?a=1", "http://[x"],
)
def test_a_url_that_cannot_be_a_metadata_service_s_is_refused(url):
    with pytest.raises(ConfigError, match="--notice-url"):
        NoticeSection(notice_url=url).check()


def test_urls_and_clouds_that_can_be():
    for url in (None, "http://169.254.169.254", "http://127.0.0.1:8000/{node_id}", "http://[fd00:ec2::254]/"):
        NoticeSection(notice_url=url).check()
    with pytest.raises(ConfigError, match="--notices ibm"):
        NoticeSection(notices="ibm").check()
