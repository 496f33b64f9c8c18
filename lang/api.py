"""Every public name of the language. The facade re-exports them, each on first use."""

from typing import Any

from anabranch.lang.batch import Failure
from anabranch.lang.choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    likelihood,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from anabranch.lang.endpoints import Anthropic, OpenAI, RuntimeEndpoint
from anabranch.lang.errors import (
    BatchErrors,
    BranchErrors,
    Cancelled,
    ProgramError,
    StateClosed,
    TurnError,
    TypedValueError,
    UndefinedVariable,
    Unsupported,
    WouldBlock,
)
from anabranch.lang.explain import StateExplanation
from anabranch.lang.function import Function, function
from anabranch.lang.function import new_state as state
from anabranch.lang.group import Group
from anabranch.lang.pending import Owned as Pending
from anabranch.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from anabranch.lang.program import as_backend, default_backend, set_default_backend
from anabranch.lang.record import Usage
from anabranch.lang.saved import SavedState
from anabranch.lang.search import (
    Judge,
    Vote,
    beam,
    best_of_n,
    branch_solve_merge,
    debate,
    mcts,
    ranked,
    self_consistency,
    speculate,
    tree_of_thought,
)
from anabranch.lang.state import Mark, State
from anabranch.lang.trace import trace


def flush_cache(backend: Any = None) -> bool:
    """Evict every cached prefix that nobody uses."""
    chosen = default_backend() if backend is None else as_backend(backend)
    chosen.flush_cache().result()
    return True


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """The model and limits behind a backend, and its statistics of this moment under "stats"."""
    chosen = default_backend() if backend is None else as_backend(backend)
    return {**chosen.info(), "stats": chosen.stats().result()}


__all__ = [
    "Anthropic",
    "BatchErrors",
    "BranchErrors",
    "Cancelled",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "Failure",
    "Function",
    "Group",
    "Judge",
    "Mark",
    "OpenAI",
    "Pending",
    "ProgramError",
    "RuntimeEndpoint",
    "SavedState",
    "State",
    "StateClosed",
    "StateExplanation",
    "TurnError",
    "TypedValueError",
    "UndefinedVariable",
    "Unsupported",
    "Usage",
    "Vote",
    "WouldBlock",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "beam",
    "best_of_n",
    "branch_solve_merge",
    "debate",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "likelihood",
    "mcts",
    "ranked",
    "select",
    "self_consistency",
    "separate_reasoning",
    "set_default_backend",
    "speculate",
    "state",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "trace",
    "tree_of_thought",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]  # fmt: skip
