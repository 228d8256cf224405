"""PrefixCache: pages and states of prompts, kept for later prompts that begin alike. Numbers only, no memory.

A tree of pages: a node is a full page of tokens after those of its ancestors, compared token by token. A node may have
a snapshot, the slot that holds the KDA and conv states after its last token; a prompt can go on from there alone, since
a recurrent state cannot be cut back. Leaves have a snapshot, or a prompt that lives.

A prompt holds the path of nodes that it begins with, its own pages among them or not, until it ends. What nobody holds
is idle: it counts as free, and is given up for any prompt that needs its memory, leaves first, the longest unused
first.
"""

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from k3svc.core.pages import PagePool
from k3svc.core.slots import SlotPool

MAX_BEGINNINGS = 4096
"""Beginnings of short prompts that are remembered."""


@dataclass(kw_only=True, eq=False)
class Node:
    """One cached page. Owned by the cache; `users` are the prompts that hold it or what comes after it."""

    namespace: str
    """Prompts of another one never find it."""
    parent: "Node | None"
    """None: the root of the namespace, which has no page."""
    token_ids: tuple[int, ...]
    page: int
    depth: int
    """Pages from the first one to this one."""
    block_hash: int
    """Of namespace and tokens up to here, signed, 64 bits; for those who are told of the contents."""
    children: "dict[tuple[int, ...], Node]" = field(default_factory=dict)
    users: int = 0
    snapshot: int | None = None
    readers: int = 0
    """Steps that copy from the snapshot."""
    features: bytes | None = None
    """Draft features of the page's tokens; None: nobody made them."""
    is_cached: bool = True
    """Whether prompts can still find it."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Pages that can be found from now on, one after the other."""

    parent_hash: int | None
    """None: the first begins the prompt."""
    namespace: str
    block_hashes: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A page that cannot be found any more."""

    block_hash: int


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """Nothing can be found any more."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, kw_only=True)
class Match:
    """How a prompt begins."""

    node: Node
    """Where it can go on from; a root: at its first token."""
    num_tokens: int
    """Tokens up to there."""
    num_known: int
    """Tokens whose pages are cached, with or without a snapshot at their end."""


@dataclass(kw_only=True)
class CacheCounts:
    """What the cache did since its start."""

    queried_tokens: int = 0
    """Tokens of the prompts that were admitted."""
    hit_tokens: int = 0
    """Tokens of them that were not computed."""
    snapshots: int = 0
    """Snapshots taken."""
    evicted_pages: int = 0
    evicted_snapshots: int = 0


