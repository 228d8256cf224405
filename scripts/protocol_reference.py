#!/usr/bin/env python3
"""Writes docs/protocol.md from protos/k3svc/v1 and the comments in there: scripts/protocol_reference.py

With --check it writes nothing and exits 1 when the file is not what it would write.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "protocol.md"
FILES = {
    "decode_service": "DecodeService: what clients call",
    "prefill_service": "PrefillService: what decode calls",
    "draft_service": "DraftService: what decode and prefill call",
    "admin_service": "AdminService: in every role",
    "types": "Types that several services use",
}
HEAD = """# Protocol

Written by `scripts/protocol_reference.py` from `protos/k3svc/v1/`; do not edit.

The package is `k3svc.v1`. Every role also serves `grpc.health.v1.Health`, server reflection and channelz, so that tools
need no protos ([observability.md](observability.md#looking-at-a-service-by-hand)); a client of your own starts at
[usage.md](usage.md#grpc). Errors carry a `google.rpc.ErrorInfo` with a reason, all of which are in
[errors.md](errors.md). Fields are only ever added: numbers keep their meaning, and unknown fields are ignored.
"""

Place = tuple[int, ...]
"""Place of an element in its file, as SourceCodeInfo gives it."""


def page() -> str:
    """The text of docs/protocol.md."""
    files = {Path(file.name).stem: file for file in descriptors().file}
    if files.keys() != FILES.keys():
        raise SystemExit(f"protos/k3svc/v1 has {sorted(files)}; this script describes {sorted(FILES)}")
    parts = [HEAD]
    for stem, title in FILES.items():
        file = files[stem]
        comments = {tuple(place.path): place for place in file.source_code_info.location}
        texts = {path: paragraph(place.leading_comments) for path, place in comments.items()}
        parts.append(f"\n## {title}\n\n`{file.name}`. {texts.get((2,), '')}\n")
        parts += [service(item, texts, (6, index)) for index, item in enumerate(file.service)]
        parts += [message(item, texts, (4, index)) for index, item in enumerate(file.message_type)]
        parts += [enum(item, texts, (5, index)) for index, item in enumerate(file.enum_type)]
    return "".join(parts)


def descriptors() -> FileDescriptorSet:
    """What protoc makes of the protos, comments included."""
    folder = ROOT / "protos"
    sources = [str(path) for path in sorted((folder / "k3svc" / "v1").glob("*.proto"))]
    include = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "set"
        options = ["--include_source_info", f"--descriptor_set_out={file}", f"-I{folder}", f"-I{include}"]
        if protoc.main(["protoc", *options, *sources]):
            raise SystemExit("protoc failed")
        return FileDescriptorSet.FromString(file.read_bytes())


def service(item: ServiceDescriptorProto, texts: Mapping[Place, str], path: Place) -> str:
    rows = []
    for index, method in enumerate(item.method):
        asked = ("stream " if method.client_streaming else "") + link(method.input_type)
        given = ("stream " if method.server_streaming else "") + link(method.output_type)
        rows.append(f"| `{method.name}` | {asked} | {given} | {texts[(*path, 2, index)]} |")
    return table(f"Service {item.name}", texts[path], "method | request | response |", rows)


def message(item: DescriptorProto, texts: Mapping[Place, str], path: Place) -> str:
    if item.nested_type and not all(nested.options.map_entry for nested in item.nested_type):
        raise SystemExit(f"{item.name}: this script does not describe nested messages")
    maps = {nested.name: nested for nested in item.nested_type}
    rows = [
        f"| {field.number} | `{field.name}` | {kind(field, maps)} | {remark(item, field)}{texts[(*path, 2, index)]} |"
        for index, field in enumerate(item.field)
    ]
    return table(item.name, texts[path], "number | field | type |", rows)


def enum(item: EnumDescriptorProto, texts: Mapping[Place, str], path: Place) -> str:
    rows = [
        f"| {value.number} | `{value.name}` | {texts[(*path, 2, index)]} |" for index, value in enumerate(item.value)
    ]
    return table(item.name, texts[path], "number | value |", rows)


def table(title: str, text: str, head: str, rows: list[str]) -> str:
    made = f"\n### {title}\n\n{text}\n"
    if rows:
        made += f"\n| {head} |\n|{' --- |' * (head.count('|') + 1)}\n" + "\n".join(rows) + "\n"
    return made


def kind(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    """The type as a proto writes it; messages and enums of ours are links."""
    if entry := maps.get(field.type_name.rpartition(".")[2]):
        key, value = (kind(part, {}) for part in entry.field)
        return f"map of {key} to {value}"
    name = link(field.type_name) if field.type_name else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def remark(item: DescriptorProto, field: FieldDescriptorProto) -> str:
    if field.proto3_optional:
        return "Optional. "
    if field.HasField("oneof_index"):
        names = [other.name for other in item.field if other.HasField("oneof_index") and same_oneof(other, field)]
        return f"One of {', '.join(names)}. "
    return ""


def same_oneof(one: FieldDescriptorProto, other: FieldDescriptorProto) -> bool:
    return not one.proto3_optional and one.oneof_index == other.oneof_index


def link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def paragraph(comment: str) -> str:
    """A comment as one line that a table takes."""
    return " ".join(comment.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not current")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run scripts/protocol_reference.py")


if __name__ == "__main__":
    main()
