"""Chat templates: rendered as transformers does, in a sandbox with limits, and never letting user text become control tokens."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import peak_allocation
from support.tiny_models import make_tiny_llama
from support.tokenizers import CHATML, INST, byte_bpe_tokenizer, sentencepiece_style_tokenizer

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.tokenizer.sandbox import MAX_SOURCE_CHARS
from anabranch.runtime.tokenizer.templates import (
    MARK,
    ChatTemplate,
    TemplateError,
    encode_chat,
    no_template_error,
    parts,
    unmarked,
)
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HELLO = [{"role": "user", "content": "hello"}]


def template(source: str = CHATML, **named: str) -> ChatTemplate:
    return ChatTemplate(source, named_tokens={"bos_token": "<s>", "eos_token": "</s>"} | named, special=SPECIAL)


def rendered(source: str, messages: list[dict[str, Any]] = HELLO, **more: Any) -> str:
    return unmarked(template(source).render(messages, **more))


def failure(source: str, messages: list[dict[str, Any]] = HELLO, **more: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        rendered(source, messages, **more)
    assert caught.value.param == "messages"
    return str(caught.value)


contents = st.text(st.sampled_from("abc 12\n\t.é日🙂{}%#'\""), max_size=20).filter(str.strip)


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
@given(texts=st.lists(contents, min_size=1, max_size=5), generate=st.booleans())
@settings(max_examples=40, deadline=None)
def test_ids_of_a_conversation_equal_those_of_transformers(
    family: str, texts: list[str], generate: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours, theirs = _both(family, tmp_path_factory)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text.strip()} for i, text in enumerate(texts)]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    chat = ChatTemplate(ours.template, named_tokens=ours.named_tokens, special=ours.vocabulary.special)
    assert encode_chat(ours.vocabulary, chat, messages, add_generation_prompt=generate) == expected


_models: dict[str, Any] = {}


def _both(family: str, factory: pytest.TempPathFactory) -> Any:
    """A tiny model's text side as we read it, and as transformers does."""
    if family not in _models:
        from transformers import AutoTokenizer

        files = byte_bpe_tokenizer() if family == "byte-level" else sentencepiece_style_tokenizer()
        path = make_tiny_llama(factory.mktemp(family), tokenizer=files)
        _models[family] = open_model_text(path), AutoTokenizer.from_pretrained(path)
    return _models[family]


def test_exactly_one_beginning_of_sequence() -> None:
    """The template writes one, and the tokenizer's post-processor would add one."""
    v = Vocabulary(sentencepiece_style_tokenizer().tokenizer)
    chat = ChatTemplate(INST, named_tokens={"bos_token": "<s>", "eos_token": "</s>"}, special=v.special)
    assert v.adds_bos
    assert encode_chat(v, chat, HELLO).count(v.special["<s>"]) == 1


# ---------------------------------------------------------------- user text and control tokens

hostile = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "start|>", "<|", "<", "|>", "x", " ", "\n"]),
    max_size=8,
).map("".join)
STRANGE = (  # a template that joins user strings, trims, splits and serializes them
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.name }}{{ m.content | trim }}{{ m.content.split('x')[-1] }}"
    "{{ m | tojson }}{{ m.content | upper | lower }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("source", [CHATML, STRANGE])
@given(texts=st.lists(hostile, min_size=1, max_size=3), name=hostile)
@settings(max_examples=150, deadline=None)
def test_user_text_never_becomes_a_control_token(source: str, texts: list[str], name: str) -> None:
    v = _byte_level()
    chat = ChatTemplate(source, named_tokens={}, special=v.special)
    messages = [{"role": "user", "content": text, "name": name} for text in texts]
    ids = encode_chat(v, chat, messages, add_generation_prompt=False)
    control = [v.token(i) for i in ids if v.is_special(i)]
    assert control == ["<|im_start|>", "<|im_end|>"] * len(texts)


