"""What a finished operation says about itself, in SGLang's shape: token triples, finish reason, usage."""

from collections.abc import Sequence
from typing import Any

from anabranch.lang.backend import Generation, Scores, TokenLogprobs, is_generation
from anabranch.lang.choices import ChoicesDecision, greedy_matrix, mean
from anabranch.lang.errors import ProgramError
from anabranch.lang.ir import Select


def text_of_generation(generation: Generation) -> str:
    return generation.text


def meta_info(results: Sequence[Any], *, many: bool) -> Any:
    """One dict per result, in a list if `many`."""
    infos = [_of_generation(r) if is_generation(r) else _of_scores(r) for r in results]
    return infos if many else infos[0]


def _of_generation(g: Generation) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": g.finish_reason}
    if g.matched is not None:
        reason["matched"] = g.matched
    info = {"finish_reason": reason, "output_ids": list(g.token_ids), "seed": g.seed, **g.usage}
    info.setdefault("completion_tokens", len(g.token_ids))
    if g.logprobs is not None:
        info["output_token_logprobs"] = triples(g.logprobs)
        info["output_top_logprobs"] = _tops(g.logprobs)
    if g.prompt_logprobs is not None:
        info["input_token_logprobs"] = triples(g.prompt_logprobs)
        info["input_top_logprobs"] = _tops(g.prompt_logprobs)
    return info


def _of_scores(s: Scores) -> dict[str, Any]:
    rows = [[lp or 0.0 for lp in choice.logprobs] for choice in s.logprobs]
    return {
        "finish_reason": {"type": "stop"},
        "best": s.best,
        "scores": list(s.scores),
        "normalized_prompt_logprobs": [mean(row) for row in rows],
        "input_token_logprobs": [triples(choice) for choice in s.logprobs],
        "output_token_logprobs": [],
        "greedy_logprob_matrix": greedy_matrix(rows) if rows else [],
        **s.usage,
    }


def triples(logprobs: TokenLogprobs) -> list[tuple[float | None, int, None]]:
    return [(lp, token, None) for lp, token in zip(logprobs.logprobs, logprobs.token_ids, strict=True)]


def _tops(logprobs: TokenLogprobs) -> list[list[tuple[float, int, None]]]:
    return [[(lp, token, None) for token, lp in zip(ids, lps, strict=True)] for ids, lps in logprobs.tops]


def logprob(result: Any, name: str, *, mean: bool) -> float:
    logprobs = _chosen_logprobs(result)
    if logprobs is None:
        raise ProgramError(
            f"{name!r} has no logprobs: generate it with return_logprob=True (under a constraint they are not the default)"
        )
    total = sum(lp for lp in logprobs.logprobs if lp is not None)
    return total / max(1, len(logprobs.logprobs)) if mean else total


def token_ids(result: Any) -> tuple[int, ...]:
    if is_generation(result):
        return tuple(result.token_ids)
    return tuple(result.logprobs[result.best].token_ids)


def _chosen_logprobs(result: Any) -> TokenLogprobs | None:
    return result.logprobs if is_generation(result) else result.logprobs[result.best]


def decide(select: Select, scores: Scores, bare: Scores | None) -> ChoicesDecision:
    """Apply a rule of the user's own to what was measured."""
    rows = [[lp or 0.0 for lp in choice.logprobs] for choice in scores.logprobs]
    decision = select.method(
        choices=select.choices,
        normalized_prompt_logprobs=[mean(row) for row in rows],
        input_token_logprobs=[triples(choice) for choice in scores.logprobs],
        output_token_logprobs=[],
        unconditional_token_logprobs=None if bare is None else [triples(choice) for choice in bare.logprobs],
    )
    if decision.decision not in select.choices:
        raise ProgramError(f"{select.method!r} decided for {decision.decision!r}, which is none of the choices")
    return decision
