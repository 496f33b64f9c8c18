"""What `gen` and `select` do on a state: send the operation, and make its future a node of the log and a variable."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from anabranch.lang import backend as wire
from anabranch.lang import ir, meta
from anabranch.lang.deferred import Undecided
from anabranch.lang.errors import TypedValueError
from anabranch.lang.options import Options
from anabranch.lang.pending import Pending
from anabranch.lang.reasoning import split_reasoning
from anabranch.lang.stream import Stream

if TYPE_CHECKING:
    from anabranch.lang.state import State


def generate(s: "State", gen: ir.Gen, streaming: bool) -> Pending:
    """Send one generation; with n > 1, as many on a fork each, the first of which becomes the state."""
    width = gen.options.over(s._program.options).n or 1
    branch: Any = s._sender() if width == 1 else s._require_open()
    options, deadline = s._program.limit(gen.options.over(s._program.options))
    sampling = options.sampling(gen.constraint)
    stream = Stream() if streaming else None
    feed = stream.feed if stream else None
    if width == 1:
        futures = [branch.generate(sampling, feed)]
    else:
        samples = branch.fork(width)
        futures = [sample.generate(sampling, feed if i == 0 else None) for i, sample in enumerate(samples)]
        for sample, future in zip(samples[1:], futures[1:], strict=True):
            future.add_done_callback(_closer(sample))
        branch.join(samples[0])
        s._hold(samples[0], futures[:1])
    for future in futures:
        s._track(gen.name or "gen", future)
    if stream:
        futures[0].add_done_callback(stream.end)
    s._append("gen", name=gen.name, future=futures[0], read=meta.text_of_generation, stream=stream)
    finish = _value_reader(gen, many=width > 1)
    value = Pending(futures, finish, what=_what("gen", gen.name), deadline=deadline, keep=s._keep())
    s._bind(gen.name, value)
    return value


def select(s: "State", select: ir.Select) -> Pending:
    """Send one score over all choices; the runtime appends the best without a round trip. A rule that Python computes decides
    when the scores are there (`deferred.py`).
    """
    branch = s._sender()
    options, deadline = s._program.limit(Options(timeout=select.timeout))
    if (method := select.method.backend_method) is not None:
        future = branch.score(select.choices, method, append=True, timeout=options.timeout)
    else:
        needs_bare = select.method.requires_unconditional_logprobs
        bare = _measure_without_context(s, select.choices, options.timeout) if needs_bare else None
        s._undecided = Undecided(branch, select, bare, options.timeout)
        future = s._undecided.decided
    s._track(select.name or "select", future)

    def read(scores: wire.Scores) -> str:
        return select.choices[scores.best]

    s._append("select", name=select.name, future=future, read=read)
    what = _what("select", select.name)
    value = Pending([future], lambda results: read(results[0]), what=what, deadline=deadline, keep=s._keep())
    s._bind(select.name, value)
    return value


def _measure_without_context(s: "State", choices: Sequence[str], timeout: float | None) -> "Future[wire.Scores]":
    program = s._program
    empty = program.backend.open(seed=program.seed, salt=program.salt, program=program.label, priority=program.priority)
    future = empty.score(choices, "sum", append=False, timeout=timeout)
    future.add_done_callback(_closer(empty))
    return future


def split_reasoning_of(s: "State", name: str, model_type: str | None) -> None:
    """Make two variables of a generated one: its answer, and its reasoning."""
    whole = s._generated[name]

    def part(index: int) -> Pending:
        def pick(_: list[Any]) -> str:
            return split_reasoning(whole.result(), model_type)[index]

        return Pending(whole.futures, pick, what=whole.what, deadline=whole.deadline, keep=s._keep())

    s._variables[f"{name}_reasoning_content"] = part(0)
    s._variables[name] = part(1)


def _what(kind: str, name: str | None) -> str:
    return f"{kind} {name!r}" if name else kind


def _closer(branch: wire.BackendBranch) -> Callable[[object], None]:
    return lambda _: branch.close(superseded=True)


def _value_reader(gen: ir.Gen, *, many: bool) -> Callable[[list[Any]], Any]:
    spec = gen.spec

    def value(result: wire.Generation) -> Any:
        if spec is None:
            return result.text
        try:
            return spec.parse(result.text)
        except ValueError as error:
            cut = " (cut off by max_tokens)" if result.finish_reason == "length" else ""
            name = gen.name or "gen"
            raise TypedValueError(f"{name!r} is no {spec.name}{cut}: {result.text!r}: {error}", result.text) from error

    return lambda results: [value(r) for r in results] if many else value(results[0])
