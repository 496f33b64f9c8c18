"""Where a state's tokens came from, and what sharing them saved."""

import html
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.lang.backend import TokenSpan
from anabranch.lang.record import Usage

if TYPE_CHECKING:
    from anabranch.lang.state import State

MARKS = {"cached": "█", "computed": "▒", "generated": "░", "forced": "░", "pending": "·"}
COLOURS = {
    "cached": "#cdeccd",
    "computed": "#ffe3b8",
    "generated": "#cfe2ff",
    "forced": "#e2d6fb",
    "pending": "#eeeeee",
}
MEANING = {
    "cached": "served from KV that was there",
    "computed": "prompt tokens computed here",
    "generated": "written by the model",
    "forced": "dictated by a grammar",
    "pending": "not computed yet",
}


@dataclass(frozen=True, slots=True)
class StateExplanation:
    """One state's tokens, in spans by origin.

    length      tokens of the state
    cached_now  how many of its leading tokens have KV at this moment
    miss        why the first token that was not cached was not; "" if all were
    text        the state as the model sees it, template included; "" if the backend does not tell
    usage       what the whole run has cost until now
    """

    length: int
    cached_now: int
    spans: tuple[TokenSpan, ...]
    miss: str
    text: str
    usage: Usage

    def tokens(self, origin: str) -> int:
        """How many tokens came by `origin`: cached, computed, generated, forced, pending."""
        return sum(s.stop - s.start for s in self.spans if s.origin == origin)

    def bar(self, width: int = 60) -> str:
        """The spans, drawn to scale in at most `width` characters or so; every span shows."""
        scale = width / max(1, self.length)
        return "".join(MARKS[s.origin] * max(1, round((s.stop - s.start) * scale)) for s in self.spans)

    def __str__(self) -> str:
        counts = Counter[str]()
        for span in self.spans:
            counts[span.origin] += span.stop - span.start
        said = ", ".join(f"{n} {origin}" for origin, n in counts.items())
        lines = [f"{self.length} tokens: {said or 'none'}; {self.cached_now} have KV now", f"|{self.bar()}|"]
        lines += [f"{s.start:>7} - {s.stop:<7} {s.origin:<9} {_short(s.text)}" for s in self.spans]
        if self.miss:
            lines.append(f"why the rest was not cached: {self.miss}")
        lines.append(f"the whole run: {self.usage}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"{spans_html(self.spans)}{legend_html(self)}"


def explain_state(state: "State") -> StateExplanation:
    told = state._require_open().explain().result()
    return StateExplanation(told.length, told.cached_now, told.spans, told.miss, told.text, state.usage())


def spans_html(spans: tuple[TokenSpan, ...]) -> str:
    """The text with each span coloured by origin; a bar to scale where the backend gave no text."""
    if any(s.text for s in spans):
        parts = "".join(
            f'<span style="background:{COLOURS[s.origin]}" title="{s.stop - s.start} tokens, '
            f'{MEANING[s.origin]}">{html.escape(s.text)}</span>'
            for s in spans
        )
        return f'<div style="white-space:pre-wrap;font-family:monospace">{parts}</div>'
    total = max(1, sum(s.stop - s.start for s in spans))
    bars = "".join(
        f'<div style="background:{COLOURS[s.origin]};width:{100 * (s.stop - s.start) / total:.2f}%;height:1em" '
        f'title="tokens {s.start} to {s.stop}: {MEANING[s.origin]}"></div>'
        for s in spans
    )
    return f'<div style="display:flex;max-width:60em;border:1px solid #ccc">{bars}</div>'


def legend_html(explanation: StateExplanation) -> str:
    shown = [o for o in COLOURS if explanation.tokens(o)]
    items = " ".join(
        f'<span style="background:{COLOURS[o]};padding:0 .4em">{explanation.tokens(o)} {o}</span>' for o in shown
    )
    miss = f"<br>not cached because: {html.escape(explanation.miss)}" if explanation.miss else ""
    return f'<div style="font-size:smaller">{items} {html.escape(str(explanation.usage))}{miss}</div>'


def _short(text: str, width: int = 56) -> str:
    shown = repr(text) if text else ""
    return shown if len(shown) <= width else f"{shown[: width // 2]} ... {shown[-width // 2 + 5 :]}"
