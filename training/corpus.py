"""The corpus as token streams: files, chat and recall, each split in train and held-out.

    python -m training.corpus --stdlib DIR --docs DIR --out DIR [--tokenizer FILE]

`--stdlib` is the library folder of CPython 3.11.7 with its tests, `--docs` the `_sources` folder of Debian's
python3.11-doc. Each stream is one `.npz`: `ids` uint16, `starts` int32 offsets of its documents, `raw_bytes`.
A file, a docstring item or a chat is held out by the hash of its name, so that every run splits alike. Without
`--tokenizer` the ranks are learnt first and written to OUT/tiktoken.model.
"""

import argparse
import hashlib
import itertools
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken

from training import bpe, samples
from training.library_items import collect
from training.report import start_log

log = logging.getLogger(__name__)

SKIPPED = re.compile(
    r"site-packages|lib2to3/tests/data|pydoc_data|_sysconfigdata|config-3"
    r"|encodings/(cp|mac_|iso8859|koi8|hp_|kz|tis|ptcp)"
    r"|test/(encoded_modules|bad|badsyntax|tokenizedata|test_fstring_large)|lib-dynload"
)
IS_TEST = re.compile(r"(^|/)(test|tests|idle_test)/")
HOME = f"{Path.home()}/"
"""Nothing that names the machine a corpus was read on."""
NUM_CHATS, NUM_RECALL = 42_000, 6_000

File = tuple[str, str]


def is_held_out(name: str) -> bool:
    """One name in a hundred."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100 == 0


def read_files(stdlib: Path, docs: Path) -> tuple[list[File], list[File], list[File]]:
    """Sources, documentation, and as many of the tests as make a third of the characters."""
    python = list(_readable(stdlib, "*.py"))
    sources = [file for file in python if not IS_TEST.search(file[0])]
    tests = [file for file in python if IS_TEST.search(file[0])]
    pages = [(f"doc/{name}", text) for name, text in _readable(docs, "*.rst.txt")]
    room = sum(len(text) for _, text in itertools.chain(sources, pages)) // 2
    random.Random(1).shuffle(tests)
    kept = []
    for file in tests:
        if room > len(file[1]):
            kept.append(file)
            room -= len(file[1])
    return sources, pages, kept


def _readable(root: Path, pattern: str) -> Iterator[File]:
    for path in sorted(root.rglob(pattern)):
        name = str(path.relative_to(root))
        if SKIPPED.search(name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 200 < len(text) < 400_000 and "\0" not in text and HOME not in text:
            yield name, text


def contains_any(ids: list[int], needles: set[tuple[int, ...]], width: int) -> bool:
    """Whether any `width` consecutive ids are among the needles."""
    return any(tuple(ids[at : at + width]) in needles for at in range(len(ids) - width + 1))


def write_stream(path: Path, documents: list[list[int]], raw_bytes: int) -> None:
    """Shuffle (seed 3) and write one stream."""
    random.Random(3).shuffle(documents)
    starts = np.cumsum([0] + [len(document) for document in documents])[:-1].astype(np.int32)
    ids = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.uint16)
    np.savez_compressed(path, ids=ids, starts=starts, raw_bytes=raw_bytes)
    log.info("%s: %d documents, %d tokens, %.3f bytes/token", path.name, len(documents), len(ids), raw_bytes / len(ids))


def encode_segments(encoding: tiktoken.Encoding, segments: samples.Segments) -> list[int]:
    """Control ids as they are, text as ordinary text."""
    parts = ([part] if isinstance(part, int) else encoding.encode_ordinary(part) for part in segments)
    return list(itertools.chain.from_iterable(parts))


def _num_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _tokenizer(given: Path | None, out: Path, texts: Iterable[str]) -> tiktoken.Encoding:
    if given is not None:
        return bpe.load(given)
    bpe.save(bpe.train(texts), out / "tiktoken.model")
    log.info("tokenizer learnt")
    return bpe.load(out / "tiktoken.model")


def _texts(segments: samples.Segments) -> Iterator[str]:
    return (part for part in segments if isinstance(part, str))


def build(stdlib: Path, docs: Path, out: Path, tokenizer: Path | None) -> None:
    """Read, sample, split, encode and write the six streams."""
    out.mkdir(parents=True, exist_ok=True)
    sources, pages, tests = read_files(stdlib, docs)
    files = sources + pages + tests
    items = collect(sources, HOME)
    draw = random.Random(7)
    kept_files = {held: [file for file in files if is_held_out(file[0]) == held] for held in (False, True)}
    kept_items = {held: [item for item in items if is_held_out(f"item:{item.name}") == held] for held in (False, True)}
    filler = [
        paragraph
        for _, text in kept_files[False]
        for paragraph in re.findall(r"(?:.+\n){3,12}", text)[:12]
        if 150 < len(paragraph) < 900
    ]
    chats = {
        False: samples.chats(NUM_CHATS, kept_items[False], draw),
        True: samples.chats(300, kept_items[True], random.Random(8)),
    }
    lists = {
        False: [samples.recall(draw, filler) for _ in range(NUM_RECALL)],
        True: [samples.recall(random.Random(900 + index), filler) for index in range(60)],
    }
    learn_from = itertools.chain(
        (text for _, text in kept_files[False]),
        (text for segments in chats[False][:9000] for text in _texts(segments)),
        lists[False][:600],
    )
    encoding = _tokenizer(tokenizer, out, learn_from)
    for held, part in ((False, "train"), (True, "val")):
        texts = [text for _, text in kept_files[held]]
        for name, documents, raw_bytes in (
            ("files", [encoding.encode_ordinary(text) for text in texts], _num_bytes(texts)),
            (
                "chat",
                [encode_segments(encoding, segments) for segments in chats[held]],
                _num_bytes(itertools.chain.from_iterable(map(_texts, chats[held]))),
            ),
            ("recall", [encoding.encode_ordinary(text) for text in lists[held]], _num_bytes(lists[held])),
        ):
            write_stream(out / f"{name}_{part}.npz", [[*ids, bpe.EOS] for ids in documents], raw_bytes)
    (out / "split.json").write_text(json.dumps({"val_files": [name for name, _ in kept_files[True]]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()
    start_log()
    build(given.stdlib, given.docs, given.out, given.tokenizer)


if __name__ == "__main__":
    main()
