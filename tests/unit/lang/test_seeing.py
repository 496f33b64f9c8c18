"""What users see of their programs: explanations, trees, notebook displays, traces and dry runs."""

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang import events
from anabranch.lang.display import Watch
from anabranch.lang.explain import COLOURS
from anabranch.lang.testing import Gate, Reply, ScriptedBackend


@ab.function
def search(s: Any) -> None:
    s += "A common beginning of some length."
    group = s.fork(3)
    group += ab.gen("x", max_tokens=4)
    best = max(group, key=lambda b: b.logprob("x"))
    s.join(best)
    s += " Then" + ab.gen("y", max_tokens=4)


def test_an_explanation_counts_every_token_by_origin(backend: ScriptedBackend) -> None:
    state = search.run(seed=1)
    told = state.explain()
    assert told.length == sum(told.tokens(o) for o in ("cached", "computed", "generated", "forced", "pending"))
    assert told.tokens("generated") == len(state.tokens("x")) + len(state.tokens("y"))
    assert "".join(span.text for span in told.spans) == told.text == state.text()
    shown = str(told)
    assert f"{told.length} tokens" in shown and "tokens computed instead of" in shown
    assert set(told.bar()) <= set("█▒░·") and len(told.bar(20)) >= len(told.spans)
    assert "why the rest was not cached" in shown  # the last sampled token has no KV yet
    state.close()
    with pytest.raises(ab.StateClosed):
        state.explain()


def test_usage_counts_each_token_once_and_compares_with_a_cold_run(backend: ScriptedBackend) -> None:
    state = search.run(seed=1)
    usage = state.usage()
    length = state.explain().length
    assert usage.operations == 4 and usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens
    prefix = 7
    path, loser = length - 1, 4 - 1  # a last token is sampled and never read
    siblings = 2  # each computes the last token of the shared prompt again, for its logits
    assert usage.total_computed == path + 2 * loser + siblings
    assert usage.cold_tokens == path + 2 * (prefix + loser)
    assert 0 < usage.saved < 1 and f"{usage.saved:.0%} saved" in str(usage)


def test_a_single_generation_saves_nothing(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=4)
    s += "alone" + ab.gen("x")
    s.sync()
    assert s.usage().saved == 0 and s.usage().total_computed == s.usage().cold_tokens


def test_a_tree_shows_every_branch_with_its_fate(backend: ScriptedBackend) -> None:
    state = search.run(seed=1)
    lines = state.tree().split("\n")
    assert lines[0].startswith("○ search open") and len(lines) == 5
    assert sum("● " in line for line in lines) == 1 and sum("× " in line for line in lines) == 2
    wide = ab.state()
    group = wide.fork(40)
    group[0].annotate("a note")
    drawn = wide.tree()
    assert "... and 16 more" in drawn and "0 a note open" in drawn
    group[1].fail(ValueError("what went wrong"))
    del group
    assert "failed" in wide.tree() and "what went wrong" in wide.tree() and "dropped" in wide.tree()
    with pytest.raises(ab.BranchErrors):
        wide._program.raise_unmet()


def test_a_state_displays_as_html_with_its_spans_marked_and_text_escaped(backend: ScriptedBackend) -> None:
    state = search.run(seed=1)
    html = state._repr_html_()
    assert "served from KV" in html and "written by the model" in html and "<pre" in html
    s = ab.state(backend=ScriptedBackend(["<b>&bold</b>"]))
    s += ab.user("<script>") + ab.assistant(ab.gen("x"))
    s.sync()
    assert "<script>" not in s._repr_html_() and "&lt;b&gt;&amp;bold" in s._repr_html_()
    s.close()
    assert "<script>" not in s._repr_html_() and "&lt;script&gt;" in s._repr_html_()


def test_displays_never_wait_and_never_raise() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply("begun ", gate, "ended") if "bad" not in p.text else ValueError("broken"))
    s = ab.state(backend=backend)
    s += "x" + ab.gen("a")
    group = s.fork(2)
    group += ab.gen("b")
    for shown in (s._repr_html_(), repr(s), group._repr_html_(), repr(group), s.tree()):
        assert "ended" not in shown
    gate.open()
    group.sync()
    assert "ended" in s._repr_html_() and "ended" in repr(s) and "ended" in group._repr_html_()
    bad = ab.state(backend=backend)
    bad += "bad" + ab.gen("x")
    bad.error()
    assert "broken" in bad._repr_html_() and "broken" in bad.tree() and repr(bad)


def test_what_branches_share_is_marked_in_the_text_while_they_work() -> None:
    gate = Gate()
    s = ab.state(backend=ScriptedBackend(lambda p: Reply(gate, "said")))
    s += ab.user("A <shared> beginning.")
    group = s.fork(2)
    group += " Own text." + ab.gen("x")
    cached = COLOURS["cached"]
    shown = group[0]._repr_html_()
    assert f'<span style="background:{cached}" title="served from KV that was there">A &lt;shared&gt; beginning.</span>' in shown
    assert " Own text." in shown and f'{cached}" title="served from KV that was there"> Own text' not in shown
    together = group._repr_html_()
    assert together.count("A &lt;shared&gt; beginning.") == 1 and "shared by all 2: computed once" in together
    assert "A &lt;shared&gt;" in Watch(s)._html()
    gate.open()
    group.sync()
    assert f"{cached}" in group[0]._repr_html_()


def test_a_branch_that_did_nothing_yet_is_as_long_as_its_parent(backend: ScriptedBackend) -> None:
    s = ab.state(max_tokens=2)
    s += "one two three" + ab.gen("x")
    s.sync()
    group = s.fork(1)
    root, child = s.tree().split("\n")[:2]
    assert "open 5 tokens" in root and "open 5 tokens" in child and group


