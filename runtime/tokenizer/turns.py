"""A chat written turn by turn, for programs that fork and generate: what the template writes between the contents.

A template renders whole conversations. We render it over contents that are unique marks, and read off the literal text
between them. What follows a turn can depend on what comes next, so closing a turn writes only what every continuation
begins with, and opening the next one writes the rest.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.templates import ChatTemplate, TemplateError, unmarked

_GENERATED = "assistant"
_FOLLOWERS = ("user", _GENERATED)


class TurnTexts:
    """The literal texts of one template, worked out once per sequence of roles. Thread-safe; shared by all branches."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.bos = template.named_tokens.get("bos_token", "")
        self.literal = lru_cache(maxsize=4096)(self._literal)
        self.closing = lru_cache(maxsize=4096)(self._closing)

    def _literal(self, roles: tuple[str, ...]) -> str:
        """What stands between the contents of the last two turns, or before the first. Raises TemplateError."""
        if roles[-1] == _GENERATED and len(roles) > 1:
            return self._after(roles[:-1], generation=True)
        fault: TemplateError | None = None
        for more in ((), *((role,) for role in _FOLLOWERS)):  # a system turn may need a user's after it
            try:
                literal = self._between(roles, more)
            except TemplateError as error:
                fault = fault or error
                continue
            if literal is not None:
                return literal
        raise fault or self._hidden(roles[-1])

    def _closing(self, roles: tuple[str, ...]) -> str:
        """What certainly follows the content of the last turn, whatever comes next."""
        ways: list[Callable[[], str | None]] = [
            partial(self._after, roles, generation=False),
            partial(self._after, roles, generation=True),
            *(partial(self._between, (*roles, role), ()) for role in _FOLLOWERS),
        ]
        known = []
        for way in ways:
            with suppress(TemplateError):
                known.append(way())
        texts = [text for text in known if text is not None]
        return self._whole_tokens(_common_prefix(texts), texts) if texts else ""

    def _after(self, roles: tuple[str, ...], *, generation: bool) -> str:
        """What the template writes after the content of the last turn."""
        text = self._render(roles, generation=generation)
        begin = self._end_of(text, len(roles) - 1)
        if begin < 0:
            raise self._hidden(roles[-1])
        return text[begin:]

    def _between(self, roles: tuple[str, ...], more: tuple[str, ...]) -> str | None:
        """What stands before the content of the last role, back to the content before, if `more` roles follow."""
        text = self._render((*roles, *more), generation=False)
        last = len(roles) - 1
        begin = self._end_of(text, last - 1) if last else 0
        end = text.find(_content(last), begin) if begin >= 0 else -1
        return text[begin:end] if end >= 0 else None

    def _hidden(self, role: str) -> TemplateError:
        return TemplateError(f"the chat template does not show the content of a {role!r} turn here")

    def _end_of(self, text: str, turn: int) -> int:
        at = text.rfind(_content(turn))
        return at + len(_content(turn)) if at >= 0 else -1

    def _render(self, roles: Sequence[str], *, generation: bool) -> str:
        messages = [{"role": role, "content": _content(i)} for i, role in enumerate(roles)]
        return unmarked(self._template.render(messages, add_generation_prompt=generation))

    def _whole_tokens(self, prefix: str, texts: Iterable[str]) -> str:
        """The prefix, shortened so that it does not end inside a special token of any of the texts."""
        cut = len(prefix)
        for text in texts:
            for name in self._template.special:
                at = text.find(name, max(cut - len(name) + 1, 0))
                if 0 <= at < cut < at + len(name):
                    cut = at
        return prefix[:cut]


def _common_prefix(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    length = next((i for i, pair in enumerate(zip(first, last)) if pair[0] != pair[1]), min(len(first), len(last)))
    return first[:length]


def _content(turn: int) -> str:
    """A content that no template trims, parses or has of its own."""
    return f"\ufdd1{turn}\ufdd2"


class ChatTurns:
    """One branch's place in its conversation. `copy` before a fork or a mark; texts are control text.

    The texts of `begin` and `end` with the contents between them are the template's rendering of the whole
    conversation, as long as the template shows contents as they are. An assistant's turn begins with the generation
    prompt.
    """

    def __init__(self, texts: TurnTexts) -> None:
        self._texts = texts
        self._roles: tuple[str, ...] = ()
        self._open = False
        self._closed_with = ""  # text written since the last content

    @property
    def open_role(self) -> str | None:
        return self._roles[-1] if self._open else None

    @property
    def roles(self) -> tuple[str, ...]:
        return self._roles

    def copy(self) -> "ChatTurns":
        other = ChatTurns(self._texts)
        other._roles, other._open, other._closed_with = self._roles, self._open, self._closed_with
        return other

    def begin(self, role: str, *, at_start: bool = True) -> str:
        """The text that opens a turn. Raises TemplateError with the template's words if that turn may not come here.

        `at_start` False: the branch holds tokens already, so the first turn brings no second BOS.
        """
        if self._open:
            raise InvalidRequest(f"a {self._roles[-1]!r} turn is still open; end it before beginning one of {role!r}")
        roles = (*self._roles, role)
        literal = self._texts.literal(roles)
        text = literal[len(_common_prefix([literal, self._closed_with])) :]
        if len(roles) == 1 and not at_start:
            text = text.removeprefix(self._texts.bos)
        self._roles, self._open, self._closed_with = roles, True, ""
        return text

    def end(self) -> str:
        """The text that closes the open turn."""
        if not self._open:
            raise InvalidRequest("no turn is open; begin one before ending it")
        self._open = False
        self._closed_with = self._texts.closing(self._roles)
        return self._closed_with
