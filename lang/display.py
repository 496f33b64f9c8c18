"""Programs made visible: the tree of branches in a terminal, states in a notebook, both live while they work."""

import html
import sys
import threading
from typing import TYPE_CHECKING, Any

from anabranch.lang import events, log
from anabranch.lang.explain import COLOURS, MEANING, explain_state, legend_html, spans_html
from anabranch.lang.record import BranchRecord
from anabranch.lang.stream import News

if TYPE_CHECKING:
    from anabranch.lang.group import Group
    from anabranch.lang.state import State

SIGNS = {
    "open": "○",
    "running": "◌",
    "won": "●",
    "lost": "×",
    "joined": "◆",
    "closed": "·",
    "failed": "!",
    "dropped": "×",
}
MAX_CHILDREN = 24  # of one branch, in a drawing
REFRESH_S = 0.1
SHARED_CHARS = 160  # of the text before a fork, shown above the children


def tree_text(state: "State", *, width: int = 100) -> str:
    """The run's branches as an indented tree: sign, status, length, share of the prompt from cache, latest text."""
    program = state._program
    program.usage()  # counts what has finished
    lines: list[str] = []
    _draw(program.root, "", "", lines, width, state._record)
    lines.append(str(program.usage()))
    return "\n".join(lines)


def _draw(record: BranchRecord, lead: str, below: str, lines: list[str], width: int, here: BranchRecord) -> None:
    status = record.shown_status()
    cached = f" {record.usage.hit_rate:4.0%} cached" if record.usage.prompt_tokens else ""
    name = record.label if not record.path else f"{record.path[-1]} {record.label}".rstrip()
    arrow = " <" if record is here else ""
    head = f"{lead}{SIGNS[status]} {name} {status} {record.length} tokens{cached}{arrow}"
    what = record.error or record.preview
    shown = " ".join(what.split())
    room = max(12, width - len(head) - 4)
    lines.append(f"{head}  {shown if len(shown) <= room else shown[: room - 3] + '...'}".rstrip())
    drawn = [c for c in record.children if not c.is_scratch]
    children = drawn[:MAX_CHILDREN]
    hidden = len(drawn) - len(children)
    for i, child in enumerate(children):
        last = i == len(children) - 1 and not hidden
        _draw(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), lines, width, here)
    if hidden:
        lines.append(f"{below}└─ ... and {hidden} more")


def state_html(state: "State") -> str:
    """The state's text, coloured by where its tokens came from, and below it the branches of its run."""
    parts = []
    if not state.closed and state.done() and state._first_failure() is None:
        explanation = explain_state(state)
        if any(span.text for span in explanation.spans):
            parts.append(spans_html(explanation.spans))
        else:
            parts += [_turns_html(state), spans_html(explanation.spans)]
        parts.append(legend_html(explanation))
    else:
        parts.append(_turns_html(state))
    if state._program.root.children:
        parts.append(f'<pre style="line-height:1.3">{html.escape(tree_text(state))}</pre>')
    return "".join(parts)


def _turns_html(state: "State") -> str:
    """What has arrived, turn by turn; never waits. What the model wrote is marked, and what was there at the fork."""
    blocks = []
    shared = state._fork_node.depth if log.is_ancestor(state._fork_node, state._tail) else 0
    for role, nodes in log.turns(log.path(state._tail)):
        spans = "".join(_node_html(node, shared) for node in nodes)
        head = f"<b>{html.escape(role)}</b> " if role else ""
        blocks.append(f'<div style="margin:.2em 0">{head}<span style="white-space:pre-wrap">{spans}</span></div>')
    error = state._record.error
    if error:
        blocks.append(f'<div style="color:#b00">{html.escape(error)}</div>')
    return "".join(blocks)


