"""What chat samples ask about: the documented names of the standard library and of its C modules."""

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

SKIPPED_SOURCES = re.compile(r"idlelib|turtledemo|lib2to3|distutils|ensurepip")
C_MODULES = [
    "math",
    "cmath",
    "time",
    "itertools",
    "functools",
    "operator",
    "sys",
    "os",
    "array",
    "zlib",
    "binascii",
    "_struct",
    "struct",
    "select",
    "socket",
    "errno",
    "signal",
    "marshal",
    "gc",
    "atexit",
    "unicodedata",
    "_random",
    "collections",
    "_json",
    "_csv",
    "_io",
    "io",
    "_thread",
    "posix",
]
BUILTIN_TYPES = (
    str, bytes, bytearray, list, dict, set, frozenset, tuple, int, float, complex, range, memoryview,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Item:
    """A documented name."""

    name: str
    kind: str
    """function, method, class or module"""
    signature: str | None
    doc: str | None
    code: str | None


def collect(sources: list[tuple[str, str]], private: str) -> list[Item]:
    """Items of (path, text) sources and of the interpreter's C modules; docs that contain `private` are left out."""
    items: dict[str, Item] = {}
    for path, text in sources:
        if SKIPPED_SOURCES.search(path):
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        module = path[:-3].replace("/", ".").removesuffix(".__init__")
        for item in _definitions(tree, module, module, text.splitlines()):
            items.setdefault(item.name, item)
        doc = ast.get_docstring(tree)
        if doc:
            items[module] = Item(name=module, kind="module", signature=f"import {module}", doc=doc, code=None)
    for item in _compiled(private):
        items.setdefault(item.name, item)
    return list(items.values())


def _definitions(node: ast.AST, prefix: str, module: str, lines: list[str]) -> Iterator[Item]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name, doc = f"{prefix}.{child.name}", ast.get_docstring(child)
        if isinstance(child, ast.ClassDef):
            bases = f"({', '.join(map(ast.unparse, child.bases))})" if child.bases else ""
            kind, signature = "class", f"class {child.name}{bases}:"
        else:
            kind = "function" if prefix == module else "method"
            signature = f"def {child.name}({ast.unparse(child.args)}):"
        end = child.end_lineno or child.lineno
        code = textwrap.dedent("\n".join(lines[child.lineno - 1 : end]))
        if doc or len(code) < 700:
            shown = code if len(code) < 900 and end - child.lineno < 25 else None
            yield Item(name=name, kind=kind, signature=signature, doc=doc, code=shown)
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, name, module, lines)


def _compiled(private: str) -> Iterator[Item]:
    owners: list[tuple[str, ModuleType | type]] = [("builtins", builtins)]
    owners += [(name, importlib.import_module(name)) for name in C_MODULES]
    owners += [(kind.__name__, kind) for kind in BUILTIN_TYPES]
    for owner, holder in owners:
        for key in sorted(dir(holder)):
            value = getattr(holder, key)
            if key.startswith("__") or not callable(value) or not isinstance(value.__doc__, str):
                continue
            if private in value.__doc__:
                continue
            try:
                signature: str | None = f"def {key}{inspect.signature(value)}:"
            except (ValueError, TypeError):
                signature = None
            if signature and "0x" in signature:
                signature = None
            yield Item(
                name=key if owner == "builtins" else f"{owner}.{key}",
                kind="class" if inspect.isclass(value) else "function",
                signature=signature,
                doc=inspect.cleandoc(value.__doc__),
                code=None,
            )
