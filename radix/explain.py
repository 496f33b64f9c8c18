"""The cache in words: why a token is not cached, and what the tree looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.radix.branch import Branch
from anabranch.radix.nodes import NONE

if TYPE_CHECKING:
    from anabranch.radix.manager import KVManager

MAX_LINES = 200
MAX_TOKENS = 8


def why_miss(m: KVManager, branch: Branch, *, all_namespaces: bool = False) -> str:
    """Why the first token of the branch that is not cached is not. Changes nothing.

    Cost     one match from the root, and with `all_namespaces` one for each namespace
    """
    length = len(branch)
    if not length:
        return "the branch has no tokens"
    node, cached = _match(m, branch, branch.namespace)
    head = f"{cached} of {length} tokens are cached; token {cached}"
    if cached == length:
        return f"all {length} tokens are cached; the last one is computed again for its logits"
    token = branch.log.at(cached)
    reason = _reason(m, branch, node, cached, token)
    if all_namespaces:
        longest = max((_match(m, branch, other)[1] for other in m.tree.roots if other != branch.namespace), default=0)
        if longest > cached:
            reason += f"; another namespace has {longest} tokens of it, which may not be shared"
    return f"{head} (id {token}) {reason}"


def _match(m: KVManager, branch: Branch, namespace: bytes) -> tuple[int, int]:
    root = m.tree.find_root(namespace)
    if root is None:
        return NONE, 0
    return m.tree.match(root, 0, branch.log.read(0, len(branch)))


def _reason(m: KVManager, branch: Branch, node: int, cached: int, token: int) -> str:
    tree = m.tree
    if cached < branch.peak:
        return f"was evicted: this branch once had KV for {branch.peak} tokens"
    if node == NONE:
        return "was never seen: nothing is cached in this namespace"
    nodes = tree.nodes
    if (node, nodes.generation[node], token) in tree.ghosts:
        return "was evicted"
    if cached < nodes.end[node]:
        return f"diverges at {cached} from a cached sequence, which goes on with id {tree.token_at(node, cached)}"
    if nodes.num_children(node):
        return f"diverges at {cached}: {nodes.num_children(node)} other continuations are cached there"
    return "was never seen: the cached sequence ends there"


def dump(m: KVManager, max_lines: int = MAX_LINES) -> str:
    """The tree, a line a node, each with its range, pages, protection and first tokens. For people; O(tree)."""
    tree = m.tree
    lines = [
        f"{m.pool.num_pages} pages of {m.page_size}: {m.num_free()} free, {m.num_cached()} cached, "
        f"{m.num_locked()} locked, {m.num_in_use()} in use"
    ]
    below: dict[int, list[int]] = {}
    for key, child in tree.children.items():
        below.setdefault(key >> 32, []).append(child)
    for namespace, root in tree.roots.items():
        lines.append(f"namespace {namespace!r} (node {root})")
        stack = [(child, 1) for child in sorted(below.get(root, ()), reverse=True)]
        while stack and len(lines) <= max_lines:
            node, depth = stack.pop()
            lines.append("  " * depth + _node_line(m, node))
            stack.extend((child, depth + 1) for child in sorted(below.get(node, ()), reverse=True))
    if len(lines) > max_lines:
        lines = [*lines[:max_lines], f"... {len(tree.nodes)} nodes in all"]
    lines.extend(_branch_line(m, branch) for branch in m.attached)
    return "\n".join(lines)


def _node_line(m: KVManager, node: int) -> str:
    tree, nodes = m.tree, m.tree.nodes
    tokens = tree.edge_tokens(node)
    text = " ".join(map(str, tokens[:MAX_TOKENS])) + (" ..." if len(tokens) > MAX_TOKENS else "")
    marks = [
        word
        for word, holds in (
            ("shares first", nodes.shares_first[node]),
            (f"locks {nodes.locks[node]}", nodes.locks[node]),
            (f"leases {nodes.leases[node]}", nodes.leases[node]),
            ("protected below", nodes.locked_children[node] or nodes.leased_children[node]),
            ("claimed", node in m.claims),
            (f"idle {nodes.idle[node]}", nodes.idle[node]),
        )
        if holds
    ]
    pages = tree.page_ids(node).tolist()
    shown = f"{pages}" if len(pages) <= MAX_TOKENS else f"{len(pages)} from {pages[0]}"
    return f"node {node} [{nodes.start[node]}, {nodes.end[node]}) pages {shown} {' '.join([*marks, ':'])} {text}"


def _branch_line(m: KVManager, branch: Branch) -> str:
    return (
        f"branch at node {branch.node}: {len(branch)} tokens, {branch.computed} computed, {branch.reserved} reserved, "
        f"own pages {branch.entries(branch.own).tolist()}, tail {branch.tail.name.lower()}"
    )
