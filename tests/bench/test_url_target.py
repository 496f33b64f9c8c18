"""Any OpenAI-compatible server: what is sent, what is read, and what time counts."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anabranch.runtime.bench.url_target import UrlTarget

SCHEMA = {"type": "object"}


class Server(BaseHTTPRequestHandler):
    """Streams the letters of the answer; refuses the prompt "bad"; a prompt of "wait" waits until all are there."""

    protocol_version = "HTTP/1.0"
    seen: list[dict[str, Any]]
    barrier: threading.Barrier

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({"path": self.path, **body})
        if body["prompt"] == "wait":
            self.barrier.wait(30)
        self.send_response(400 if body["prompt"] == "bad" else 200)
        self.end_headers()
        if body["prompt"] == "bad":
            self.wfile.write(b"no such thing")
            return
        for letter in "xyz":
            self._event({"choices": [{"text": letter}]})
        self._event({"choices": [], "usage": {
            "prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}})  # fmt: skip
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *_: object) -> None: ...


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted: the default of 5 drops some of those that come at once


@pytest.fixture
def target() -> Iterator[UrlTarget]:
    Server.seen, Server.barrier = [], threading.Barrier(40)
    server = Listener(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    target = UrlTarget(f"http://127.0.0.1:{server.server_address[1]}/base", model="m", extra={"cache_prompt": True})
    yield target
    target.close()
    server.shutdown()
    server.server_close()


def test_an_answer_is_read_with_its_usage_and_goes_on_in_the_context(target: UrlTarget) -> None:
    node = target.open()
    node.extend("ab")
    reply = node.generate(3).result(30)
    assert (reply.text, reply.num_prompt, reply.num_output, reply.num_cached, reply.num_computed) == ("xyz", 9, 3, 4, 5)
    assert len(reply.arrivals) == 3 and reply.total >= reply.arrivals[-1]
    (child,) = node.fork(1)
    child.extend("c")
    child.generate(1, temperature=0.5).result(30)
    first, second = Server.seen
    assert first["path"] == "/base/v1/completions" and first["ignore_eos"] is True and first["cache_prompt"] is True
    assert second["prompt"] == "abxyzc" and second["temperature"] == 0.5 and "json_schema" not in second


def test_a_schema_is_sent_in_the_ways_that_servers_know_and_may_end_early(target: UrlTarget) -> None:
    node = target.open()
    node.extend("ab")
    node.generate(3, json_schema=SCHEMA).result(30)
    (body,) = Server.seen
    assert body["ignore_eos"] is False and body["json_schema"] == SCHEMA
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


def test_many_requests_are_in_flight_at_once(target: UrlTarget) -> None:
    nodes = [target.open() for _ in range(40)]
    for node in nodes:
        node.extend("wait")
    futures = [node.generate(1) for node in nodes]  # the server answers none of them before it has all
    assert all(future.result(30).text == "xyz" for future in futures)


def test_a_refusal_is_an_error_with_the_servers_words(target: UrlTarget) -> None:
    node = target.open()
    node.extend("bad")
    with pytest.raises(RuntimeError, match="answered 400: b'no such thing'"):
        node.generate(1).result(30)


@pytest.mark.parametrize("url", ["https://host", "host:80", "ftp://x", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base url must look like"):
        UrlTarget(url)
