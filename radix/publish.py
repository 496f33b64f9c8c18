"""Handing what a branch has computed to the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from anabranch.radix.branch import Branch, Tail

if TYPE_CHECKING:
    from anabranch.radix.manager import KVManager


def publish(m: KVManager, branch: Branch) -> None:
    """Give the committed KV of an attached branch to the tree, from the branch's own node on.

    Pages change hands, nothing is copied. Tokens that somebody else has published meanwhile are not inserted twice: the
    branch gives back its own pages for them and its table switches to the tree's. A page in which the branch still has
    reserved slots is kept, whoever else has its tokens: a step in flight may be writing there.

    Cost     O(tokens that are new since the last time)
    """
    tree, size = m.tree, m.page_size
    start = tree.nodes.end[branch.node]
    upto = min(branch.computed, len(branch))
    if upto <= start:
        return
    tokens = branch.log.read(start, upto)
    node, found = tree.match(branch.node, start, tokens)
    if _must_wait(branch, start // size, found // size, found == upto):
        return
    if found < tree.nodes.end[node]:
        node = tree.split(node, found)
    _switch_to_tree(m, branch, node, found, keep_last=found < upto or branch.reserved > upto)
    if found < upto:
        _insert(m, branch, node, start, tokens[found - start :])
    else:
        _follow(m, branch, node)


def _must_wait(branch: Branch, start_index: int, found_index: int, is_all_there: bool) -> bool:
    """Whether the branch must stay where it is, though others have published all its tokens.

    It writes on in a page of its present node, past that node's end. Nobody else may get that right, and the node keeps
    the page, only as long as the branch stays there. It moves when the page is full, or when nothing is left to write.
    """
    is_writing = branch.reserved > branch.computed
    return is_all_there and is_writing and branch.tail == Tail.CLAIMED and found_index == start_index


def _switch_to_tree(m: KVManager, branch: Branch, node: int, found: int, *, keep_last: bool) -> None:
    """Use the tree's pages for positions below `found`, and release the branch's own for them.

    keep_last   but not for the page that `found` falls into: the branch's page has more in it
    """
    index = found // m.page_size if keep_last else -(-found // m.page_size)
    first = branch.own - (branch.tail == Tail.CLAIMED)
    if index <= first:
        return
    if index > branch.own:
        m.pool.release(branch.entries(branch.own, index))
        branch.own = index
    m.tree.fill_page_table(node, branch.entries(0, index), first)
    branch.table_changed(first)


def _insert(m: KVManager, branch: Branch, node: int, start: int, tokens: np.ndarray) -> None:
    """Put the rest of the branch's tokens, which nobody has published, below the end of `node`.

    start    where the branch's own node ends; the page of that position is that node's if the branch claimed it
    """
    tree, size = m.tree, m.page_size
    found = tree.nodes.end[node]
    upto = found + len(tokens)
    index, stop = found // size, -(-upto // size)
    is_claimed = branch.tail == Tail.CLAIMED and index == start // size
    written = start if is_claimed else index * size  # the slots before it have their tokens already
    tree.store.write(branch.entries(index, stop), written, branch.log.read(written, upto))
    if found == start and (is_claimed or found % size == 0) and tree.can_grow(node):
        tree.grow(node, upto, branch.entries(-(-found // size), stop))
        m.drop_claim(branch)
    else:
        if is_claimed:
            m.pool.retain_one(int(branch.entries(index, index + 1)[0]))
        leaf = tree.add_child(
            node, upto, branch.entries(index, stop), first_token=int(tokens[0]), shares_first=is_claimed
        )
        m.move_lock(branch, leaf)
    branch.own = stop
    if upto % size == 0:
        branch.tail = Tail.ALIGNED
    elif branch.reserved > upto:
        m.claims[branch.node] = branch
        branch.tail = Tail.CLAIMED
    else:
        branch.tail = Tail.SHARED


def _follow(m: KVManager, branch: Branch, node: int) -> None:
    """The branch ends where `node` ends, which others have published."""
    upto = m.tree.nodes.end[node]
    m.move_lock(branch, node)
    if upto % m.page_size == 0:
        branch.tail = Tail.ALIGNED
    elif branch.own <= upto // m.page_size:
        branch.tail = Tail.PRIVATE
    else:
        branch.tail = Tail.SHARED
