"""Byte-level BPE in the layout of the public tokenizer: trains the ranks of `tiktoken.model`."""

import base64
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex
import tiktoken

from k3svc.text.tokenizer import SPLIT_PATTERN

NUM_RANKS = 3840
NUM_CONTROLS = 256
BOS, EOS, END_OF_MESSAGE, OPEN, CLOSE, SEPARATOR = range(NUM_RANKS, NUM_RANKS + 6)

Pair = tuple[bytes, bytes]


def train(texts: Iterable[str], size: int = NUM_RANKS) -> list[bytes]:
    """Learn `size` ranks: the 256 bytes, then one merge a rank, most frequent pair first, on ties smaller bytes."""
    pattern = regex.compile(SPLIT_PATTERN, regex.V1)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(pattern.findall(text))
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in counts.items()]
    ranks = [bytes([byte]) for byte in range(256)]
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, (parts, count) in enumerate(words):
        for pair in itertools.pairwise(parts):
            pairs[pair] += count
            places[pair].add(index)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    known = set(ranks)
    while len(ranks) < size:
        count, pair = heapq.heappop(heap)
        if -count != pairs.get(pair, 0):
            continue
        if pair[0] + pair[1] not in known:
            known.add(pair[0] + pair[1])
            ranks.append(pair[0] + pair[1])
        touched: set[Pair] = set()
        for index in places.pop(pair, ()):
            touched |= _merge(words, index, pair, pairs, places)
        pairs.pop(pair, None)
        for other in touched:
            if pairs.get(other, 0) > 0:
                heapq.heappush(heap, (-pairs[other], other))
    return ranks


def _merge(
    words: list[tuple[list[bytes], int]],
    index: int,
    pair: Pair,
    pairs: Counter[Pair],
    places: defaultdict[Pair, set[int]],
) -> set[Pair]:
    """Merge `pair` in one word; the pairs whose counts changed."""
    parts, count = words[index]
    touched: set[Pair] = set()
    for other in itertools.pairwise(parts):
        pairs[other] -= count
        touched.add(other)
    merged: list[bytes] = []
    at = 0
    while at < len(parts):
        if at + 1 < len(parts) and (parts[at], parts[at + 1]) == pair:
            merged.append(pair[0] + pair[1])
            at += 2
        else:
            merged.append(parts[at])
            at += 1
    words[index] = (merged, count)
    for other in itertools.pairwise(merged):
        pairs[other] += count
        places[other].add(index)
        touched.add(other)
    return touched


def save(ranks: list[bytes], path: Path) -> None:
    """Write ranks in tiktoken's format."""
    path.write_text("".join(f"{base64.b64encode(rank).decode()} {index}\n" for index, rank in enumerate(ranks)))


def load(path: Path) -> tiktoken.Encoding:
    """The encoder of a `tiktoken.model`, without its control tokens: text stays text."""
    lines = (line.split() for line in path.read_text().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("nano", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
