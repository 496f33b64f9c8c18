"""Chat templates: the one place in the product where a template runs, and where its text and the user's are told apart.

A template's literal text may hold control tokens, the user's may not. Before rendering, each special token that is
spelled in the user's strings gets a mark inside, a Unicode noncharacter; whatever the template does with the string,
the token stays broken. The mark is where the rendered text is later cut into parts (`Part`), and is gone from them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.chat_messages import Messages, normalize_messages, plain_data
from anabranch.runtime.tokenizer.sandbox import BudgetExceeded, Program, TemplateRefusal
from anabranch.runtime.tokenizer.vocabulary import Part, Vocabulary

MARK = "\ufdd0"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")


class TemplateError(InvalidRequest):
    """The template refused the conversation, or failed on it. Carries its words."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages", code="chat_template_error")


class ChatTemplate:
    """A model's chat template. `named_tokens` are the special tokens it may ask for by name, e.g. bos_token."""

    def __init__(self, source: str, *, named_tokens: Mapping[str, str], special: Iterable[str] = ()) -> None:
        self.source = source
        self.named_tokens = dict(named_tokens)
        self.special = tuple(special)
        self._breaker = Breaker(self.special)
        try:
            self._program = Program(source)
        except jinja2.TemplateError as fault:
            raise TemplateError(f"the model's chat template cannot be used: {_words(fault)}") from None

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as marked text: give it to `parts`, or compare it with other marked text.

        `variables` are further names that the template knows (e.g. enable_thinking).
        Raises TemplateError with the template's own words, InvalidRequest for messages that are none.
        """
        given = {
            "messages": normalize_messages(messages, template=self.source),
            "tools": plain_data(tools, "tools") if tools else None,
            "documents": plain_data(documents, "documents") if documents else None,
        }
        more = plain_data(dict(variables or {}), "chat_template_kwargs")
        reserved = next((name for name in more if name in _RESERVED or name in self.named_tokens), None)
        if reserved is not None:
            raise InvalidRequest(f"chat_template_kwargs may not set {reserved!r}", param="chat_template_kwargs")
        return self._run(self._breaker.in_data(more | given) | {"add_generation_prompt": add_generation_prompt})

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return self._program.run(self.named_tokens | variables)
        except TemplateRefusal as fault:
            raise TemplateError(f"the chat template refuses this conversation: {_words(fault)}") from None
        except BudgetExceeded as fault:
            raise TemplateError(f"the chat template was stopped: {_words(fault)}") from None
        except jinja2.TemplateError as fault:
            raise TemplateError(f"the chat template failed on this conversation: {_words(fault)}") from None
        except Exception as fault:  # TypeError, KeyError ...: whatever the template's own code does wrong
            raise TemplateError(
                f"the chat template failed on this conversation: {type(fault).__name__}: {_words(fault)}"
            ) from None

    def mark(self, text: str) -> str:
        """Plain text as it appears in marked text: for continuing a rendered prompt with what was generated."""
        return self._breaker.in_text(text)


def parts(marked: str) -> list[Part]:
    """Marked text as parts to encode. No special token spans two parts."""
    return [Part(text, control=True) for text in marked.split(MARK)]


def unmarked(marked: str) -> str:
    """Marked text as people read it."""
    return marked.replace(MARK, "")


def encode_chat(
    vocabulary: Vocabulary, template: ChatTemplate, messages: Messages, *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation: as the template has it, no BOS of our own; user text never is a control token."""
    marked = template.render(messages, add_generation_prompt=add_generation_prompt)
    return vocabulary.encode(parts(marked), at_start=True)


def no_template_error(problem: str = "") -> TemplateError:
    """`problem`: what is wrong with the template that the model has."""
    return TemplateError(
        f"{problem or 'the model has no chat template'}; give one (a Jinja file) as Engine(chat_template=FILE) or --chat-template FILE, "
        "put chat_template.jinja into the model's directory, or use plain prompts (text without roles)"
    )


class Breaker:
    """Breaks special tokens in strings that are not the template's."""

    def __init__(self, special: Iterable[str]) -> None:
        names = sorted({name for name in special if len(name) > 1}, key=len, reverse=True)
        # Also the beginning of a special token at the end of a string, which other text could complete.
        starts = {name[:n] for name in names for n in range(1, len(name))}
        ends = "|".join(re.escape(start) for start in sorted(starts, key=len, reverse=True))
        whole = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names)
        self._whole = re.compile(whole) if names else None
        self._end = re.compile(f"(?:{ends})\\Z") if names else None
        self._longest = max(map(len, names), default=0)

    def in_text(self, text: str) -> str:
        """The text with the mark after the first character of each special token in it. Linear time."""
        if MARK in text:
            raise InvalidRequest("the text holds U+FDD0, a noncharacter that is not allowed in text")
        if self._whole is None or self._end is None:
            return text
        text = self._whole.sub(lambda found: found[0] + MARK, text)
        tail = text[-self._longest :]
        return text + MARK if self._end.search(tail) else text

    def in_data(self, value: Any) -> Any:
        """The same in each string of nested data."""
        if isinstance(value, str):
            return self.in_text(value)
        if isinstance(value, list):
            return [self.in_data(item) for item in value]
        if isinstance(value, dict):
            return {self.in_text(key): self.in_data(item) for key, item in value.items()}
        return value


def _words(fault: BaseException) -> str:
    return str(fault)[:500] or type(fault).__name__
