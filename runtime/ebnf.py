"""GBNF (the EBNF of llama.cpp and xgrammar) to llguidance's Lark.

```
root  ::= "yes" | "no" | list        # the whole output; rules may stand in any order
list  ::= "[" item ("," item)* "]"
item  ::= [a-z0-9_] [^,\\]]{0,7}      # * + ? {n} {n,} {n,m}; escapes \\n \\r \\t \\\\ \\" \\[ \\] \\- \\xHH \\uHHHH \\UHHHHHHHH
```

Rules that do not recurse become terminals, each one regular expression, so that they mean exactly what they say. In recursive rules,
terminals and literals are matched as long as possible, as a lexer does.
"""

import re
from dataclasses import dataclass, field
from typing import NoReturn

MAX_NESTING = 100
MAX_REPEAT = 10_000
MAX_RULES = 10_000

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*\d+[ ]*(?:,[ ]*\d*[ ]*)?\})
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<mark>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r'\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\\"\[\]^/-]))|([^\\])', re.DOTALL
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


@dataclass(slots=True)
class _Rule:
    """`body` is Lark in which references stand as {name}."""

    name: str
    body: str
    references: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    offset: int


def ebnf_to_lark(source: str) -> str:
    """Raises ValueError naming the line."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise ValueError("there is no rule 'root'")
    for rule in rules.values():
        for name in sorted(rule.references - rules.keys()):
            raise ValueError(f"rule {rule.name!r} uses {name!r}, which is not defined")
    terminals = _regular(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(rules)}
    lines = [f"{names[rule.name]}: {rule.body.format_map(names)}" for rule in rules.values()]
    return "\n".join([f"start: {names['root']}", *lines])


def escape_regex(text: str) -> str:
    """A regex, fit to stand between slashes, that matches `text` and nothing else."""
    escaped = _REGEX_META.sub(lambda found: "\\" + found[0], text)
    return "".join(c if c.isprintable() else f"\\x{{{ord(c):x}}}" for c in escaped)


def _regular(rules: dict[str, _Rule]) -> set[str]:
    """Rules that reach no recursion."""
    regular: set[str] = set()
    waiting = list(rules.values())
    while True:
        left = []
        for rule in waiting:
            (left.append(rule) if rule.references - regular else regular.add(rule.name))
        if len(left) == len(waiting):
            return regular
        waiting = left[::-1]


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = self._scan(source)
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, _Rule]:
        found: dict[str, _Rule] = {}
        while self._peek().kind != "end":
            name = self._take("name", "the name of a rule")
            if name.text in found:
                self._fail(name, f"rule {name.text!r} is defined twice")
            self._take("define", "::=")
            self._rule = found[name.text] = _Rule(name.text, "")
            if self._at_rule():
                self._fail(name, f"rule {name.text!r} is empty")
            self._rule.body = self._alternatives()
            if len(found) > MAX_RULES:
                self._fail(name, f"more than {MAX_RULES} rules")
            if self._peek().kind != "end" and not self._at_rule():
                self._fail(self._peek(), f"{self._peek().text!r} does not belong here")
        return found

    def _alternatives(self) -> str:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(self._peek(), f"nested more than {MAX_NESTING} deep")
        parts = [self._sequence()]
        while self._peek().text == "|" and self._peek().kind == "mark":
            self._next += 1
            parts.append(self._sequence())
        self._depth -= 1
        return " | ".join(parts)

    def _sequence(self) -> str:
        parts: list[str] = []
        while not self._at_rule():
            token = self._peek()
            if token.kind == "text":
                item = _text(self._unescape(token))
            elif token.kind == "set":
                item = self._set(token)
            elif token.kind == "name":
                self._rule.references.add(token.text)
                item = "{" + token.text + "}"
            elif token.text == "." and token.kind == "mark":
                item = "/(?s:.)/"
            elif token.text == "(":
                item = self._group()
            else:
                break
            self._next += token.text != "("
            parts.append(item + self._repeat())
        return " ".join(parts) or '""'

    def _group(self) -> str:
        self._next += 1
        inside = self._alternatives()
        closing = self._take("mark", "')'")
        if closing.text != ")":
            self._fail(closing, f"expected ')', found {closing.text!r}")
        return f"({inside})"

    def _repeat(self) -> str:
        token = self._peek()
        if token.kind != "repeat":
            return ""
        self._next += 1
        counts = [int(digits) for digits in re.findall(r"\d+", token.text)]
        if any(count > MAX_REPEAT for count in counts) or (len(counts) == 2 and counts[0] > counts[1]):
            self._fail(token, f"{token.text} must rise, and stay at or below {MAX_REPEAT}")
        text = token.text.replace(" ", "")
        return text.replace("{", "{{").replace("}", "}}")

    def _set(self, token: _Token) -> str:
        """[a-z^] and [^a-z] as a regex; every character by its number, so that none is special."""
        body = token.text[1:-1]
        negated = body.startswith("^")
        items = list(self._characters(token, body[1:] if negated else body))
        parts: list[str] = []
        i = 0
        while i < len(items):
            low, high = items[i][0], items[i][0]
            if i + 2 < len(items) and items[i + 1] == ("-", False):
                high, i = items[i + 2][0], i + 2
            if low > high:
                self._fail(token, f"the range {low}-{high} runs backwards")
            parts.append(_number(low) + ("-" + _number(high) if low != high else ""))
            i += 1
        if not parts:
            self._fail(token, "a set of characters is empty")
        return f"/[{'^' if negated else ''}{''.join(parts)}]/".replace("{", "{{").replace("}", "}}")

    def _unescape(self, token: _Token) -> str:
        return "".join(character for character, _ in self._characters(token, token.text[1:-1]))

    def _characters(self, token: _Token, text: str) -> list[tuple[str, bool]]:
        """Characters, and whether each was escaped."""
        found, at = [], 0
        while at < len(text):
            escape = _ESCAPE.match(text, at)
            if escape is None:
                self._fail(token, f"{text[at : at + 2]!r} is not an escape")
            *numbers, short, plain = escape.groups()
            digits = next((number for number in numbers if number), None)
            if digits is not None and (int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000):
                self._fail(token, f"{escape[0]} is not a character")
            character = chr(int(digits, 16)) if digits is not None else _SHORT.get(short, short) or plain
            found.append((character, plain is None))
            at = escape.end()
        return found

    # ------------------------------------------------------------ tokens

    def _scan(self, source: str) -> list[_Token]:
        tokens, at = [], 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                self._fail(_Token("", "", at), f"{source[at : at + 10]!r} is not understood")
            if found.lastgroup != "space":
                tokens.append(_Token(str(found.lastgroup), found[0], at))
            at = found.end()
        end = _Token("end", "the end", len(source))
        return [*tokens, end, end]

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _at_rule(self) -> bool:
        """Whether the next rule begins here, or the text ends."""
        return self._peek().kind == "end" or (
            self._peek().kind == "name" and self._tokens[self._next + 1].kind == "define"
        )

    def _take(self, kind: str, what: str) -> _Token:
        token = self._peek()
        if token.kind != kind:
            self._fail(token, f"expected {what}, found {token.text!r}")
        self._next += 1
        return token

    def _fail(self, token: _Token, problem: str) -> NoReturn:
        line = self._source.count("\n", 0, token.offset) + 1
        raise ValueError(f"line {line}: {problem}")


def _text(text: str) -> str:
    return f"/{escape_regex(text)}/".replace("{", "{{").replace("}", "}}") if text else '""'


def _number(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
