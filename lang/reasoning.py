"""Splitting what a reasoning model writes into its reasoning and its answer."""

from anabranch.lang.errors import Unsupported

# model_type -> (opening tag, closing tag), under the names that SGLang programs use.
TAGS = {
    "deepseek-r1": ("<think>", "</think>"),
    "deepseek-v3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "qwen3-thinking": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
}


def split_reasoning(text: str, model_type: str | None) -> tuple[str, str]:
    """(reasoning, answer). Text without a closing tag: all reasoning if it opens one (it was cut off), else all
    answer.
    """
    kind = (model_type or "deepseek-r1").lower()
    if kind not in TAGS:
        raise Unsupported(f"separate_reasoning knows no model_type {model_type!r}; it knows {', '.join(TAGS)}")
    begin, end = TAGS[kind]
    opened = text.lstrip().startswith(begin)
    body = text.lstrip()[len(begin) :] if opened else text
    if end not in body:
        return (body.strip(), "") if opened else ("", text)
    reasoning, answer = body.split(end, 1)
    return reasoning.strip(), answer.lstrip("\n")
