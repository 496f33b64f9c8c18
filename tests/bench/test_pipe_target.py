"""A peer behind JSON lines: what it says becomes replies, and its end becomes an error for everybody who waits."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench import ByteVocabulary

from anabranch.runtime.bench.pipe_target import PipeTarget

VOCABULARY: Any = ByteVocabulary()
ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
print("noise that is no JSON", flush=True)
for line in sys.stdin:
    r = json.loads(line)
    if r["max_tokens"] == 13:
        sys.exit(7)
    made = list(json.dumps(r["json_schema"]).encode()) if r["json_schema"] else r["token_ids"][-1:] * r["max_tokens"]
    for i in made:
        print(json.dumps({"id": r["id"], "token_ids": [i]}), flush=True)
    print(json.dumps({"id": r["id"], "done": True}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "peer.py"
    script.write_text(ECHO)
    return [sys.executable, str(script)]


def test_answers_become_part_of_the_context_and_are_forked_with_it(command: list[str]) -> None:
    target = PipeTarget("echo", command, VOCABULARY)
    try:
        node = target.open()
        node.extend("ab")
        reply = node.generate(3).result(30)
        assert (reply.text, reply.num_prompt, reply.num_output, len(reply.arrivals)) == ("bbb", 2, 3, 3)
        assert reply.arrivals[-1] <= reply.total
        (child,) = node.fork(1)
        child.extend("c")
        assert child.token_ids() == list(b"abbbbc") and node.token_ids() == list(b"abbbb")
        assert child.generate(1, json_schema={"type": "object"}).result(30).text == '{"type": "object"}'
    finally:
        target.close()
    assert not target.child.is_alive


def test_the_end_of_the_peer_fails_what_is_open(command: list[str]) -> None:
    target = PipeTarget("echo", command, VOCABULARY)
    try:
        node = target.open()
        node.extend("x")
        with pytest.raises(RuntimeError, match="exit code 7"):
            node.generate(13).result(30)
    finally:
        target.close()


def test_a_peer_that_does_not_start_is_an_error_and_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError, match="broken ended with exit code 2"):
        PipeTarget("broken", [sys.executable, "-c", "raise SystemExit(2)"], VOCABULARY)
