"""What the runtime raises, as one tree. Every message names the value, the limit and the way out.

```
AnabranchError
├── ConfigError          a setting is wrong                                     (also a ValueError)
├── RequestError         a request was refused or failed; carries the fields of an OpenAI error object
│   ├── InvalidRequest   the request itself is wrong, and will be wrong again   (also a ValueError)
│   ├── NotFound         it names something that does not exist
│   ├── Overloaded       no room now; try again later
│   ├── RequestTimeout   its deadline passed                                    (also a TimeoutError)
│   ├── Cancelled        somebody who may do so ended it
│   └── InternalError    our fault
└── EngineError
    ├── EngineStartError the engine did not come up; the cause is in the message
    └── EngineLost       the engine died or was closed while the operation was open
```
"""

from anabranch.runtime.messages import Error


class AnabranchError(Exception):
    """The root: everything the runtime raises on purpose."""


class ConfigError(AnabranchError, ValueError):
    """A setting is outside its range."""


class RequestError(AnabranchError):
    """A request that was refused or failed."""

    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code

    def to_wire(self) -> Error:
        return Error(type=self.type, message=self.message, param=self.param, code=self.code)


class InvalidRequest(RequestError, ValueError):
    type = "invalid_request_error"


class NotFound(RequestError):
    type = "not_found_error"


class Overloaded(RequestError):
    type = "overloaded_error"


class RequestTimeout(RequestError, TimeoutError):
    type = "timeout_error"


class Cancelled(RequestError):
    type = "cancelled"


class InternalError(RequestError):
    type = "internal_error"


class EngineError(AnabranchError):
    """The engine as a whole, not one request."""


class EngineStartError(EngineError):
    """The engine did not come up."""


class EngineLost(EngineError):
    """The engine died, or was closed, while something was waiting for it."""


_BY_TYPE: dict[str, type[RequestError]] = {
    kind.type: kind for kind in (InvalidRequest, NotFound, Overloaded, RequestTimeout, Cancelled, InternalError)
}


def from_wire(error: Error) -> AnabranchError:
    """The exception that an `Error` message stands for; a lost engine is told by its code."""
    if error.code in ("engine_lost", "engine_closed"):
        return EngineLost(error.message)
    return _BY_TYPE.get(error.type, InternalError)(error.message, param=error.param, code=error.code)


def invalid(message: str, param: str | None = None, code: str | None = None) -> Error:
    """An `invalid_request_error`, the commonest refusal."""
    return Error(type="invalid_request_error", message=message, param=param, code=code)


def internal(fault: BaseException, doing: str) -> Error:
    """Our own failure, bound to one request. The class and text of `fault`, no traceback."""
    return Error(type="internal_error", message=f"internal error while {doing}: {type(fault).__name__}: {fault}")
