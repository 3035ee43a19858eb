"""The client's promises on one call: repeats, keys, errors, pages, streams that resume."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tidewright.client import Client, LostContact, RequestRefused

Answer = httpx.Response | Exception


class Server:
    """A scripted server: answers in order and keeps what it was asked."""

    def __init__(self, *answers: Answer | Callable[[httpx.Request], Answer]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0)
        given = answer(request) if callable(answer) and not isinstance(answer, httpx.Response) else answer
        if isinstance(given, Exception):
            raise given
        return given

    def client(self, *, retry_seconds: float = 30.0) -> Client:
        return Client(
            "http://server:1",
            retry_seconds=retry_seconds,
            transport=httpx.MockTransport(self),
            sleep=self.slept.append,
        )


def refused() -> httpx.ConnectError:
    return httpx.ConnectError("[Errno 111] Connection refused")


def ok(body: Any = None, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json={"id": "j1", "phase": "Queued"} if body is None else body)


def test_a_submission_that_breaks_off_is_repeated_under_the_same_key():
    server = Server(refused(), httpx.ReadError("cut"), ok(status=503), ok(status=201))
    with server.client() as client:
        assert client.submit({"script": "/x.py"})["id"] == "j1"
    keys = {request.headers["Idempotency-Key"] for request in server.requests}
    assert len(server.requests) == 4
    assert len(keys) == 1
    assert len(keys.pop()) >= 16
    assert {request.content for request in server.requests} == {b'{"script": "/x.py"}'}


def test_two_submissions_have_two_keys_and_a_given_key_is_kept():
    server = Server(ok(), ok(), ok())
    with server.client() as client:
        client.submit({})
        client.submit({})
        client.submit({}, idempotency_key="mine")
    first, second, third = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first != second
    assert third == "mine"


def test_retry_after_is_waited_out_and_never_shortened():
    busy = httpx.Response(429, headers={"Retry-After": "7"}, json={"detail": "too many"})
    server = Server(busy, ok())
    with server.client() as client:
        client.job("j1")
    assert server.slept == [7.0]


def test_retry_after_beyond_the_patience_gives_up_at_once_with_the_servers_word():
    busy = httpx.Response(503, headers={"Retry-After": "60"}, json={"detail": "execution is away"})
    server = Server(busy, ok())
    with server.client(retry_seconds=5) as client, pytest.raises(LostContact, match="execution is away"):
        client.job("j1")
    assert server.slept == []


@pytest.mark.parametrize("header", ["nan", "inf", "-5", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
def test_odd_retry_after_means_the_ordinary_back_off(header):
    server = Server(httpx.Response(503, headers={"Retry-After": header}, json={}), ok())
    with server.client() as client:
        client.job("j1")
    assert len(server.slept) == 1
    assert 0 < server.slept[0] <= 2


def test_a_server_that_never_answers_is_lost_contact_naming_it():
    server = Server(refused())
    with server.client(retry_seconds=0) as client, pytest.raises(LostContact) as caught:
        client.job("j1")
    assert "http://server:1" in str(caught.value)
    assert "refused" in str(caught.value)


def test_a_refusal_is_not_repeated_and_names_fields_and_ways_out():
    problem = {
        "type": "urn:tidewright:problem:invalid",
        "title": "Unprocessable",
        "detail": "one thing is wrong",
        "errors": [{"field": "/workers_min", "detail": "is over workers_max", "way_out": "at most 4"}],
    }
    server = Server(httpx.Response(422, json=problem, headers={"content-type": "application/problem+json"}))
    with server.client() as client, pytest.raises(RequestRefused) as caught:
        client.submit({})
    assert (caught.value.status, caught.value.code) == (422, "invalid")
    assert [(item.field, item.way_out) for item in caught.value.errors] == [("/workers_min", "at most 4")]
    assert len(server.requests) == 1


def test_a_refusal_without_a_problem_document_is_quoted():
    server = Server(httpx.Response(413, text="too big"))
    with server.client() as client, pytest.raises(RequestRefused, match="too big"):
        client.submit({})


def test_something_else_on_the_port_is_said_so():
    server = Server(httpx.Response(200, text="<html>"))
    with server.client() as client, pytest.raises(LostContact, match="not Tidewright"):
        client.job("j1")


def test_ids_are_quoted_into_one_part_of_the_path():
    server = Server(ok())
    with server.client() as client:
        client.job("../jobs?x#y")
    assert server.requests[0].url.raw_path == b"/v1/jobs/..%2Fjobs%3Fx%23y"


def test_pages_are_fetched_as_they_are_needed_and_the_limit_holds():
    def page(request: httpx.Request) -> httpx.Response:
        begin = int(request.url.params.get("cursor", "0"))
        count = int(request.url.params["limit"])
        items = [{"id": n} for n in range(begin, min(begin + count, 450))]
        after = begin + count
        return ok({"items": items, "next_cursor": str(after) if after < 450 else None})

    server = Server(page, page, page)
    with server.client() as client:
        assert [job["id"] for job in client.jobs()] == list(range(450))
    server = Server(page, page)
    with server.client() as client:
        assert [job["id"] for job in client.jobs(limit=250, phases=("Queued", "Held"))] == list(range(250))
    assert [request.url.params["limit"] for request in server.requests] == ["200", "50"]
    assert server.requests[0].url.params.get_list("phase") == ["Queued", "Held"]


def test_patch_guards_by_version_only_where_asked():
    server = Server(ok(), ok())
    with server.client() as client:
        client.patch("j1", {"held": True}, if_version=3)
        client.patch("j1", {"held": True})
    assert server.requests[0].headers["If-Match"] == '"3"'
    assert "If-Match" not in server.requests[1].headers


class Cut(httpx.SyncByteStream):
    """A body that breaks off after its parts."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts
        raise httpx.RemoteProtocolError("peer closed connection")


