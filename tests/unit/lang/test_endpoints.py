"""Servers elsewhere as backends: programs run against small real HTTP servers that speak the two APIs."""

import gc
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang.endpoints import OpenAI, RuntimeEndpoint
from anabranch.lang.http_calls import EndpointError

LOGPROBS = {"True": -0.1, "False": -2.0}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[tuple[str, Any]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.most_at_once = self.at_once = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # a client that broke off

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self.answer(200, {"model_path": "somewhere/model"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        with self.server.lock:
            self.server.bodies.append((self.path, body))
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        try:
            assert self.server.hold.wait(10)
            getattr(self, "post_" + self.path.strip("/").replace("/", "_"))(body)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def post_flush_cache(self, body: Any) -> None:
        self.answer(200, {})

    def post_generate(self, body: Any) -> None:
        if isinstance(body["text"], list):
            self.answer(200, [self.scored(text) for text in body["text"]])
            return
        if "bad" in body["text"]:
            self.answer(400, {"error": {"message": "regex is wrong"}})
            return
        text = f" echo{len(body['text'])}"
        meta = {
            "prompt_tokens": 9,
            "cached_tokens": 4,
            "completion_tokens": 2,
            "finish_reason": {"type": "stop", "matched": 2},
            "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        }
        if body["stream"]:
            parts = [{"text": text[: i + 1], "meta_info": meta} for i in range(len(text))]
            self.events([*map(json.dumps, parts), "[DONE]"])
        else:
            self.answer(200, {"text": text, "meta_info": meta})

    def scored(self, text: str) -> Any:
        choice = "True" if text.endswith("True") else "False"
        triples = [[None, 1, text[: -len(choice)]], [LOGPROBS[choice], 2, choice]]
        return {"text": "", "meta_info": {"input_token_logprobs": triples}}

    def post_v1_chat_completions(self, body: Any) -> None:
        text = f"reply to {len(body['messages'])} messages"
        usage = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
        if body.get("stream"):
            chunks: list[Any] = [{"choices": [{"delta": {"content": w + " "}}]} for w in text.split()]
            last = {"choices": [{"delta": {}, "finish_reason": "length"}]}
            self.events([*(json.dumps(c) for c in [*chunks, last, {"choices": [], "usage": usage}]), "[DONE]"])
        else:
            self.answer(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage})

    def post_v1_completions(self, body: Any) -> None:
        if isinstance(body["prompt"], list):
            ends = ["True" if p.endswith("True") else "False" for p in body["prompt"]]
            told = [
                {"tokens": [p[: -len(e)], e], "token_logprobs": [None, LOGPROBS[e]]}
                for p, e in zip(body["prompt"], ends)
            ]
            self.answer(200, {"choices": [{"index": i, "logprobs": t} for i, t in enumerate(told)]})
        else:
            self.answer(200, {"choices": [{"text": " text", "finish_reason": "length"}], "usage": {"prompt_tokens": 3}})

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def events(self, parts: list[str]) -> None:
        self.send_response(200)
        self.end_headers()
        for part in parts:
            self.wfile.write(f"data: {part}\n\n".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_program_runs_over_the_native_call_with_forks_and_streams(server: Server) -> None:
    backend = RuntimeEndpoint(server.url)

    @ab.function
    def program(s: Any) -> None:
        s += "Say:" + ab.gen("x", max_tokens=4, temperature=0.5, stop="\n", regex="[a-z]+")
        forks = s.fork(2)
        forks += lambda i: f" {i}" + ab.gen("y")
        forks.join()
        s += ab.gen("z")

    state = program.run(backend=backend)
    assert state.text() == "Say: echo4" + state["z"] and state["y"] == [" echo12", " echo12"]
    assert state.logprob("x") == -0.75 and state.get_meta_info("x")["cached_tokens"] == 4
    params = server.bodies[0][1]["sampling_params"]
    assert params == {"max_new_tokens": 4, "temperature": 0.5, "stop": ["\n"], "regex": "[a-z]+"}
    streamed = program.run(backend=backend, stream=True)
    assert "".join(streamed.text_iter("x")) == " echo4" and "".join(streamed.text_iter()) == state.text()


def test_select_over_the_native_call_scores_only_the_choice(server: Server) -> None:
    s = ab.state(backend=RuntimeEndpoint(server.url))
    s += "2 < 3 is "
    assert s.select("x", ["False", "True"]).result() == "True"
    assert s.get_meta_info("x")["scores"] == [-2.0, -0.1] and s.text() == "2 < 3 is True"


def test_turns_go_to_the_chat_endpoint_and_answers_that_were_begun_are_continued(server: Server) -> None:
    s = ab.state(backend=RuntimeEndpoint(server.url))
    s += ab.system("Be kind.") + ab.user("Hi") + ab.assistant("Well, " + ab.gen("x"))
    s += ab.user("More") + ab.assistant(ab.gen("y"))
    assert s.messages()[2]["content"] == "Well, reply to 3 messages" and s["y"] == "reply to 4 messages"
    first, second = (body for path, body in server.bodies if path == "/v1/chat/completions")
    assert first["continue_final_message"] is True and first["messages"][-1] == {
        "role": "assistant",
        "content": "Well, ",
    }
    assert "continue_final_message" not in second and second["messages"][-1] == {"role": "user", "content": "More"}


def test_the_openai_api_serves_text_turns_streams_and_choices(server: Server) -> None:
    backend = OpenAI("m", server.url + "/v1")
    s = ab.state(backend=backend)
    s += "Once" + ab.gen("x", json_schema={"type": "object"})
    s += ab.select("y", ["False", "True"])
    assert s.text() == "Once textTrue" and s.finish_reason("x") == "length"
    assert server.bodies[0][1]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    c = ab.state(backend=backend)
    c += ab.user("Hi") + ab.assistant_begin()
    pieces = list(c.stream(ab.gen("z")))
    assert pieces == ["reply ", "to ", "1 ", "messages "] and c["z"] == "".join(pieces)
    assert c.get_meta_info("z")["cached_tokens"] == 3 and c.finish_reason("z") == "length"


def test_what_an_api_cannot_do_is_refused_by_name(server: Server) -> None:
    backend = OpenAI("m", server.url + "/v1")
    s = ab.state(backend=backend)
    with pytest.raises(ab.Unsupported, match="no top_k"):
        s.gen("x", top_k=3).result()
    s = ab.state(backend=backend)
    s += ab.user("Hi") + ab.assistant_begin() + "Well, "
    with pytest.raises(ab.Unsupported, match="cannot continue an answer"):
        s.gen("x").result()
    s = ab.state(backend=backend)
    s += ab.user("Hi")
    with pytest.raises(ab.Unsupported, match="select needs the logprobs"):
        s.select("x", ["a", "b"]).result()
    with pytest.raises(ValueError, match="http or https URL, got 'file"):
        RuntimeEndpoint("file:///etc/passwd")


def test_a_refusal_carries_the_servers_words_and_no_server_says_so(server: Server) -> None:
    s = ab.state(backend=RuntimeEndpoint(server.url))
    s += "bad"
    with pytest.raises(EndpointError, match="answered 400: regex is wrong") as caught:
        s.gen("x").result()
    assert caught.value.status == 400
    s = ab.state(backend=RuntimeEndpoint("http://127.0.0.1:9"))
    with pytest.raises(ConnectionError, match=r"no answer from 127\.0\.0\.1:9"):
        s.gen("x").result()


def test_connections_are_bounded_and_a_timeout_breaks_the_call(server: Server) -> None:
    backend = RuntimeEndpoint(server.url, max_connections=3)
    s = ab.state(backend=backend)
    group = s.fork(12)
    group += ab.gen("x")
    group.sync()
    assert 1 <= server.most_at_once <= 3
    server.hold.clear()
    with pytest.raises(TimeoutError):
        s.gen("y", timeout=0.05).result()
    server.hold.set()


def test_threads_end_with_the_endpoint(server: Server) -> None:
    backend = RuntimeEndpoint(server.url)
    s = ab.state(backend=backend)
    s.gen("x").result()
    workers = [t for t in threading.enumerate() if t.name.startswith("anabranch-http")]
    assert workers
    del s, backend
    gc.collect()
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()


def test_the_cache_is_flushed_and_the_server_asked(server: Server) -> None:
    backend = RuntimeEndpoint(server.url)
    assert ab.flush_cache(backend) is True
    assert ab.get_server_info(backend)["model"] == "somewhere/model"
