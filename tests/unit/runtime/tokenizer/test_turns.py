"""A chat written turn by turn is the template's rendering of the whole."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import CHATML, INST

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.templates import ChatTemplate, TemplateError, unmarked
from anabranch.runtime.tokenizer.turns import ChatTurns, TurnTexts

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

DEFAULT_SYSTEM = (  # a system prompt of its own, unless one is given
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_INSIDE = (  # the system prompt goes into the first user turn; roles must alternate
    "{% if messages[0].role == 'system' %}{% set sys = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% if not rest %}{{ raise_exception('a user turn must follow') }}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ sys if loop.first }}{{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CLOSES_LATE = (  # what ends a turn is written before the next one
    "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
)
LAST_IS_SPECIAL = (  # marks the last message, and the end
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% if loop.last %}</s>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = (  # looks into earlier assistant turns, as reasoning models' templates do
    "{{ bos_token }}{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] | trim %}{% endif %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "system inside": SYSTEM_INSIDE,
    "closes late": CLOSES_LATE,
    "drops reasoning": DROPS_REASONING,
}


def chat(source: str) -> ChatTemplate:
    return ChatTemplate(source, named_tokens={"bos_token": "<s>", "eos_token": "</s>"}, special=SPECIAL)


TURNS = {name: TurnTexts(chat(source)) for name, source in TEMPLATES.items()}


def write(turns: ChatTurns, messages: list[dict[str, Any]]) -> str:
    """The conversation, turn by turn."""
    return "".join(turns.begin(m["role"]) + m["content"] + turns.end() for m in messages)


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    system=st.booleans(),
    texts=st.lists(st.text("ab c.", min_size=1, max_size=8), min_size=1, max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_openers_contents_and_closers_join_to_the_whole_rendering(name: str, system: bool, texts: list[str]) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    turns = ChatTurns(TURNS[name])
    whole = unmarked(chat(TEMPLATES[name]).render(messages, add_generation_prompt=False))
    text = write(turns, messages)
    assert whole.startswith(text) or text == whole
    if name != "closes late":
        assert text == whole
    if messages[-1]["role"] == "user":
        prompt = unmarked(chat(TEMPLATES[name]).render(messages, add_generation_prompt=True))
        assert text + turns.begin("assistant") == prompt, "an assistant's turn begins with the generation prompt"


def test_a_closer_that_depends_on_what_follows_is_written_when_it_is_known() -> None:
    turns = ChatTurns(TURNS["closes late"])
    assert (turns.begin("user"), turns.end()) == ("<|im_start|>user\n", "")
    assert turns.begin("assistant") == "<|im_end|>\n<|im_start|>assistant\n"
    turns = ChatTurns(TurnTexts(chat(LAST_IS_SPECIAL)))
    assert (turns.begin("user"), turns.end()) == ("<|im_start|>user\n", "<|im_end|>")
    other = turns.copy()
    assert turns.begin("assistant") == "</s><|im_start|>assistant\n", "as in the template's own generation prompt"
    assert other.begin("user") == "<|im_start|>user\n"


def test_a_closer_never_ends_inside_a_special_token() -> None:
    source = "{% for m in messages %}{{ m.content }}<|im_{{ 'end' if loop.last else 'start' }}|>{% endfor %}"
    turns = ChatTurns(TurnTexts(chat(source)))
    turns.begin("user")
    assert turns.end() == ""
    assert turns.begin("user") == "<|im_start|>"


def test_a_system_turn_inside_the_user_s_is_opened_and_closed_where_the_template_has_it() -> None:
    turns = ChatTurns(TURNS["system inside"])
    assert (turns.begin("system"), turns.end()) == ("<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n")
    assert (turns.begin("user"), turns.end()) == ("", " [/INST]")
    assert (turns.begin("assistant"), turns.end()) == ("", "</s>")
    assert turns.begin("user") == "<s>[INST] "


def test_a_template_that_refuses_a_turn_does_so_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match="System role not supported"):
        ChatTurns(TurnTexts(chat(INST))).begin("system")
    turns = ChatTurns(TURNS["system inside"])
    turns.begin("user")
    turns.end()
    with pytest.raises(TemplateError, match="must alternate"):
        turns.begin("user")
    assert turns.begin("assistant") == "", "the refused turn left no trace"


def test_an_assistant_may_speak_first() -> None:
    assert ChatTurns(TURNS["chatml"]).begin("assistant") == "<|im_start|>assistant\n"


def test_a_chat_that_begins_inside_a_branch_brings_no_second_beginning_of_sequence() -> None:
    assert ChatTurns(TURNS["drops reasoning"]).begin("user").startswith("<s>")
    assert ChatTurns(TURNS["drops reasoning"]).begin("user", at_start=False) == "<|im_start|>user\n"


def test_turns_must_be_opened_and_closed_in_turn() -> None:
    turns = ChatTurns(TURNS["chatml"])
    with pytest.raises(InvalidRequest, match="no turn is open"):
        turns.end()
    turns.begin("user")
    assert turns.open_role == "user"
    with pytest.raises(InvalidRequest, match="'user' turn is still open"):
        turns.begin("assistant")


def test_a_copy_goes_its_own_way() -> None:
    turns = ChatTurns(TURNS["chatml"])
    turns.begin("user")
    other = turns.copy()
    other.end()
    other.begin("assistant")
    assert (turns.open_role, other.open_role) == ("user", "assistant")
    assert turns.roles == ("user",)


def test_a_content_that_the_template_hides_is_an_error_not_a_guess() -> None:
    turns = ChatTurns(TurnTexts(chat("{% for m in messages if m.role != 'tool' %}{{ m.content }}|{% endfor %}")))
    with pytest.raises(TemplateError, match="'tool'"):
        turns.begin("tool")


def test_the_template_runs_once_for_branches_in_the_same_place() -> None:
    template = chat(CHATML)
    calls = []
    render = template.render
    template.render = lambda *a, **k: (calls.append(1), render(*a, **k))[1]  # type: ignore[method-assign]
    texts = TurnTexts(template)
    first = ChatTurns(texts)
    first.begin("user"), first.end()
    seen = len(calls)
    for _ in range(100):
        other = ChatTurns(texts)
        other.begin("user"), other.end()
    assert len(calls) == seen
