"""OpenVINO GenAI behind JSON lines: run by the peer's own Python, imports nothing of ours.

stdin   {"id": 1, "token_ids": [...], "max_tokens": 16, "temperature": 0.0, "json_schema": {...} or null}; end of file ends it
stdout  {"ready": true}, then {"id": 1, "token_ids": [...]} as tokens come and {"id": 1, "done": true} at the end
"""

import json
import os
import queue
import sys
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def pipeline(model_dir: str) -> Any:
    """The best settings found for this kind of machine: see docs/performance.md."""
    cache = genai.SchedulerConfig()
    cache.cache_size = 2  # GB
    cache.enable_prefix_caching = True
    cache.dynamic_split_fuse = True
    options = {
        "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64", "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }  # fmt: skip
    return genai.ContinuousBatchingPipeline(model_dir, cache, "CPU", options)


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read_requests(inbox: "queue.Queue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    inbox.put(None)


def config_for(request: dict[str, Any], ends: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = request["max_tokens"]
    config.ignore_eos = True
    config.do_sample = request["temperature"] > 0
    config.temperature = request["temperature"] or 1.0
    config.rng_seed = request["id"]
    if request.get("json_schema"):
        config.ignore_eos = False
        config.set_eos_token_id(ends)
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(request["json_schema"]))
    return config


def serve(pipe: Any) -> None:
    inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read_requests, args=(inbox,), daemon=True).start()
    running: dict[int, Any] = {}
    constrained: set[int] = set()
    ends = pipe.get_config().eos_token_id
    say({"ready": True})
    while True:
        while not running or not inbox.empty():
            request = inbox.get()
            if request is None:
                return
            ids = openvino.Tensor(np.array([request["token_ids"]], np.int64))
            if request.get("json_schema"):
                constrained.add(request["id"])  # these end by themselves, and their end is no text
            running[request["id"]] = pipe.add_request(request["id"], ids, config_for(request, ends))
        pipe.step()
        for number, handle in list(running.items()):
            while handle.can_read():
                ids = [i for output in handle.read().values() for i in output.generated_ids]
                say({"id": number, "token_ids": [i for i in ids if not (number in constrained and i == ends)]})
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                say({"id": number, "done": True})
                del running[number]
                constrained.discard(number)


if __name__ == "__main__":
    serve(pipeline(sys.argv[1]))
