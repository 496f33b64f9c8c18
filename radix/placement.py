"""Where a branch that is not attached stands in the tree, though it holds nothing there."""

from __future__ import annotations

from anabranch.radix.branch import Branch
from anabranch.radix.nodes import NONE
from anabranch.radix.tree import RadixTree


class Placement:
    """Finds the longest cached prefix of idle branches, going on from where each of them last was.

    A branch remembers a node, the node's generation, and a position up to which the path to the node agrees with its
    tokens. While the node lives, that stays true up to the node's end: an edge may lose its tail, and does not grow
    while an idle branch remembers it; that is why they are counted. A split moves the position into an ancestor. If
    the node is gone, the search starts at the root.
    """

    __slots__ = ("_tree",)

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree

    def find(self, branch: Branch) -> tuple[int, int]:
        """Where the longest cached prefix ends: (node, position), or (NONE, 0) if the namespace has no root.

        Cost     O(what is cached beyond the remembered position)
        """
        tree, length = self._tree, len(branch)
        node = self.living_node(branch)
        if node != NONE:
            position = min(branch.position, length, tree.nodes.end[node])
            node = tree.ancestor_at(node, position)
        else:
            root, position = tree.find_root(branch.namespace), 0
            if root is None:
                branch.node, branch.position, branch.is_counted = NONE, 0, False
                return NONE, 0
            node = root
        if position < length and tree.continues(node, position, branch.log.at(position)):
            node, position = tree.match(node, position, branch.log.read(position, length))
        self.move(branch, node, position)
        return node, position

    def is_unchanged(self, branch: Branch) -> bool:
        """Whether a branch whose tokens are those of the last `find` must end where it ended then."""
        nodes, node, position = self._tree.nodes, branch.node, branch.position
        if node == NONE or nodes.generation[node] != branch.generation:
            return False
        if not nodes.start[node] < position <= nodes.end[node]:
            return False
        if branch.is_inside_edge:  # what an edge holds never changes
            return True
        return position == branch.log.length or not self._tree.continues(node, position, branch.log.at(position))

    def move(self, branch: Branch, node: int, position: int) -> None:
        """The branch is known to agree with the path to `node` up to `position`, which lies on its edge."""
        nodes = self._tree.nodes
        branch.position = position
        branch.is_inside_edge = position < nodes.end[node]
        generation = nodes.generation[node]
        if node != branch.node or generation != branch.generation:
            self.stop_counting(branch)
            branch.node, branch.generation = node, generation
            self.start_counting(branch)

    def living_node(self, branch: Branch) -> int:
        """The node that the branch remembers, or NONE if it was evicted whole."""
        node = branch.node
        return node if node != NONE and self._tree.nodes.generation[node] == branch.generation else NONE

    def start_counting(self, branch: Branch) -> None:
        """Let the node know that an open branch may come back to it."""
        node = self.living_node(branch)
        if node != NONE:
            self._tree.nodes.idle[node] += 1
            branch.is_counted = True

    def stop_counting(self, branch: Branch) -> None:
        """Take that back."""
        if branch.is_counted:
            branch.is_counted = False
            node = self.living_node(branch)
            if node != NONE:
                self._tree.nodes.idle[node] -= 1
