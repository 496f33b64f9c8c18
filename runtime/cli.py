"""The `anabranch` command."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from anabranch.runtime.errors import AnabranchError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one line on standard error and exit code 1."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except (AnabranchError, MemoryError, ValueError) as fault:
        print(f"anabranch: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="anabranch", description="A prefix-caching runtime for agentic LLM programs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete a prompt, as text comes")
    generate.add_argument("prompt")
    generate.add_argument(
        "--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template"
    )
    generate.add_argument("--trace", action="store_true", help="say where the time went")
    _add_engine(generate)
    _add_sampling(generate, max_tokens=128)
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk to the model; an empty line or Ctrl-D ends it")
    chat.add_argument("--system", help="what the model is told first")
    _add_engine(chat)
    _add_sampling(chat, max_tokens=512)
    chat.set_defaults(run=run_chat)

    doctor = commands.add_parser("doctor", help="what this machine has, and which kernels run on it")
    doctor.add_argument("--limits", action="store_true", help="measure bandwidth and peak rates (half a minute)")
    doctor.set_defaults(run=run_doctor)

    _add_bench(commands.add_parser("bench", help="measure a workload"))

    replay = commands.add_parser(
        "replay", help="run a recorded inbox of the scheduler again (anabranch_DEBUG=5 records)"
    )
    replay.add_argument("file", type=Path)
    replay.set_defaults(run=run_replay)
    return parser


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        help="latency, prefill, throughput, prefix, chat, tree, json, select, serve, fork, start, cache-cost, accuracy, radix, step, or peers",
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-ups", type=int, default=1, help="runs that do not count (1)")
    parser.add_argument("--small", action="store_true", help="a smoke test: an eighth of the size")
    parser.add_argument("--base-url", help="an OpenAI-compatible server instead of the embedded engine")
    parser.add_argument("--no-touch", action="store_true", help="do not touch memory first")
    serve = parser.add_argument_group("serve: a stream of requests")
    serve.add_argument("--rate", type=float, default=None, help="open loop: so many requests per second (Poisson, or a trace sped up to it)")
    serve.add_argument("--arrivals", type=Path, default=None, help="open loop: arrival times and lengths from a trace (JSON lines or CSV)")
    serve.add_argument("--requests", type=int, default=64)
    serve.add_argument("--concurrency", type=int, default=8, help="closed loop: requests at a time")
    serve.add_argument("--stream-seed", type=int, default=0, help="of arrival times, lengths and text")
    peers = parser.add_argument_group("peers")
    peers.add_argument("--peer", action="append", default=[], help="openvino or llama.cpp; may be given twice (both); accuracy: llama.cpp")
    peers.add_argument("--only", action="append", default=[], metavar="WORKLOAD", help="may be given several times (all)")
    _add_engine(parser)
    parser.set_defaults(run=run_bench)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=None, help="'default', a directory, or a .gguf file")
    group.add_argument("--chat-template", default=None, metavar="FILE", help="a Jinja file, instead of the model's own")
    group.add_argument("--mode", choices=("inprocess", "processes", "auto"), default=None)
    group.add_argument("--backend", choices=("auto", "cpu", "reference"), default="auto")
    group.add_argument("--precision", choices=("fast", "exact"), default="fast")
    group.add_argument("--kv-dtype", choices=("auto", "f32", "f16", "bf16", "int16", "int8"), default="auto")
    group.add_argument("--num-threads", type=int, default=None)
    group.add_argument("--page-size", type=int, default=16)
    group.add_argument("--num-pages", type=int, default=None)


def _add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens)
    group.add_argument("--temperature", type=float, default=0.7)
    group.add_argument("--top-p", type=float, default=None)
    group.add_argument("--top-k", type=int, default=None)
    group.add_argument("--seed", type=int, default=None)
    group.add_argument("--stop", action="append", default=None, help="may be given several times")
    group.add_argument("--regex", default=None, help="what the answer must match")


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("chat_template", "mode", "backend", "precision", "kv_dtype", "num_threads", "page_size", "num_pages")
    return {name: getattr(arguments, name) for name in names}


def _engine_flags(options: dict[str, Any]) -> tuple[str, ...]:
    """The same options for another process's command line."""
    return tuple(word for name, value in options.items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value)))


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "regex")
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


# ---------------------------------------------------------------- commands


def run_generate(arguments: argparse.Namespace) -> int:
    began = time.perf_counter()
    from anabranch.runtime.engine import Engine

    imported = time.perf_counter()
    with Engine(arguments.model, **_engine_options(arguments)) as engine:
        started = time.perf_counter()
        parts = engine.info()["start_ms"] if arguments.trace else ()
        first = None
        if arguments.chat:
            pieces = engine.stream_chat([{"role": "user", "content": arguments.prompt}], **_sampling(arguments))
        else:
            pieces = engine.stream(arguments.prompt, **_sampling(arguments))
        for piece in pieces:
            first = first or time.perf_counter()
            print(piece, end="", flush=True)
        print(flush=True)
        ended = time.perf_counter()
    if arguments.trace:
        first = first or ended
        _show_lap("imports", 1000 * (imported - began))
        _show_lap("engine start", 1000 * (started - imported))
        for name, milliseconds in parts:
            _show_lap(f"  {name}", milliseconds)
        _show_lap("first text", 1000 * (first - started))
        _show_lap("the rest", 1000 * (ended - first))
        _show_lap("total", 1000 * (ended - began))
    return 0


def _show_lap(name: str, milliseconds: float) -> None:
    print(f"{name:<30}{milliseconds:9.1f} ms", file=sys.stderr)


def run_chat(arguments: argparse.Namespace) -> int:
    from anabranch.runtime.engine import Engine

    with Engine(arguments.model, **_engine_options(arguments)) as engine:
        conversation = engine.conversation(system=arguments.system)
        while True:
            try:
                said = input("> ").strip()
            except EOFError:
                return 0
            if not said:
                return 0
            try:
                for piece in conversation.say(said, **_sampling(arguments)):
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                print(" [interrupted]")
                return 130
            print()


def run_doctor(arguments: argparse.Namespace) -> int:
    from anabranch.runtime.doctor import limits, report

    for name, value in report():
        print(f"{name:<22} {value}")
    if arguments.limits:
        print()
        for name, value in limits():
            print(f"{name:<22} {value}")
    return 0


def run_bench(arguments: argparse.Namespace) -> int:
    from anabranch.runtime.bench import suite

    options = _engine_options(arguments)
    settings = suite.Settings(
        model=arguments.model or "default", base_url=arguments.base_url, repeats=arguments.repeats, warm_ups=arguments.warm_ups,
        small=arguments.small, options=options, flags=_engine_flags(options), rate=arguments.rate, trace=arguments.arrivals,
        num_requests=arguments.requests, concurrency=arguments.concurrency, seed=arguments.stream_seed, peers=tuple(arguments.peer),
        only=tuple(arguments.only), touch=not arguments.no_touch,
    )  # fmt: skip
    result = suite.run(arguments.workload, settings)
    print(
        orjson.dumps(result, option=orjson.OPT_INDENT_2).decode()
        if arguments.json
        else suite.show(arguments.workload, result)
    )
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    from anabranch.runtime.trace import replay

    if not arguments.file.is_file():
        raise ValueError(f"{arguments.file} is not a file")
    print(f"{replay(arguments.file)} steps, the same decisions as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