def test_a_backend_that_tells_no_text_gets_a_bar(backend: ScriptedBackend) -> None:
    from anabranch.lang.backend import TokenSpan
    from anabranch.lang.explain import spans_html

    html = spans_html((TokenSpan(0, 30, "cached"), TokenSpan(30, 40, "generated")))
    assert "width:75.00%" in html and "width:25.00%" in html


def test_watching_redraws_while_branches_work_and_stops_with_the_block() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    gate, out = Gate(), Terminal()
    s = ab.state(backend=ScriptedBackend(lambda p: Reply(gate, "done")))
    with Watch(s, out):
        group = s.fork(2)
        group += ab.gen("x")
        gate.open()
        group.join()
    assert not events.watched()
    assert "joined" in out.getvalue() and "\x1b[J" in out.getvalue()
    plain = io.StringIO()
    with Watch(s, plain):
        pass
    assert plain.getvalue() == s.tree() + "\n"


def test_watching_in_a_notebook_updates_one_display(monkeypatch: pytest.MonkeyPatch, backend: ScriptedBackend) -> None:
    updates: list[str] = []

    class Html:
        def __init__(self, data: str) -> None:
            self.data = data

    class Handle:
        def update(self, thing: Html) -> None:
            updates.append(thing.data)

    shell = types.SimpleNamespace(kernel=object())
    display = types.SimpleNamespace(HTML=Html, display=lambda thing, display_id: updates.append(thing.data) or Handle())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    s = ab.state(max_tokens=2)
    with s.watch():
        group = s.fork(2)
        group += ab.gen("x")
        group.join()
    assert len(updates) >= 2 and "joined" in updates[-1]


def test_a_trace_holds_every_branch_operation_and_fork_in_perfettos_format(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    path = tmp_path / "trace.json"
    with ab.trace(path):
        state = search.run(seed=1)
    search.run(seed=2)  # not recorded
    trace = json.loads(path.read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert sorted(e["name"] for e in slices) == ["x", "x", "x", "y"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and e["args"]["usage"]["prompt_tokens"] > 0 for e in slices)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {"search", "main", "branch [0]", "branch [1]", "branch [2]"}
    begins = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert len(begins) == 3 and begins.keys() == ends.keys() and {e["tid"] for e in ends.values()} == set(ends)
    assert any(e["name"] == "join" for e in trace["traceEvents"]) and state["y"]


def test_a_trace_is_written_after_an_error_too_with_what_was_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(KeyError), ab.trace(path):
        s = ab.state(backend=ScriptedBackend(lambda p: Reply(Gate())))
        s += ab.gen("x")
        raise KeyError
    assert [e["args"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"] == [{"unfinished": True}]
    assert not events.watched()
    with pytest.raises(FileNotFoundError, match="the folder of the trace file"), ab.trace(tmp_path / "no" / "x.json"):
        pass


# ---------------------------------------------------------------- dry runs


def test_a_dry_run_lists_operations_and_finds_the_constant_prefix_through_formatted_text() -> None:
    @ab.function
    def program(s: Any, question: str, count: int = 2) -> None:
        s += ab.system("Be careful.") + ab.user(f"Question: {question.strip()}?")
        for b in s.fork(count):
            b += ab.gen("x", stop="\n")
        s += ab.select("y", ["a", "b"])

    traced = program.trace()
    assert traced.prefix_text() == "<system>Be careful.</><user>Question: " and traced.stopped_by is None
    assert traced.operations[:4] == ("<system>", "'Be careful.'", "</>", "<user>")
    assert any("{question}" in line for line in traced.operations)
    assert [line.strip().split()[0] for line in traced.operations if "gen" in line or "fork" in line] == [
        "fork",
        "gen",
        "gen",
    ]
    assert program.trace(question="Why").prefix_text().endswith("Question: Why?</>")
    assert "constant prefix" in str(traced)


def test_a_dry_run_that_needs_a_real_value_ends_there_and_tells_what_it_saw() -> None:
    @ab.function
    def program(s: Any) -> None:
        s += "Count:" + ab.gen("n", dtype=int)
        for _ in range(int(s["n"])):
            s += "x"

    @ab.function
    def endless(s: Any) -> None:
        while True:
            s += "x" + ab.gen("y")
            if s["y"] == "stop":
                break

    traced = program.trace()
    assert (
        isinstance(traced.stopped_by, ValueError)
        and traced.prefix_text() == "Count:"
        and "ended by ValueError" in str(traced)
    )
    assert endless.trace().stopped_by is not None


def test_caching_a_program_computes_its_constant_prefix_and_calls_no_more_of_it() -> None:
    called: list[str] = []

    @ab.function
    def program(s: Any, question: str) -> None:
        s += "A long preface that all questions share. "
        s += "Q: " + question
        called.append("after the question")
        s += ab.gen("x", max_tokens=2)

    backend = ScriptedBackend()
    cost = program.cache(backend)
    assert cost["computed_tokens"] > 5 and called == [] and backend.calls["generate"] == 0
    state = program.run("Why?", backend=backend)
    assert state.get_meta_info("x")["cached_tokens"] >= cost["prompt_tokens"] - 1
    assert program.cache(backend, seconds=5)["cached_tokens"] > 0 and backend.calls["lease"] == 1

    @ab.function
    def bare(s: Any, question: str) -> None:
        s += question

    assert bare.cache(backend) is None


def test_a_programs_own_except_does_not_swallow_the_end_of_a_dry_run() -> None:
    @ab.function
    def program(s: Any, x: str) -> None:
        s += "prefix "
        try:
            s += x + ab.gen("y")
        except Exception:
            s += "handled"

    backend = ScriptedBackend()
    assert program.cache(backend) is not None and backend.calls["append"] == 1