def sse(*events: tuple[str, str]) -> bytes:
    return b"".join(f"id: {i}\nevent: t\ndata: {data}\n\n".encode() for i, data in events)


def test_events_resume_behind_the_last_id_without_gap_or_repeat():
    stream = {"content-type": "text/event-stream"}
    server = Server(
        httpx.Response(200, headers=stream, stream=Cut(sse(("1-1", '{"n":1}'), ("1-2", '{"n":2}')), b"id: 1-3\nda")),
        refused(),
        httpx.Response(200, headers=stream, stream=Cut(sse(("1-3", '{"n":3}')))),
        refused(),
    )
    seen = []
    with server.client() as client:
        events = client.events(job_id="j1")
        for event in events:
            seen.append((event.id, event.type, event.data["n"]))
            if len(seen) == 3:
                break
        events.close()
    assert seen == [("1-1", "t", 1), ("1-2", "t", 2), ("1-3", "t", 3)]
    assert [request.headers.get("Last-Event-ID") for request in server.requests] == [None, "1-2", "1-2"]
    assert {request.url.params["job_id"] for request in server.requests} == {"j1"}


def lines(*numbers: int) -> bytes:
    return b"".join(
        json.dumps({"member": "j1/worker/0/1", "cursor": f"c{n}", "line": f"line {n}"}).encode() + b"\n"
        for n in numbers
    )


def test_following_logs_resumes_by_cursor_and_ends_with_the_job():
    server = Server(
        httpx.Response(200, stream=Cut(lines(1, 2), b'{"member": "j1/wor')),
        httpx.Response(503, json={"detail": "execution is away"}),
        httpx.Response(200, content=lines(3)),
        ok({"id": "j1", "phase": "Running"}),
        httpx.Response(200, content=lines(4)),
        ok({"id": "j1", "phase": "Succeeded"}),
    )
    with server.client() as client:
        seen = [line.line for line in client.logs("j1", follow=True, tail=10)]
    assert seen == ["line 1", "line 2", "line 3", "line 4"]
    asked = [request.url.params for request in server.requests if request.url.path.endswith("/logs")]
    assert [params.get("cursor") for params in asked] == [None, "c2", "c2", "c3"]
    assert [params.get("tail") for params in asked] == ["10", None, None, None]


def test_logs_without_following_end_with_the_stream():
    server = Server(httpx.Response(200, content=lines(1)))
    with server.client() as client:
        assert [line.cursor for line in client.logs("j1")] == ["c1"]


def test_a_refused_stream_is_a_refusal():
    server = Server(httpx.Response(404, json={"detail": "no such job", "type": "urn:tidewright:problem:unknown"}))
    with server.client() as client, pytest.raises(RequestRefused, match="no such job"):
        list(client.logs("j1", follow=True))


@pytest.mark.parametrize("server", ["ftp://x", "localhost:8470", "http://", "nonsense", "http://[::1"])
def test_an_address_that_is_none_is_refused(server):
    with pytest.raises(ValueError, match=r"address"):
        Client(server)
