"""When requests come and how long they are: drawn, or read from a trace. Pure.

Sources of trace formats: Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake (timestamp in ms, input_length,
output_length, hash_ids of 512-token blocks, equal where prefixes are).
"""

import csv
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

BLOCK_TOKENS = 512  # of one entry of hash_ids
MAX_LINE_BYTES = 1 << 20
_NAMES = {
    "at": ("arrival_s", "timestamp_ms", "timestamp", "arrival", "time"),
    "prompt": ("prompt_tokens", "input_length", "contexttokens", "context_tokens", "input_tokens", "num_prefill_tokens"),
    "output": ("output_tokens", "output_length", "generatedtokens", "generated_tokens", "num_decode_tokens", "max_tokens"),
}
# Lengths of a mixed service, (prompt, output): short questions, chats, documents, code to be completed.
MIX = ((32, 64), (128, 128), (256, 32), (512, 96), (1024, 16), (64, 200))


class TraceError(ValueError):
    """A trace that cannot be read. Names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: due `at` seconds after the start. `blocks`: ids of its prompt's blocks; equal ids at the front mean a shared prefix."""

    at: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()


def poisson(rate: float, count: int, seed: int, *, scale: float = 1.0) -> list[Arrival]:
    """`count` arrivals with exponential gaps of mean 1 / rate, the first after one gap; lengths drawn from MIX, give or take a third."""
    require(rate > 0, f"the rate must be above 0 requests per second, got {rate:g}")
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        prompt, output = rng.choice(MIX)
        found.append(Arrival(at, _around(rng, prompt * scale), _around(rng, output * scale)))
    return found


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests, faster or slower, so that `rate` of them come per second on average."""
    require(rate > 0, f"the rate must be above 0 requests per second, got {rate:g}")
    now = offered_rate(arrivals)
    return [replace(a, at=a.at * now / rate) for a in arrivals] if now else list(arrivals)


def offered_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests per second between the first and the last; 0 if all come at once."""
    span = arrivals[-1].at - arrivals[0].at if arrivals else 0.0
    return (len(arrivals) - 1) / span if span > 0 else 0.0


def fitting(arrivals: Iterable[Arrival], context_length: int) -> tuple[list[Arrival], int]:
    """Requests cut to what the model can see, the prompt first, and how many had to be."""
    fitted, num_cut = [], 0
    for a in arrivals:
        output = min(a.num_output, max(context_length // 2, 1))
        prompt = min(a.num_prompt, context_length - output - 8)  # where passages are joined, tokens may split
        num_cut += (prompt, output) != (a.num_prompt, a.num_output)
        fitted.append(replace(a, num_prompt=prompt, num_output=output))
    return fitted, num_cut


def read_trace(path: Path, limit: int) -> list[Arrival]:
    """The first `limit` requests of a trace, in the order of their arrival, from 0 s on. Raises TraceError.

    JSON lines or CSV with a header, told apart by the first character. Times: seconds, a date, or, in columns named `timestamp_ms` or in
    JSON lines named `timestamp`, milliseconds.
    """
    require(path.is_file(), f"{path} is not a file")
    with path.open(encoding="utf-8-sig") as file:
        start = file.read(1)
        file.seek(0)
        rows = _json_rows(path, file) if start == "{" else _csv_rows(path, file)
        found = [_arrival(path, number, row, is_json=start == "{") for number, row in islice(rows, limit)]
    require(bool(found), f"{path} has no requests")
    first = min(a.at for a in found)
    return sorted((replace(a, at=a.at - first) for a in found), key=lambda a: a.at)


def _json_rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        require(len(line) <= MAX_LINE_BYTES, f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as fault:
            raise TraceError(f"{path}:{number}: not JSON: {fault}") from None
        require(isinstance(row, dict), f"{path}:{number}: each line must be an object")
        yield number, {str(k).lower(): v for k, v in row.items()}


def _csv_rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    rows = csv.reader(file)
    header = [name.strip().lower() for name in next(rows, [])]
    for row in rows:
        if row:
            require(len(row) == len(header), f"{path}:{rows.line_num}: {len(row)} columns under a header of {len(header)}")
            yield rows.line_num, dict(zip(header, row))


def _arrival(path: Path, number: int, row: Mapping[str, Any], *, is_json: bool) -> Arrival:
    where = f"{path}:{number}"
    name, value = _column(where, row, "at")
    at = _seconds(where, value)
    if name == "timestamp_ms" or (is_json and name == "timestamp" and isinstance(value, int | float)):
        at /= 1000
    lengths = [_length(where, *_column(where, row, kind)) for kind in ("prompt", "output")]
    blocks = row.get("hash_ids") or ()
    require(isinstance(blocks, list | tuple) and all(isinstance(b, int) for b in blocks), f"{where}: hash_ids must be a list of integers")
    return Arrival(at, lengths[0], lengths[1], tuple(blocks))


def _column(where: str, row: Mapping[str, Any], kind: str) -> tuple[str, Any]:
    for name in _NAMES[kind]:
        if name in row:
            return name, row[name]
    raise TraceError(f"{where}: no column for the {kind}: one of {', '.join(_NAMES[kind])} is needed, there are {', '.join(row)}")


def _seconds(where: str, value: Any) -> float:
    try:
        at = float(value)
    except (TypeError, ValueError):
        try:
            at = datetime.fromisoformat(str(value).strip()[:26]).timestamp()  # some clocks write more digits than are read here
        except ValueError:
            raise TraceError(f"{where}: {value!r} is neither a number of seconds nor a date") from None
    require(at == at and abs(at) != float("inf"), f"{where}: {value!r} is no time")
    return at


def _length(where: str, name: str, value: Any) -> int:
    try:
        length = int(value)
    except (TypeError, ValueError):
        raise TraceError(f"{where}: {name} must be a number of tokens, got {value!r}") from None
    require(length >= 0, f"{where}: {name} must not be negative, got {length}")
    return max(length, 1)


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise TraceError(problem)


def _around(rng: random.Random, length: float) -> int:
    return max(1, round(length * rng.uniform(2 / 3, 4 / 3)))
