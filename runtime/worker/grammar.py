"""Constrained generation, token by token: which tokens the grammar of a slot allows next, and which it dictates.

A `GrammarState` is a deterministic automaton over the generated tokens: replaying them gives the same state, so that a resumed, forked or
rolled-back branch goes on as if nothing had happened.

What may follow, first rule first (`SamplingBatch` has the rest of the order):
1. the grammar's mask; once the grammar is complete, only end-of-sequence is left in it;
2. white space: after a run of MAX_SPACE bytes of it no further token of white space alone, unless there is nothing else;
3. tokens banned until min_tokens, unless nothing else is allowed (so a complete grammar ends whatever min_tokens says);
4. logit bias, which lifts no ban. Stops are looked for in what comes out, forced tokens included.
A generation that its max_tokens cuts is an unfinished sentence of the grammar, and ends with "length".

A run of tokens that the grammar dictates is *pending*. A slot that wants logprobs emits it one by one through the sampler, each token with
its own logprob; any other emits it at once, unsampled.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from anabranch.runtime.grammars import GrammarError, describe_failure, parser_limits, to_llguidance
from anabranch.runtime.messages import Error, Grammar
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

MAX_SPACE = 32  # bytes of white space in a row
MAX_FORCED = 128  # tokens emitted at once; a longer dictated run continues in the next step
CACHE_ENTRIES = 64
_SPACE = b" \t\n\r\v\f"


class GrammarFailure(Exception):
    """The grammar of one slot cannot go on: it is too complex, or nothing may follow. What was asked for is at fault, not the engine."""

    def to_wire(self) -> Error:
        return Error("invalid_request_error", f"the grammar cannot go on ({self}): simplify it", "grammar", "invalid_grammar")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What the grammars of one vocabulary share.

    space_only   [words] uint32, bit i: token i is white space and nothing else
    num_bytes, num_trailing   [vocab] lengths of the token and of the white space that ends it
    """

    tokenizer: LLTokenizer
    num_words: int
    space_only: NDArray[np.uint32]
    num_bytes: NDArray[np.int32]
    num_trailing: NDArray[np.int32]


