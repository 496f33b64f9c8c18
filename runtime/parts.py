"""How each stage is made from a configuration: the same in one process and in three. Imports what it makes when it makes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from anabranch.runtime.config import EngineConfig, cache_dir
from anabranch.runtime.errors import ConfigError
from anabranch.runtime.laps import Laps
from anabranch.runtime.messages import Grammar, SchedulerReady, WorkerReady

if TYPE_CHECKING:
    from anabranch.runtime.faults import AnyWorker
    from anabranch.runtime.grammar_compiler import GrammarCompiler
    from anabranch.runtime.scheduler.scheduler import Scheduler
    from anabranch.runtime.tokenizer.model_text import ModelText
    from anabranch.runtime.tokenizer.service import Lane, ModelSide

log = logging.getLogger("anabranch")


def open_text(config: EngineConfig, path: Path) -> ModelText:
    """The text side of the model. Raises CheckpointError."""
    from anabranch.runtime.tokenizer.model_text import open_model_text

    text = open_model_text(path, tokenizer=config.tokenizer, chat_template=config.chat_template)
    for warning in text.warnings:
        log.warning("%s: %s", path, warning)
    return text


def build_model_side(config: EngineConfig, path: Path, text: ModelText, check_grammar: Callable[[Grammar], None] | None) -> ModelSide:
    from anabranch.runtime.tokenizer.service import ModelSide
    from anabranch.runtime.tokenizer.templates import ChatTemplate, TemplateError
    from anabranch.runtime.tokenizer.turns import TurnTexts

    turns, problem = None, ""
    if text.template is not None:
        try:
            special = text.vocabulary.special
            turns = TurnTexts(ChatTemplate(text.template, named_tokens=text.named_tokens, special=special))
        except TemplateError as fault:
            if config.chat_template is not None:  # asked for: not to be left out
                raise ConfigError(f"chat_template {config.chat_template!r}: {fault}") from None
            log.warning("%s; the model is served without chat", fault)
            problem = str(fault)
    return ModelSide(path.name, text.vocabulary, turns, check_grammar, problem)


def build_worker(config: EngineConfig, path: Path, text: ModelText, laps: Laps) -> AnyWorker:
    """Load the model. Raises CheckpointError, MemoryError, ConfigError."""
    from anabranch.runtime.faults import FaultyWorker
    from anabranch.runtime.worker.worker import Worker

    laps.lap("imports of the worker")
    settings, cache, faults = config.worker, config.cache, config.debug.faults
    worker = Worker(
        path,
        vocabulary=text.vocabulary,
        backend=settings.backend,
        precision=settings.precision,
        kv_dtype=settings.kv_dtype,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        memory_bytes=settings.memory_bytes,
        max_slots=config.scheduler.max_slots,
        num_threads=settings.num_threads,
        context_length=settings.context_length,
        cache_dir=cache_dir(),
        kept_weights_bytes=settings.kept_weights_bytes,
        poison_fresh_pages=faults is not None and faults.poison_fresh_pages,
        laps=laps,
    )
    return worker if faults is None else FaultyWorker(worker, faults)


def build_scheduler(config: EngineConfig, ready: WorkerReady) -> Scheduler:
    from anabranch.runtime.scheduler.scheduler import Scheduler

    return Scheduler(config.scheduler, ready, cache=config.cache)


def scheduler_ready(ready: WorkerReady) -> SchedulerReady:
    return SchedulerReady(
        ready.num_pages, ready.page_size, ready.vocab_size, ready.context_length, ready.num_layers, ready.kv_bytes_per_token,
        ready.start_ms,
    )


class GrammarGate:
    """Checks grammars in a child that can be killed; the child is started when the first grammar comes."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError. One thread at a time."""
        from anabranch.runtime.grammar_compiler import GrammarCompiler

        if self._compiler is None:
            self._compiler = GrammarCompiler()
        self._compiler.check(grammar)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


class Lanes:
    """Work off the loop: a daemon thread for each lane, started when it gets its first work.

    `deliver(job_id, result)` is called from the lane's thread; an exception is a result, too.
    """

    def __init__(self, deliver: Callable[[int, Any], None]) -> None:
        self._deliver = deliver
        self._queues: dict[str, SimpleQueue[tuple[int, Callable[[], Any]] | None]] = {}

    def offload(self, lane: Lane, job_id: int, work: Callable[[], Any]) -> None:
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = SimpleQueue()
            threading.Thread(target=self._run, args=(queue,), name=f"anabranch-{lane}", daemon=True).start()
        queue.put((job_id, work))

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)

    def _run(self, queue: SimpleQueue[tuple[int, Callable[[], Any]] | None]) -> None:
        while (job := queue.get()) is not None:
            job_id, work = job
            try:
                result = work()
            except BaseException as fault:
                result = fault
            self._deliver(job_id, result)
