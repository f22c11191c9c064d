"""Order the host tier for eviction: the least recently used block first, and a chain from its end."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple


class ChainKey(NamedTuple):
    """A block's key in its space. Each key belongs to one group, as keys are rooted in the group's name."""

    space: bytes
    key: bytes


class ChainLru:
    """Selects the block to evict. A block is resident while it has records; it may leave when it is not held
    and no resident block follows it.

    Of a chain that was touched parents first, the last block leaves first and the first one last, before
    anything of a chain that was touched later. Every operation is O(log n).
    """

    def __init__(self) -> None:
        self._nodes: dict[ChainKey, _Node] = {}
        self._queue = _Queue()
        self._group_to_queue: dict[str, _Queue] = {}
        self._tick = 0
        self.num_resident = 0

    def __contains__(self, key: ChainKey) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.num_records > 0

    def add(self, key: ChainKey, parent: bytes, group: str) -> None:
        """Add a record of the block, which follows `parent` (b"": none), and is used just now."""
        node = self._node(key)
        node.num_records += 1
        if node.num_records == 1:
            self.num_resident += 1
            node.group = group
            self._group_to_queue.setdefault(group, _Queue()).num_blocks += 1
            # A block that claims to follow itself could never leave.
            if parent and parent != key.key:
                node.parent = self._node(ChainKey(key.space, parent))
                node.parent.num_children += 1
        self._use(node)

    def remove(self, key: ChainKey) -> None:
        """Remove a record of the block, which must not be held if it is the last."""
        node = self._nodes[key]
        node.num_records -= 1
        if node.num_records:
            return
        assert not node.num_holds, "a held block loses its last record"
        self.num_resident -= 1
        of_group = self._group_to_queue[node.group]
        of_group.num_blocks -= 1
        if not of_group.num_blocks:
            del self._group_to_queue[node.group]
        parent, node.parent = node.parent, None
        if not node.num_children:
            del self._nodes[key]
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_records and not parent.num_children:
                del self._nodes[parent.key]
            self._offer(parent)

    def touch(self, key: ChainKey) -> None:
        """Note that the block is used just now. Touch all of a chain, parents first."""
        self._use(self._nodes[key])

    def hold(self, key: ChainKey) -> None:
        """Hold the block until `release`; holds are counted."""
        node = self._nodes[key]
        assert node.num_records
        node.num_holds += 1

    def release(self, key: ChainKey) -> None:
        node = self._nodes[key]
        assert node.num_holds, "more holds end than began"
        node.num_holds -= 1
        self._offer(node)

    def oldest(self, group: str | None = None) -> ChainKey | None:
        """Return the block to evict next (of this group); None when none may leave."""
        queue = self._queue if group is None else self._group_to_queue.get(group)
        node = None if queue is None else queue.oldest()
        return None if node is None else node.key

    def check(self) -> None:
        """Assert every invariant; O(n log n)."""
        assert self.num_resident == sum(1 for node in self._nodes.values() if node.num_records)
        groups = Counter(node.group for node in self._nodes.values() if node.num_records)
        assert groups == {group: queue.num_blocks for group, queue in self._group_to_queue.items()}
        num_children: dict[ChainKey, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                assert node.num_records
                assert self._nodes[node.parent.key] is node.parent
                num_children[node.parent.key] = num_children.get(node.parent.key, 0) + 1
        for key, node in self._nodes.items():
            assert node.num_children == num_children.get(key, 0)
            assert node.num_records or node.num_children, "a forgotten block is still known"
            assert node.num_records or not node.num_holds
            if node.may_leave:
                queues = self._queue, self._group_to_queue[node.group]
                assert all(node in queue for queue in queues), "a block is out of reach"

    def _node(self, key: ChainKey) -> _Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key)
        return node

    def _use(self, node: _Node) -> None:
        self._tick += 1
        node.tick = self._tick
        self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.may_leave:
            self._queue.push(node)
            self._group_to_queue[node.group].push(node)


class _Node:
    """A resident block, or one that is known only as the parent of a resident block."""

    __slots__ = ("group", "key", "num_children", "num_holds", "num_records", "parent", "tick")

    def __init__(self, key: ChainKey) -> None:
        self.key = key
        self.parent: _Node | None = None
        self.group = ""
        self.tick = 0
        self.num_records = 0
        self.num_holds = 0
        self.num_children = 0

    @property
    def may_leave(self) -> bool:
        return self.num_records > 0 and not self.num_holds and not self.num_children


class _Queue:
    """Blocks that may leave, the least recently used first. An entry may come up too early, when its block
    was used since or may not leave any more, and is then renewed or dropped; it never comes up too late.

    So a use of a queued block costs one look-up, and nothing is removed at once as from an `IndexedHeap`,
    with which an eviction and the record that follows take half as long again.
    """

    def __init__(self) -> None:
        # The number of resident blocks, in a group's queue.
        self.num_blocks = 0
        self._heap: list[tuple[int, int, _Node]] = []
        self._queued: set[_Node] = set()
        self._num_pushes = 0
        self._tidy_at = 64

    def __contains__(self, node: _Node) -> bool:
        return node in self._queued

    def push(self, node: _Node) -> None:
        if node in self._queued:
            return
        if len(self._heap) >= self._tidy_at:
            self._heap = [entry for entry in self._heap if entry[2].may_leave]
            heapq.heapify(self._heap)
            self._queued = {entry[2] for entry in self._heap}
            self._tidy_at = 2 * len(self._heap) + 64
        self._queued.add(node)
        self._num_pushes += 1
        heapq.heappush(self._heap, (node.tick, self._num_pushes, node))

    def oldest(self) -> _Node | None:
        while self._heap:
            tick, _, node = self._heap[0]
            if node.may_leave and node.tick == tick:
                return node
            heapq.heappop(self._heap)
            self._queued.remove(node)
            if node.may_leave:
                self.push(node)
        return None
