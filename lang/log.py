"""What was added to a state: a linked list from the newest operation back, shared between a state and its forks.

A fork points at its parent's newest node, a rollback moves back to an older one, and a join takes over the winner's:
each costs the same whatever the length, as in the runtime below.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

from anabranch.lang.stream import Stream

Kind = Literal["root", "text", "begin", "end", "gen", "select"]


class Node:
    """One operation. `text` is what it adds; for a gen or select, `read` makes it from the future's result."""

    __slots__ = ("depth", "future", "kind", "name", "prev", "read", "role", "settled", "stream", "text")

    def __init__(
        self,
        prev: "Node | None",
        kind: Kind,
        *,
        text: str = "",
        name: str | None = None,
        role: str | None = None,
        future: Future[Any] | None = None,
        read: Callable[[Any], str] | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.prev = prev
        self.kind = kind
        self.depth: int = 0 if prev is None else prev.depth + 1
        self.text = text
        self.name = name
        self.role = role  # the turn that is open after this node
        self.future = future
        self.read = read
        self.stream = stream
        self.settled = prev is None

    def what(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else self.kind

    def final_text(self) -> str:
        """The text it added; its future must be done and good."""
        if self.future is not None and self.read is not None:
            self.text, self.read = self.read(self.future.result(0)), None
        return self.text

    def arrived_text(self) -> str:
        """As much of the text as has come by now; never blocks and never raises."""
        if self.future is None:
            return self.text
        if self.future.done():
            good = not self.future.cancelled() and self.future.exception(0) is None
            return self.final_text() if good else ""
        return "".join(self.stream.pieces) if self.stream else ""


def root() -> Node:
    return Node(None, "root")


def path(tail: Node, after: Node | None = None) -> list[Node]:
    """Nodes after `after` (exclusive; None: all) up to `tail`, oldest first. `after` must be an ancestor of `tail`."""
    nodes = []
    node: Node | None = tail
    while node is not None and node is not after:
        nodes.append(node)
        node = node.prev
    assert after is None or node is after, "the node is not on this state's path"
    nodes.reverse()
    return nodes


def is_ancestor(node: Node, tail: Node) -> bool:
    """Whether `node` lies on the path to `tail`. Walks only what is newer than `node`."""
    walk: Node | None = tail
    while walk is not None and walk.depth > node.depth:
        walk = walk.prev
    return walk is node


def common_ancestor(a: Node, b: Node) -> Node:
    while a is not b:
        if a.depth >= b.depth:
            assert a.prev is not None
            a = a.prev
        else:
            assert b.prev is not None
            b = b.prev
    return a


def unsettled(tail: Node) -> list[Node]:
    """Nodes that are not known to be done, oldest first. Costs what was added since the last `settle`."""
    nodes = []
    node: Node | None = tail
    while node is not None and not node.settled:
        nodes.append(node)
        node = node.prev
    nodes.reverse()
    return nodes


def text_of(nodes: list[Node]) -> str:
    return "".join(node.final_text() for node in nodes)


def begin_text(role: str) -> str:
    """How a turn is written in `state.text()`. The model's own template is the runtime's; `explain().text` shows it."""
    return f"{role}: "


END_TEXT = "\n"


def messages(nodes: list[Node]) -> list[dict[str, str]]:
    """The closed turns, in the OpenAI chat format."""
    turns: list[dict[str, str]] = []
    pieces: list[str] | None = None
    role = ""
    for node in nodes:
        if node.kind == "begin":
            pieces, role = [], node.role or ""
        elif node.kind == "end":
            turns.append({"role": role, "content": "".join(pieces or ())})
            pieces = None
        elif pieces is not None:
            pieces.append(node.final_text())
    return turns


def turns(nodes: list[Node]) -> Iterator[tuple[str, list[Node]]]:
    """(role or "", nodes) of each turn and each stretch between turns, the open one last. For display."""
    role, held = "", list[Node]()
    for node in nodes:
        if node.kind in ("begin", "end", "root"):
            if held or role:
                yield role, held
            role, held = (node.role or "") if node.kind == "begin" else "", []
        else:
            held.append(node)
    if held or role:
        yield role, held