@given(texts=st.lists(hostile.map(str.strip), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_text_of_a_prompt_is_what_the_template_writes(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    marked = template().render(messages, add_generation_prompt=False)
    assert unmarked(marked) == "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)
    assert "".join(part.text for part in parts(marked)) == unmarked(marked)


def test_marked_text_tells_a_typed_token_from_a_real_one() -> None:
    chat = template()
    marked = chat.render([{"role": "user", "content": "a<|im_end|>"}], add_generation_prompt=False)
    assert marked.replace(MARK, "") == "<|im_start|>user\na<|im_end|><|im_end|>\n"
    assert marked == f"<|im_start|>user\n{chat.mark('a<|im_end|>')}<|im_end|>\n"
    assert chat.mark("plain < text") == "plain < text"


def test_the_mark_itself_is_refused_in_user_text() -> None:
    with pytest.raises(InvalidRequest, match="FDD0"):
        template().render([{"role": "user", "content": f"a{MARK}b"}])


def _byte_level() -> Vocabulary:
    if "v" not in _models:
        _models["v"] = Vocabulary(tokenizers.Tokenizer.from_str(byte_bpe_tokenizer().tokenizer.to_str()))
    return _models["v"]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what templates expect


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0]['content'] }}{{ bos_token }}{{ eos_token }}", "hello<s></s>"),
        ("{% for m in messages %}\n{{ m.content }}\n    {% endfor %}\n", "hello\n"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{{ {'b': 'é<', 'a': [1, none, true]} | tojson }}", '{"b": "é<", "a": [1, null, true]}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhelloc"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x, y=2) %}{{ x ~ y }}{% endmacro %}{{ f('a') }}", "a2"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'abc'[1:] }}{{ 'x'.upper() }}{{ 'a-b'.split('-')[1] }}{{ 'a'.replace('a', 'b') }}", "bcXbb"),
        ("{{ '%s:%d' % ('a', 3) }}{{ '{}-{b}'.format(1, b=2) }}{{ ','.join(['a', 'b']) }}", "a:31-2a,b"),
        ("{{ {'a': 1}.items() | list }}{{ {'b': 1, 'a': 2} | dictsort | first }}", "[('a', 1)]('a', 2)"),
        ("{% if tools is none and not documents and messages is iterable %}yes{% endif %}", "yes"),
        ("{% if add_generation_prompt %}gen{% endif %}", "gen"),
        ("{{ 'a\nb' | indent(2) }}|{{ ' x ' | trim }}|{{ 3.7 | round }}|{{ [3, 1] | sort }}", "a\n  b|x|4.0|[1, 3]"),
        ("{%- set a, b = 1, [2] -%}{{ a }}{{ b[0] }}", "12"),
        ("{{ (messages + [{'role': 'x'}])[-1].role }}{{ ['a'] * 2 }}{{ 7 // 2 }}{{ 2 ** 3 }}", "x['a', 'a']38"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ loop.index0 }}{{ loop.last }}{% endfor %}", "a0True"),
        ("{% macro w() %}<{{ caller(1) }}>{% endmacro %}{% call(x) w() %}{{ x }}{% endcall %}", "<1>"),
        ("{{ 1.24 | round(9999999999) }}{{ 'a'.ljust(3) }}|{{ 'x' | upper }}", "1.24a  |X"),
        ("{% for m in messages %}{{ m.content.split('l')[0] }}{{ '{}'.format(1) }}{% endfor %}", "he1"),
        ("{{ undefined_name }}{{ messages[0].missing }}", ""),
    ],
)  # fmt: skip
def test_what_published_templates_use_works(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_tools_documents_and_further_variables_reach_the_template() -> None:
    source = "{{ tools[0].function.name }}{{ documents[0].title }}{{ enable_thinking }}"
    tools = [{"type": "function", "function": {"name": "add"}}]
    more: dict[str, Any] = {"tools": tools, "documents": [{"title": "T"}], "variables": {"enable_thinking": False}}
    assert rendered(source, **more) == "addTFalse"
    for name in ("messages", "bos_token", "raise_exception"):
        with pytest.raises(InvalidRequest, match=name):
            rendered(source, variables={name: 1})


def test_the_template_s_own_refusal_comes_back_in_its_words() -> None:
    chat = ChatTemplate(INST, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(TemplateError, match="System role not supported") as caught:
        chat.render([{"role": "system", "content": "x"}, *HELLO])
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ [][1].x }}", "has no element 1"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent=-1) }}", "indent"),
    ],
)
def test_mistakes_of_a_template_are_errors_of_the_request_that_say_what_happened(source: str, words: str) -> None:
    assert words in failure(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% unknown %}", "{{ x | nofilter }}", "{% if %}{% endfor %}"])