def token_table(vocabulary: Vocabulary) -> TokenTable:
    spellings = [vocabulary.token_bytes(i) for i in range(vocabulary.vocab_size)]
    num_bytes = np.array([len(spelling) for spelling in spellings], np.int32)
    num_trailing = num_bytes - np.array([len(spelling.rstrip(_SPACE)) for spelling in spellings], np.int32)
    num_words = -(-len(spellings) // 32)
    bits = np.zeros(num_words * 32, np.bool_)
    bits[: len(spellings)] = (num_trailing == num_bytes) & (num_bytes > 0)
    space_only = np.packbits(bits, bitorder="little").view(np.uint32)
    return TokenTable(_ll_tokenizer(vocabulary, spellings), num_words, space_only, num_bytes, num_trailing)


class _Spelling:
    """The shape in which llguidance wants a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, spellings: list[bytes], eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = vocabulary.bos_token_id
        self.tokens = spellings
        self.special_token_ids = [i for i in range(len(spellings)) if vocabulary.is_special(i)]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode_plain(text)


def _ll_tokenizer(vocabulary: Vocabulary, spellings: list[bytes]) -> LLTokenizer:
    ends = list(vocabulary.eos_token_ids)
    if not ends:  # llguidance must have one; an id past the vocabulary is never sampled
        ends, spellings = [len(spellings)], [*spellings, b""]
    return LLTokenizer(_Spelling(vocabulary, spellings, ends[0]), n_vocab=len(spellings), eos_token=ends)  # type: ignore[arg-type]


Compiled = tuple[LLMatcher, TokenTable]


class Grammars:
    """Compiles off the step loop, on one thread, and keeps the last CACHE_ENTRIES grammars compiled.

    The slots of one grammar share its lexer, whose states have a limit. So a state that runs into a limit is given a newly compiled
    grammar once, before it is failed: what others have generated must not matter.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._table: TokenTable | None = None
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def start(
        self, grammar: Grammar, *, generated: list[int], stop_ids: frozenset[int], forcing: bool
    ) -> "GrammarState":
        """The state after `generated`. Compiling goes on behind it; whoever first needs the grammar calls `wait`."""
        source = Source(self, grammar)
        return GrammarState(
            source, generated, stop_ids=stop_ids, forcing=forcing, bounded_space=grammar.kind != "choices"
        )

    def compile(self, grammar: Grammar, instead_of: "Future[Compiled] | None") -> tuple["Future[Compiled]", bool]:
        """The compiled grammar, other than `instead_of`; and whether it is new, so that nobody has used it."""
        known = self._compiled.get(grammar)
        is_new = known is None or known is instead_of or (known.done() and known.exception() is not None)
        if is_new:
            known = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        assert known is not None
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > CACHE_ENTRIES:
            self._compiled.popitem(last=False)
        return known, is_new

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled:
        if self._table is None:
            self._table = token_table(self._vocabulary)
        matcher = LLMatcher(self._table.tokenizer, to_llguidance(grammar), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(describe_failure(matcher.get_error()))
        return matcher, self._table


class Source:
    """Where a state gets its grammar from, and gets it anew."""

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self._grammars, self._grammar = grammars, grammar
        self.compiled, self.is_new = grammars.compile(grammar, None)

    def renew(self) -> None:
        self.compiled, self.is_new = self._grammars.compile(self._grammar, self.compiled)


class GrammarState:
    """One slot's place in its grammar. Use it after `wait` has returned True, and ask again after each change."""

    def __init__(
        self, source: Source, generated: list[int], *, stop_ids: frozenset[int], forcing: bool, bounded_space: bool
    ) -> None:
        self.generated = list(generated)
        self.is_done = False
        self._source = source
        self._is_ready = False
        self._stop_ids, self._forcing, self._bounded_space = stop_ids, forcing, bounded_space
        self._matcher: LLMatcher
        self._table: TokenTable
        self._pending: list[int] = []
        self._space = 0  # bytes of white space at the end of what was generated

    def wait(self, timeout_s: float) -> bool:
        """Whether the grammar is compiled by then. Raises GrammarFailure if it cannot be, or if it rejects what was generated."""
        if self._is_ready:
            return True
        try:
            matcher, self._table = self._source.compiled.result(timeout_s)
        except TimeoutError:
            return False
        except GrammarError as fault:
            raise GrammarFailure(str(fault)) from fault
        replay, self.generated = self.generated, []
        self._matcher, self._is_ready, self._pending, self._space = matcher.deep_copy(), True, [], 0
        self._settle()
        for i, token_id in enumerate(replay):
            self.advance(token_id)
            if not self._is_ready:
                self.generated += replay[i + 1 :]
                return False
        return self._is_ready

    def take_forced(self) -> list[int]:
        """Tokens that are dictated here, which need no sampling; they count as generated. Empty if the slot does not force."""
        if not self._forcing:
            return []
        taken: list[int] = []
        while self._pending and len(taken) < MAX_FORCED:
            taken.append(self._pending[0])
            self.advance(taken[-1])
            if taken[-1] in self._stop_ids:
                break
        return taken

    def write_mask(self, row: NDArray[np.uint32], banned: NDArray[np.int32]) -> tuple[bool, bool]:
        """Set the bits of the tokens allowed next in `row` [words], which is zero.

        Returns whether that was possible (else the grammar is being compiled anew: `wait`), and whether nothing but tokens of
        `banned` is allowed. Raises GrammarFailure if nothing may follow.
        """
        if self._pending:
            token_id = self._pending[0]
            row[token_id >> 5] = np.uint32(1 << (token_id & 31))
        else:
            octets = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            if not self._check():
                return False, False
            row[: len(octets)] = octets[: len(row)]
            if self._bounded_space and self._space >= MAX_SPACE:
                without = row & ~self._table.space_only
                if without.any():
                    row[:] = without
        if not row.any():
            raise GrammarFailure("the grammar allows no token here")
        if not len(banned):
            return True, False
        without = row.copy()
        np.bitwise_and.at(without, banned >> 5, ~(np.uint32(1) << (banned & 31).astype(np.uint32)))
        return True, not without.any()

    def advance(self, token_id: int) -> None:
        """Take one generated token. Raises GrammarFailure if the grammar rejects it."""
        self._pending = self._pending[1:] if self._pending[:1] == [token_id] else []
        self.generated.append(token_id)
        if not self._matcher.consume_token(token_id):
            if self._check():
                raise GrammarFailure(f"the grammar does not allow token {token_id} here")
            return
        num_bytes, num_trailing = self._table.num_bytes[token_id], self._table.num_trailing[token_id]
        self._space = int(num_trailing) + (self._space if num_bytes == num_trailing else 0)
        self._settle()

    def _settle(self) -> None:
        """After a change of the matcher: is this the end, and is a run dictated?"""
        self.is_done = self._matcher.is_stopped()
        if not self._pending and not self.is_done:
            self._pending = self._matcher.compute_ff_tokens()
        self._check()

    def _check(self) -> bool:
        """Whether the matcher is well. If not, and others have used it before, a new one is on its way; else GrammarFailure."""
        if not self._matcher.is_error():
            return True
        if self._source.is_new:
            raise GrammarFailure(describe_failure(self._matcher.get_error()))
        self._source.renew()
        self._is_ready, self.is_done, self._pending = False, False, []
        return False