class PrefixCache:
    """The tree over a pool of pages, which prompts share, and a pool of snapshot slots of its own."""

    def __init__(self, *, pages: PagePool, slots: SlotPool, page_size: int, interval: int, min_tokens: int = 0) -> None:
        """Snapshots lie at multiples of `interval` tokens, itself a multiple of `page_size`. A prompt of fewer than
        `min_tokens` is worth one only if another began alike, since a further chunk costs it much.
        """
        assert interval % page_size == 0, f"snapshots every {interval} tokens on pages of {page_size}"
        self.interval = interval
        self.slots = slots
        self.counts = CacheCounts()
        self.on_event: Callable[[CacheEvent], None] = lambda _event: None
        self._pages = pages
        self._page_size = page_size
        self._min_tokens = min_tokens
        self._beginnings: OrderedDict[int, None] = OrderedDict()
        """Hashes of the first `interval` tokens of short prompts, the longest unseen first."""
        self._roots: dict[str, Node] = {}
        self._nodes: dict[Node, None] = {}
        """All that can be found, but roots."""
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """Nodes without users, the longest unused first; a node before its parent, so that the first is a leaf."""
        self._snapshots: OrderedDict[Node, None] = OrderedDict()
        """Nodes with a snapshot, the longest unused first."""

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Pages that are as good as free."""
        return len(self._idle)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def match(self, namespace: str, token_ids: Sequence[int], *, features_from: int | None = None) -> Match:
        """The longest way into a prompt, which leaves its last token at least. With `features_from` the features of all
        tokens from there on must be known.
        """
        node = best = self._roots.get(namespace) or _new_root(namespace)
        is_usable = True
        size = self._page_size
        for tokens in self._blocks(token_ids, 0, len(token_ids) - 1):
            child = node.children.get(tokens)
            if child is None:
                break
            node = child
            if features_from is not None and node.depth * size > features_from and node.features is None:
                is_usable = False
            if is_usable and node.snapshot is not None:
                best = node
        return Match(node=best, num_tokens=best.depth * size, num_known=node.depth * size)

    def is_worth_a_cut(self, namespace: str, token_ids: Sequence[int]) -> bool:
        """Whether a chunk of a prompt that is about to run should end early for the sake of a snapshot near its end.
        A hash that two beginnings share costs one of them a cut.
        """
        if len(token_ids) >= self._min_tokens:
            return True
        beginning = hash((namespace, tuple(token_ids[: self.interval])))
        is_known = beginning in self._beginnings
        self._beginnings[beginning] = None
        self._beginnings.move_to_end(beginning)
        while len(self._beginnings) > MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)
        return is_known

    def hold(self, node: Node) -> None:
        """A prompt begins with what leads to `node`, the node of a match."""
        if node.parent is None:
            self._roots[node.namespace] = node
        for step in _upwards(node):
            self._use(step)
        if node.snapshot is not None:
            self._snapshots.move_to_end(node)

    def release(self, node: Node) -> None:
        """The prompt has ended. Undoes `hold` and what `insert` held for it."""
        for step in _upwards(node):
            step.users -= 1
            if step.users == 0 and step.is_cached and step.depth:
                self._idle[step] = None
        found = next((step for step in _upwards(node) if step.is_cached), None)
        if found is not None:
            self._prune(found)

    def make_room(self, count: int) -> bool:
        """Whether `count` pages of the pool are free, after giving up idle ones; False: nothing was given up."""
        if count > self._pages.num_free + len(self._idle):
            return False
        pages, snapshots = len(self._nodes), len(self._snapshots)
        while count > self._pages.num_free:
            self._remove(next(iter(self._idle)))
        self.counts.evicted_pages += pages - len(self._nodes)
        self.counts.evicted_snapshots += snapshots - len(self._snapshots)
        return True

    def take_slot(self, *, evict: bool) -> int | None:
        """A slot for a snapshot, that of the longest unused one if need be and allowed; None: there is none."""
        if self.slots.num_free == 0 and evict:
            node = next((node for node in self._snapshots if not node.readers), None)
            if node is not None:
                self.counts.evicted_snapshots += 1
                self._drop_snapshot(node)
                self._prune(node)
        taken = self.slots.allocate(1)
        return None if taken is None else taken[0]

    def is_known(self, node: Node, token_ids: Sequence[int], num_tokens: int, *, with_features: bool) -> bool:
        """Whether the prompt that holds `node` would add nothing by its states after num_tokens, and features."""
        for tokens in self._blocks(token_ids, node.depth, num_tokens):
            child = node.children.get(tokens)
            if child is None or (with_features and child.features is None):
                return False
            node = child
        return node.snapshot is not None

    def insert(
        self,
        node: Node,
        token_ids: Sequence[int],
        pages: Sequence[int],
        num_tokens: int,
        slot: int,
        features: Callable[[int], bytes | None] = lambda _index: None,
    ) -> Node:
        """Keeps the first num_tokens of the prompt that holds `node`, and the states after them, in `slot`. Returns
        what the prompt holds from now on. `features(i)` gives those of its page i.
        """
        if not node.is_cached:
            self.slots.free(slot)
            return node
        stored: list[Node] = []
        for tokens in self._blocks(token_ids, node.depth, num_tokens):
            child = node.children.get(tokens)
            if child is None:
                child = self._add(node, tokens, pages[node.depth])
                stored.append(child)
            self._use(child)
            node = child
            if node.features is None:
                node.features = features(node.depth - 1)
        if node.snapshot is None:
            node.snapshot = slot
            self._snapshots[node] = None
            self.counts.snapshots += 1
        else:
            self.slots.free(slot)
        if stored:
            self.on_event(_stored(stored))
        return node

    def begin_read(self, node: Node) -> None:
        """A step copies from the snapshot of `node` until `end_read`; its slot is not given away."""
        assert node.snapshot is not None, "nothing to go on from"
        node.readers += 1

    def end_read(self, node: Node) -> None:
        node.readers -= 1
        if not node.readers and not node.is_cached and node.snapshot is not None:
            self.slots.free(node.snapshot)
            node.snapshot = None

    def distrust(self, node: Node) -> None:
        """Forgets all that begins with the first page of what leads to `node`: something there may be wrong."""
        top = next((step for step in _upwards(node) if step.depth == 1), None)
        if top is None or not top.is_cached:
            return
        for step in reversed(list(_downwards(top))):
            if step.is_cached:
                self._remove(step)

    def clear(self) -> int:
        """Forgets everything; what prompts hold goes when they end. Returns the number of pages."""
        count = len(self._nodes)
        for node in list(self._nodes):
            self._forget(node)
        for root in self._roots.values():
            root.is_cached = False
            root.children.clear()
        self._roots.clear()
        self.on_event(Cleared())
        return count

    def contents(self) -> Iterator[Stored]:
        """What can be found, parents first."""
        for root in self._roots.values():
            for node in _downwards(root):
                if node.depth:
                    yield _stored([node])

    def path(self, node: Node) -> list[Node]:
        """The nodes of the pages up to `node`, the first page first."""
        return [step for step in _upwards(node) if step.depth][::-1]

    def pages(self) -> list[int]:
        """The cached ones."""
        return [node.page for node in self._nodes]

    def check(self, held: Sequence[Node], *, num_pending: int) -> None:
        """Raises AssertionError unless tree, counts and pools agree. `held`: what each living prompt holds;
        num_pending: snapshot slots that steps write to.
        """
        found = [node for root in self._roots.values() for node in _downwards(root)]
        users = Counter(node for end in held for node in _upwards(end))
        for node in {*found, *users}:
            assert node.users == users[node], f"{node.users} users, {users[node]} hold a node"
            assert node.is_cached == (node in self._nodes or self._roots.get(node.namespace) is node), "lost node"
            assert node.children or node.snapshot is not None or node.users, "a useless leaf"
        pages = [node for node in found if node.depth]
        assert set(pages) == self._nodes.keys() and len({node.page for node in pages}) == len(pages), "nodes lost"
        assert {node for node in pages if not node.users} == self._idle.keys(), "idle pages miscounted"
        seen: set[Node] = set()
        for node in self._idle:
            assert all(child in seen for child in node.children.values()), "a page is given up before what follows it"
            seen.add(node)
        assert {node for node in pages if node.snapshot is not None} == self._snapshots.keys(), "snapshots lost"
        self.slots.check()
        leaving = sum(1 for node in users if not node.is_cached and node.snapshot is not None)
        in_use = self.slots.num_slots - self.slots.num_free
        assert in_use == len(self._snapshots) + leaving + num_pending, "snapshot slots lost"

    def _blocks(self, token_ids: Sequence[int], first: int, num_tokens: int) -> Iterator[tuple[int, ...]]:
        """Tokens of the full pages from page `first` on."""
        size = self._page_size
        for index in range(first, num_tokens // size):
            yield tuple(token_ids[index * size : (index + 1) * size])

    def _add(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        self._pages.share([page])
        data = struct.pack(f"<q{len(tokens)}I", parent.block_hash, *tokens)
        node = Node(
            namespace=parent.namespace,
            parent=parent,
            token_ids=tokens,
            page=page,
            depth=parent.depth + 1,
            block_hash=_hash(data),
        )
        parent.children[tokens] = node
        self._nodes[node] = None
        return node

    def _use(self, node: Node) -> None:
        node.users += 1
        self._idle.pop(node, None)

    def _prune(self, node: Node) -> None:
        """Nobody can go on from a leaf without a snapshot."""
        while node.is_cached and not (node.children or node.users or node.snapshot is not None):
            if node.parent is None:
                node.is_cached = False
                del self._roots[node.namespace]
                return
            self._forget(node)
            del node.parent.children[node.token_ids]
            self.on_event(Removed(block_hash=node.block_hash))
            node = node.parent

    def _remove(self, node: Node) -> None:
        """Takes a leaf away, whoever holds it, and what it leaves without use."""
        assert node.parent is not None and not node.children, "not a leaf"
        self._forget(node)
        del node.parent.children[node.token_ids]
        self.on_event(Removed(block_hash=node.block_hash))
        self._prune(node.parent)

    def _forget(self, node: Node) -> None:
        node.is_cached = False
        node.children.clear()
        del self._nodes[node]
        self._idle.pop(node, None)
        if node.snapshot is not None:
            self._drop_snapshot(node)
        self._pages.free([node.page])

    def _drop_snapshot(self, node: Node) -> None:
        """Gives its slot back, now or when no step reads it any more."""
        del self._snapshots[node]
        if not node.readers:
            assert node.snapshot is not None
            self.slots.free(node.snapshot)
            node.snapshot = None


def _new_root(namespace: str) -> Node:
    return Node(
        namespace=namespace, parent=None, token_ids=(), page=0, depth=0, block_hash=_hash(b"root" + namespace.encode())
    )


def _hash(data: bytes) -> int:
    number: int = struct.unpack("<q", hashlib.blake2b(data, digest_size=8).digest())[0]
    return number


def _upwards(node: Node) -> Iterator[Node]:
    """The node and all that leads to it, the root last."""
    step: Node | None = node
    while step is not None:
        yield step
        step = step.parent


def _downwards(node: Node) -> Iterator[Node]:
    """The node and all below it, parents first."""
    rest = [node]
    while rest:
        step = rest.pop()
        yield step
        rest += step.children.values()


def _stored(nodes: Sequence[Node]) -> Stored:
    parent = nodes[0].parent
    assert parent is not None
    return Stored(
        parent_hash=parent.block_hash if parent.depth else None,
        namespace=parent.namespace,
        block_hashes=tuple(node.block_hash for node in nodes),
        token_ids=tuple(node.token_ids for node in nodes),
    )