def _node_html(node: log.Node, shared: int = 0) -> str:
    """`shared`: depth of the node where the branch was forked; text up to there was computed before it began."""
    text = html.escape(node.arrived_text())
    if node.future is None and node.depth <= shared:
        return f'<span style="background:{COLOURS["cached"]}" title="{MEANING["cached"]}">{text}</span>'
    if node.future is None:
        return text
    waiting = "" if node.future.done() else " …"
    title = html.escape(node.name or node.kind)
    return f'<span style="background:{COLOURS["generated"]}" title="{title}">{text}{waiting}</span>'


def group_html(group: "Group") -> str:
    cells = "".join(
        f'<div style="flex:1;min-width:12em;border:1px solid #ccc;padding:.3em"><b>{s.index}</b> '
        f"{s._record.shown_status()}{_turns_html_since_fork(s)}</div>"
        for s in group
    )
    return f'{_shared_html(group)}<div style="display:flex;flex-wrap:wrap;gap:.4em">{cells}</div>'


def _shared_html(group: "Group") -> str:
    """The end of what all children share."""
    if not len(group):
        return ""
    text = "".join(node.arrived_text() for node in log.path(group[0]._fork_node))
    if not text:
        return ""
    end = text if len(text) <= SHARED_CHARS else f"… {text[-SHARED_CHARS:]}"
    style = f'white-space:pre-wrap;background:{COLOURS["cached"]}'
    return f'<div style="{style}" title="shared by all {len(group)}: computed once">{html.escape(end)}</div>'


def _turns_html_since_fork(state: "State") -> str:
    nodes = (
        log.path(state._tail, state._fork_node)
        if log.is_ancestor(state._fork_node, state._tail)
        else log.path(state._tail)
    )
    return f'<div style="white-space:pre-wrap">{"".join(_node_html(n) for n in nodes)}</div>'


class Watch:
    """Shows a run's branches while they work: in a notebook a cell output that updates, in a terminal a tree redrawn
    in place.

    Where output is no terminal, the tree is printed once, at the end.
    """

    def __init__(self, state: "State", file: Any = None) -> None:
        self._state = state
        self._news = News()
        self._open = False
        self._thread: threading.Thread | None = None
        self._file = file
        self._handle: Any = None
        self._drawn_lines = 0

    def __enter__(self) -> "State":
        self._file = self._file or sys.stderr
        self._handle = _notebook_handle(self._html())
        self._open = True
        events.add_observer(self._notice)
        self._thread = threading.Thread(target=self._redraw, name="anabranch-watch", daemon=True)
        self._thread.start()
        return self._state

    def __exit__(self, *_: object) -> None:
        events.remove_observer(self._notice)
        self._open = False
        self._news.tell()
        if self._thread is not None:
            self._thread.join()
        self._show(final=True)

    def _notice(self, event: events.Event) -> None:
        if event.program == self._state._program.label:
            self._news.tell()

    def _redraw(self) -> None:
        pause = threading.Event()
        while self._open:
            version = self._news.version
            self._show(final=False)
            self._news.wait(version)
            pause.wait(REFRESH_S)  # let what happens together be drawn together

    def _show(self, *, final: bool) -> None:
        if self._handle is not None:
            self._handle.update(_html_object(self._html()))
        elif self._file.isatty():
            text = tree_text(self._state)
            up = f"\x1b[{self._drawn_lines}F\x1b[J" if self._drawn_lines else ""
            self._file.write(f"{up}{text}\n")
            self._file.flush()
            self._drawn_lines = text.count("\n") + 1
        elif final:
            self._file.write(tree_text(self._state) + "\n")

    def _html(self) -> str:
        return _turns_html(self._state) + self._tree_html()

    def _tree_html(self) -> str:
        return f'<pre style="line-height:1.3">{html.escape(tree_text(self._state))}</pre>'


def _notebook_handle(first: str) -> Any:
    """A display that can be updated, where a notebook kernel is running; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    return display(HTML(first), display_id=True)


def _html_object(text: str) -> Any:
    from IPython.display import HTML

    return HTML(text)
