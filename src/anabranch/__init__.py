"""Anabranch: a prefix-caching runtime for agentic LLM programs.

The language (`anabranch.lang.api`) and the engine (`anabranch.runtime.engine`) under one name. Nothing heavy is imported before it is used:
`import anabranch` brings neither torch nor sockets.
"""

from typing import Any

from anabranch.lang import api as _api
from anabranch.lang import program as _program

__version__ = "0.1.0"

_RUNTIME = {
    "Engine": "engine", "Completion": "engine", "EngineConfig": "config", "DebugConfig": "config",
    "AnabranchError": "errors", "RequestError": "errors", "InvalidRequest": "errors", "RequestTimeout": "errors",
    "EngineLost": "errors", "EngineStartError": "errors", "ConfigError": "errors",
}  # fmt: skip

__all__ = ["Runtime", "__version__", *_RUNTIME, *_api.__all__]


def Runtime(model_path: str | None = None, **options: Any) -> Any:
    """SGLang's name for an engine that the program starts itself."""
    from anabranch.runtime.engine import Engine

    return Engine(model_path, **options)


def _embedded_engine() -> Any:
    from anabranch.runtime.engine import Engine

    return Engine()


_program.default_backend_factory = _embedded_engine


def __getattr__(name: str) -> Any:
    if name in _RUNTIME:
        from importlib import import_module

        return getattr(import_module(f"anabranch.runtime.{_RUNTIME[name]}"), name)
    if name in _api.__all__:
        return getattr(_api, name)
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
