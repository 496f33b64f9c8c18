"""The worker: a model, its KV pool and the slots of the running requests. `execute` carries out one plan.

A pure object: no socket, no thread of its own but the grammar compiler's. What is wrong with one row ends that row's slot with a
`RowError`; the step and its other rows go on.
"""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels import registry
from anabranch.kernels.interface import Logits
from anabranch.kernels.layout import KVSpec, SharedPrefix, StepBatch, TreeMask
from anabranch.kernels.packed_cache import WeightStore
from anabranch.runtime.laps import Laps
from anabranch.runtime.messages import Error, SlotStart, StepPlan, StepResult, WorkerReady, as_ints
from anabranch.runtime.tokenizer.vocabulary import Vocabulary
from anabranch.runtime.worker.grammar import Grammars
from anabranch.runtime.worker.loading.checkpoint import Checkpoint, open_checkpoint
from anabranch.runtime.worker.memory import choose_num_pages, kv_bytes_per_token
from anabranch.runtime.worker.models.registry import build_model
from anabranch.runtime.worker.plans import (
    Rows,
    decode_rows,
    indptr,
    prompt_tokens,
    target_tokens,
    token_positions,
    wanted_logits,
)
from anabranch.runtime.worker.results import Results, known_logprobs, sampled_logprobs
from anabranch.runtime.worker.sampling import BROKEN, Drawn, Draws, draw_tokens, rounds
from anabranch.runtime.worker.slots import Slots

Ints = NDArray[np.int32]


class Worker:
    """`model` is a path (directory or .gguf) or an opened checkpoint; `vocabulary` is what grammars need.

    kv_dtype      "auto": int16, or float32 on the reference backend
    num_pages     None: what fits into `memory_bytes`, or else room for 65,536 tokens in at most a quarter of the free memory
    context_length   None: the model's; may only be smaller
    laps          the stopwatch of the start so far
    cache_dir     where native code and packed weights are kept; None: the user's cache, and no weights
    kept_weights_bytes   disk for the packed weights of all models; 0: none are kept
    Raises        CheckpointError, MemoryError (with the sizes), ValueError, kernels.registry.BackendUnavailable
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        vocabulary: Vocabulary | None = None,
        backend: str = "auto",
        precision: str = "fast",
        kv_dtype: str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        memory_bytes: int | None = None,
        max_slots: int = 32,
        num_threads: int | None = None,
        context_length: int | None = None,
        cache_dir: Path | None = None,
        kept_weights_bytes: int = 0,
        poison_fresh_pages: bool = False,
        laps: Laps | None = None,
    ) -> None:
        self._laps = laps = laps or Laps()
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        laps.lap("headers of the weights")
        store = None
        # Exact weights are float32, eight times the file, and for comparing.
        if cache_dir is not None and kept_weights_bytes and checkpoint.source is not None and precision == "fast":
            store = WeightStore(cache_dir / "weights", checkpoint.source, kept_weights_bytes)
        self._backend = registry.backend(
            backend, precision=precision, num_threads=num_threads, cache_dir=cache_dir and cache_dir / "native", store=store
        )
        laps.lap("backend")
        self._model, report = build_model(checkpoint, self._backend)
        self._report = str(report)
        config = self._model.config
        self.context_length = _shorter(config.context_length, context_length)
        dtype = kv_dtype if kv_dtype != "auto" else ("f32" if self._backend.name == "reference" else "int16")
        shape = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        self.kv_bytes_per_token = kv_bytes_per_token(**shape, dtype=dtype)
        pages = choose_num_pages(
            page_size * self.kv_bytes_per_token, page_size, num_pages=num_pages, budget_bytes=memory_bytes
        )
        self._kv = self._backend.kv_pool(KVSpec(num_pages=pages, page_size=page_size, dtype=dtype, **shape))
        laps.lap("model and KV pool")
        self._forward = self._backend.compile(self._model.forward, self._kv)
        laps.lap("weights packed, or mapped")
        self._poison_fresh_pages = poison_fresh_pages
        self._grammars = None if vocabulary is None else Grammars(vocabulary)
        self._vocab_size = config.vocab_size
        self._vocab_limit = 0 if vocabulary is None else vocabulary.num_tokens
        self._slots = Slots(max_slots)
        laps.lap("grammars and slots")

    def ready(self) -> WorkerReady:
        spec = self._kv.spec
        return WorkerReady(
            num_pages=spec.num_pages,
            page_size=spec.page_size,
            max_slots=self._slots.max_slots,
            vocab_size=self._vocab_size,
            context_length=self.context_length,
            load_report=self._report,
            num_layers=spec.num_layers,
            kv_bytes_per_token=self.kv_bytes_per_token,
            shares_logits=True,
            start_ms=tuple(self._laps.laps),
        )

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def execute(self, plan: StepPlan) -> StepResult:
        """Slots, page copies, one forward, draws. An exception means that the worker itself is broken."""
        results = Results(plan.step_id)
        for slot in plan.ends:
            self._slots.end(slot)
        for start in plan.starts:
            self._start_slot(start, results)
        self._prepare_pages(plan)
        rows = decode_rows(plan)
        if not len(rows):
            return results.message(0.0)
        started = time.perf_counter()
        batch = self._step_batch(plan, rows)
        logits = self._forward(batch)
        forward_us = (time.perf_counter() - started) * 1e6
        if plan.trees:
            self._score(plan, rows, batch, logits, results)
        if rows.prompt_logprobs.any():
            self._prompt_logprobs(rows, batch, logits, results)
        if len(rows.samples.slots):
            self._sample(rows, batch, logits, results)
        return results.message(forward_us)

    # ------------------------------------------------------------ before the forward

    def _start_slot(self, start: SlotStart, results: Results) -> None:
        params = start.params
        if params.grammar is None or self._grammars is None:
            self._slots.start(start, None)
            if params.grammar is not None:
                problem = "grammars are not enabled: this worker was started without a vocabulary"
                self._fail(start.slot, Error("invalid_request_error", problem), results)
            return
        grammar = self._grammars.start(
            params.grammar,
            generated=as_ints(start.generated).tolist(),
            stop_ids=frozenset(params.stop_token_ids),
            forcing=params.num_top_logprobs is None,
        )
        self._slots.start(start, grammar)

    def _prepare_pages(self, plan: StepPlan) -> None:
        if self._poison_fresh_pages and plan.fresh_pages:
            self._kv.poison_pages(as_ints(plan.fresh_pages))
        if not plan.copy_src:
            return
        src, dst = as_ints(plan.copy_src), as_ints(plan.copy_dst)
        if np.isin(dst, src).any():  # a page is copied on: one after the other
            for i in range(len(src)):
                self._kv.copy_pages(src[i : i + 1], dst[i : i + 1])
        else:
            self._kv.copy_pages(src, dst)

    def _step_batch(self, plan: StepPlan, rows: Rows) -> StepBatch:
        self._slots.extend_pages(
            as_ints(plan.slots), as_ints(plan.page_keep), as_ints(plan.page_counts), as_ints(plan.page_ids)
        )
        page_size = self._kv.spec.page_size
        kv_lens = rows.first_pos + rows.num_new
        num_pages = (kv_lens + (page_size - 1)) // page_size
        return StepBatch(
            token_ids=self._token_ids(plan, rows),
            positions=token_positions(rows, plan.trees),
            q_indptr=rows.q_indptr,
            kv_lens=kv_lens,
            page_indptr=indptr(num_pages),
            page_ids=self._slots.page_tables(rows.slots, num_pages),
            logit_rows=wanted_logits(rows, plan.trees),
            trees=tuple(TreeMask(rows.index(tree.row), as_ints(tree.parents)) for tree in plan.trees if tree.parents),
            groups=tuple(
                SharedPrefix(rows.index(g.first_row), rows.index(g.last_row), g.num_tokens) for g in plan.groups
            ),
        )

    def _token_ids(self, plan: StepPlan, rows: Rows) -> Ints:
        """The plan's ids, filled in with those that only the slots know."""
        if not rows.feedback.any():
            return as_ints(plan.token_ids)
        known = self._slots.known_tokens(rows.slots[rows.feedback], rows.first_pos[rows.feedback])
        if rows.feedback.all():
            return known
        is_fed = np.zeros(rows.q_indptr[-1], np.bool_)
        is_fed[rows.last_tokens[rows.feedback]] = True
        token_ids = np.empty(len(is_fed), np.int32)
        token_ids[is_fed] = known
        token_ids[~is_fed] = as_ints(plan.token_ids)
        return token_ids

    # ------------------------------------------------------------ after the forward

    def _sample(self, rows: Rows, batch: StepBatch, logits: Logits, results: Results) -> None:
        samples = rows.samples
        places = np.searchsorted(batch.logit_rows, samples.tokens).astype(np.int32)
        draws = Draws(samples.slots, places, samples.positions)
        if self._slots.failures:
            draws = draws.where(~np.isin(samples.slots, list(self._slots.failures)))
            self._repeat_failures(samples.slots, results)
        for part in rounds(draws):
            drawn = draw_tokens(
                self._slots, self._backend, logits, part,
                num_rows=len(batch.logit_rows), vocab_size=self._vocab_size, vocab_limit=self._vocab_limit,
            )  # fmt: skip
            for slot, error in drawn.failures.items():
                self._fail(slot, error, results)
            results.add(drawn.slots, drawn.counts, drawn.token_ids, self._slots.grammar_done(drawn.slots))
            self._sampled_logprobs(drawn, results)

    def _sampled_logprobs(self, drawn: Drawn, results: Results) -> None:
        asked = self._slots.num_top_logprobs[drawn.slots] >= 0
        if drawn.sampled is None or not asked.any():
            return
        starts = indptr(drawn.counts)
        for i in np.flatnonzero(asked & (drawn.logit_rows >= 0)).tolist():
            token_id, row = int(drawn.token_ids[starts[i]]), int(drawn.logit_rows[i])
            results.logprobs.append(sampled_logprobs(int(drawn.slots[i]), token_id, row, drawn.sampled))

    def _prompt_logprobs(self, rows: Rows, batch: StepBatch, logits: Logits, results: Results) -> None:
        for row in np.flatnonzero(rows.prompt_logprobs).tolist():
            slot, tokens = int(rows.slots[row]), prompt_tokens(rows, row)
            if not len(tokens):
                continue
            following = batch.token_ids[rows.q_indptr[row] + 1 : rows.q_indptr[row + 1]]
            if rows.next_ids[row] >= 0:
                following = np.append(following, rows.next_ids[row])
            places = np.searchsorted(batch.logit_rows, tokens).astype(np.int32)
            logprobs, _ = self._backend.logprobs_of(logits, places, following)
            if not np.isfinite(logprobs).all():
                self._fail(slot, BROKEN, results)
                continue
            k = int(self._slots.num_top_logprobs[slot])
            tops = self._backend.top_logprobs(logits, places, k) if k > 0 else None
            results.prompt_logprobs.append(known_logprobs(slot, following, logprobs, tops))

    def _score(self, plan: StepPlan, rows: Rows, batch: StepBatch, logits: Logits, results: Results) -> None:
        for tree in plan.trees:
            places = np.searchsorted(batch.logit_rows, target_tokens(rows, tree)).astype(np.int32)
            logprobs, is_greedy = self._backend.logprobs_of(logits, places, as_ints(tree.target_token_ids))
            if not np.isfinite(logprobs).all():
                self._fail(int(rows.slots[rows.index(tree.row)]), BROKEN, results)
            results.score_logprobs.append(np.asarray(logprobs, "<f4").tobytes())
            results.score_is_greedy.append(np.asarray(is_greedy, np.uint8).tobytes())

    # ------------------------------------------------------------ errors

    def _fail(self, slot: int, error: Error, results: Results) -> None:
        """The slot's request ends with this error; later rows that were planned before that was known report it again."""
        self._slots.failures[slot] = results.fail(slot, error)

    def _repeat_failures(self, slots: Ints, results: Results) -> None:
        for slot in slots.tolist():
            if slot in self._slots.failures:
                results.fail(slot, self._slots.failures[slot].error)


def _shorter(trained: int, wanted: int | None) -> int:
    if wanted is not None and not 1 <= wanted <= trained:
        raise ValueError(f"context_length must be in 1..{trained}, the model's, got {wanted}")
    return wanted or trained