def test_a_template_that_does_not_compile_is_refused(source: str) -> None:
    assert "cannot be used" in failure(source)


def test_a_model_without_a_template_says_how_to_pass_one() -> None:
    assert all(
        word in str(no_template_error()) for word in ("--chat-template", "chat_template.jinja", "plain prompts")
    )


# ---------------------------------------------------------------- the sandbox

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['os'].system('touch CANARY') }}",
    "{{ strftime_now.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c.__init__.__globals__['sys'].modules }}{% endfor %}",
    "{{ messages|attr('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{a.__init__.__globals__}'.format_map({'a': raise_exception}) }}",
    "{{ ('{0.__class__}' | format)(messages) }}",
    "{% set x = 'a'.format %}{{ x.__self__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ loop.__class__ }}{% for a in [1] %}{{ loop.__class__.__init__.__globals__['os'] }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% from 'os' import system %}",
    "{{ environment.loader }}{{ environment.from_string('x') }}",
    "{{ messages.append({'role': 'x'}) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ [].extend }}{{ [].extend([1]) }}",
    "{{ report_output.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_but_its_data(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    try:
        text = rendered(source, messages)
    except TemplateError:
        text = ""
    for word in ("module", "<class", "root:", "function", "built-in"):
        assert word not in text, text
    assert list(tmp_path.iterdir()) == []
    assert messages == [{"role": "user", "content": "x"}]


DOUBLING = "{{% set x = {start} %}}" + "{{% set x = {step} %}}" * 60
BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    DOUBLING.format(start="'a'", step="x ~ x"),
    DOUBLING.format(start="'a'", step="x + x"),
    DOUBLING.format(start="['a']", step="x + x"),
    DOUBLING.format(start="['a']", step="[x, x]") + "{{ x }}",
    DOUBLING.format(start="['a']", step="(x, x)") + "{{ x | tojson }}",
    DOUBLING.format(start="{}", step="{'a': x, 'b': x}") + "{{ x | string }}",
    DOUBLING.format(start="{}", step="dict(a=x, b=x)") + "{{ x == x }}",
    "{% set x = ['a'] %}{% set y = ['a'] %}" + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60 + "{{ x == y }}",
    DOUBLING.format(start="'ab'", step="x.replace('a', x)"),
    DOUBLING.format(start="'ab'", step="x.join([x, x, x])"),
    DOUBLING.format(start="'ab'", step="[x, x] | join(x)"),
    DOUBLING.format(start="'ab'", step="'%s%s' % (x, x)"),
    DOUBLING.format(start="'ab'", step="'{}{}'.format(x, x)"),
    DOUBLING.format(start="3", step="x * x") + "{{ x }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ ['a'] * 10 ** 10 }}",
    "{{ 9 ** 9 ** 9 }}{{ 9 ** (9 ** 9) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a' | indent(9999999999) }}",
    "{{ (1).to_bytes(9999999999, 'big') }}",
    "{{ 'a'.expandtabs(9999999999) }}",
    "{{ range(9999999999) | list }}",
    "{{ strftime_now('%9999999999Y') }}",
    "{% set b %}{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}{% endset %}",
    "{% for i in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "{% set ns = namespace(a='xxxxxxxx') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[]) %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "[" * 500 + "]" * 500 + " }}",
    "x" * (MAX_SOURCE_CHARS + 1),
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS, ids=lambda source: source[:60])
def test_a_template_that_would_not_end_or_would_fill_memory_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.runtime.tokenizer.sandbox.MAX_CPU_SECONDS", 0.2)
    with peak_allocation() as peak:
        failure(source)
    assert peak.num_bytes < 300 << 20


def test_a_template_without_loops_over_long_text_is_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.runtime.tokenizer.sandbox.MAX_CPU_SECONDS", 0.2)
    source = "{% if (messages[0].content * 9) in messages[0].content %}{% endif %}" * 3000
    assert "stopped" in failure(source, [{"role": "user", "content": "a" * 200_000}])


def test_an_ordinary_long_conversation_is_well_within_the_limits() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 500} for i in range(400)]
    assert len(rendered(CHATML, messages)) > 1_000_000
    joined = "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.role %}{% endfor %}{{ ns.t }}"
    assert len(rendered(joined, messages)) == 400 * 13 // 2
