"""Settings of an engine, and the only reader of `os.environ`. A config never changes once built.

Every class checks itself when it is made. The whole travels to the processes as JSON (`to_json`, `from_json`).
What only the worker can know (pages that fit into memory, context length) arrives in its `Ready` message.

Environment: `anabranch_DEBUG` (0-5, see `DebugConfig`), `ANABRANCH_MODE`, `ANABRANCH_MODEL`, `ANABRANCH_CACHE`, `ANABRANCH_NUM_THREADS`.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from anabranch.runtime.errors import ConfigError

Mode = Literal["inprocess", "processes", "auto"]
BackendName = Literal["auto", "reference", "cpu", "flashinfer"]
KVDtype = Literal["auto", "f32", "f16", "bf16", "int16", "int8"]
Precision = Literal["fast", "exact"]


def require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


def require_int(name: str, value: object, low: int, high: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and low <= value <= high, name, value, f"an integer in {low}..{high}")  # type: ignore[operator]


def require_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and low <= value <= high, name, value, f"a number in {low:g}..{high:g}")  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Pages of KV and what is kept in them."""

    page_size: int = 16  # tokens per page
    num_pages: int | None = None  # None: what the worker finds room for
    enabled: bool = True  # False: nothing is reused (for comparing); every branch computes its own prefix
    policy: str = "lru"  # eviction order: "lru" | "cost"
    lease_share: float = 0.25  # share of the pool that leases may keep from eviction

    def __post_init__(self) -> None:
        require_int("page_size", self.page_size, 1, 1024)
        if self.num_pages is not None:
            require_int("num_pages", self.num_pages, 1, 1 << 28)
        require_number("lease_share", self.lease_share, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps."""

    max_slots: int = 32  # requests that run at once
    tokens_per_step: int = 512  # budget of one forward: decode rows first, then prefill chunks
    max_waiting: int = 65_536  # requests in the queue; more are refused as overloaded

    def __post_init__(self) -> None:
        require_int("max_slots", self.max_slots, 1, 4096)
        require_int("tokens_per_step", self.tokens_per_step, 1, 1 << 20)
        require_int("max_waiting", self.max_waiting, 1, 1 << 24)
        require(
            self.tokens_per_step >= self.max_slots, "tokens_per_step", self.tokens_per_step,
            f"at least max_slots ({self.max_slots}), so that every running request gets its token",
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The model and what computes it."""

    backend: BackendName = "auto"
    kv_dtype: KVDtype = "auto"
    precision: Precision = "fast"  # "exact": no rounding of activations, for parity tests
    num_threads: int | None = None  # None: all cores this process may use
    context_length: int | None = None  # None: the model's; may only be smaller
    memory_bytes: int | None = None  # for KV; None: a share of what is free
    kept_weights_bytes: int = 16 << 30  # disk for packed weights, which the next start maps; 0: none are kept

    def __post_init__(self) -> None:
        require(self.backend in ("auto", "reference", "cpu", "flashinfer"), "backend", self.backend,
                "auto, reference, cpu or flashinfer")  # fmt: skip
        require(self.kv_dtype in ("auto", "f32", "f16", "bf16", "int16", "int8"), "kv_dtype", self.kv_dtype,
                "auto, f32, f16, bf16, int16 or int8")  # fmt: skip
        require(self.precision in ("fast", "exact"), "precision", self.precision, "fast or exact")
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1, 1024)
        if self.context_length is not None:
            require_int("context_length", self.context_length, 1, 1 << 26)
        if self.memory_bytes is not None:
            require_int("memory_bytes", self.memory_bytes, 1 << 16, 1 << 50)
        require_int("kept_weights_bytes", self.kept_weights_bytes, 0, 1 << 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Caps of what one client may ask for: whatever multiplies work has a number here."""

    max_branches: int = 1 << 20  # open branches per client
    max_queued_ops: int = 65_536  # operations waiting on one branch
    max_text_bytes: int = 16 << 20  # text waiting on one branch
    max_message_bytes: int = 64 << 20  # one message on a socket
    max_queued_messages: int = 16_384  # per socket and direction
    max_outbox_bytes: int = 256 << 20  # results a client has not read; beyond it the client is dropped
    inline_text_bytes: int = 16 << 10  # more text than this is tokenized off the loop

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            require_int(name, getattr(self, name), 1, 1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Faults to inject; only under an explicit debug setting, never from the environment."""

    drop: tuple[str, ...] = ()  # names of message types that are lost on internal links
    drop_count: int = 0  # how many of them
    delay: tuple[str, ...] = ()  # names of message types that are held back
    delay_s: float = 0.0
    raise_at_step: int | None = None  # the worker raises inside this step
    exit_at_step: int | None = None  # the worker dies in this step, without a word
    slow_step_s: float = 0.0  # every step takes at least so long
    poison_fresh_pages: bool = False  # pages are filled with NaN when they are handed out

    def __post_init__(self) -> None:
        require_number("delay_s", self.delay_s, 0.0, 3600.0)
        require_number("slow_step_s", self.slow_step_s, 0.0, 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """`level`: 1 processes, 2 one line per step, 3 every decision with its reason, 4 check the cache each step, 5 record the inbox."""

    level: int = 0
    record_to: str | None = None  # level 5: where; None: a file in the cache directory
    faults: FaultConfig | None = None

    def __post_init__(self) -> None:
        require_int("debug level", self.level, 0, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: str = "default"  # "default", a model directory, or a .gguf file
    tokenizer: str | None = None  # None: the model's own
    chat_template: str | None = None  # a Jinja file; None: the model's own
    mode: Mode = "auto"
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    listen: bool = False  # accept other processes of this user (`Engine.connect(address)`)
    start_timeout_s: float = 600.0
    stall_timeout_s: float = 600.0  # one step longer than this is a hang, not work

    def __post_init__(self) -> None:
        require(isinstance(self.model, str) and self.model != "", "model", self.model, "a path, or 'default'")
        require(self.mode in ("inprocess", "processes", "auto"), "mode", self.mode, "inprocess, processes or auto")
        require_number("start_timeout_s", self.start_timeout_s, 0.01, 86_400.0)
        require_number("stall_timeout_s", self.stall_timeout_s, 0.01, 86_400.0)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def from_json(data: bytes) -> EngineConfig:
    """The config that `to_json` wrote. Raises `ConfigError` on anything else."""
    try:
        return msgspec.json.decode(data, type=EngineConfig)
    except msgspec.MsgspecError as fault:
        raise ConfigError(f"this is not an engine's configuration: {fault}") from fault


# ---------------------------------------------------------------- environment


def _setting(name: str) -> str | None:
    return os.environ.get(name) or None


def debug_level() -> int:
    """The level in `anabranch_DEBUG` (or `ANABRANCH_DEBUG`); 0 if unset."""
    text = _setting("anabranch_DEBUG") or _setting("ANABRANCH_DEBUG") or "0"
    if not text.isdigit() or int(text) > 5:
        raise ConfigError(f"anabranch_DEBUG must be a level in 0..5, got {text!r}")
    return int(text)


def default_mode() -> Mode:
    mode = _setting("ANABRANCH_MODE") or "auto"
    require(mode in ("inprocess", "processes", "auto"), "ANABRANCH_MODE", mode, "inprocess, processes or auto")
    return mode  # type: ignore[return-value]  # checked above


def default_model() -> str:
    return _setting("ANABRANCH_MODEL") or "default"


def default_num_threads() -> int | None:
    text = _setting("ANABRANCH_NUM_THREADS")
    if text is None:
        return None
    require(text.isdigit() and int(text) > 0, "ANABRANCH_NUM_THREADS", text, "a positive integer")
    return int(text)


def cache_dir() -> Path:
    """Where downloaded models, built kernels and repacked weights are kept."""
    own = _setting("ANABRANCH_CACHE")
    if own is not None:
        return Path(own).expanduser()
    base = _setting("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anabranch"


def runtime_dir() -> Path | None:
    """The user's directory for sockets, if the system provides one."""
    base = _setting("XDG_RUNTIME_DIR")
    return Path(base) if base and os.access(base, os.W_OK | os.X_OK) else None


def child_environment(num_threads: int | None) -> dict[str, str]:
    """The environment of a process of the engine: ours, with the debug switch, and the thread count where one is set."""
    environment = dict(os.environ)
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment
