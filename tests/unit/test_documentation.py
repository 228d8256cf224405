"""What the pages name exists: links and anchors, make targets, commands and their options, files, keys, reasons."""

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from k3svc.cli.app import app
from k3svc.config import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "training/**/*.md", "models/**/*.md")
    for path in ROOT.glob(pattern)
)
FOLDERS = "benchmarks|deploy|docs|k3svc|models|protos|scripts|services|tests|training"
FENCE = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
TOPS = (ROOT, ROOT / "protos")
COMMANDS: Any = typer.main.get_command(app)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The text without what stands in code blocks."""
    return FENCE.sub("", page.read_text())


def spans(text: str) -> list[str]:
    return SPAN.findall(text)


def code_lines(page: Path) -> list[str]:
    """Lines of code blocks, those that a backslash continues in one."""
    text = "\n".join(match[0] for match in FENCE.finditer(page.read_text()))
    return text.replace("\\\n", " ").splitlines()


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings: lower case, without punctuation, numbered where they repeat."""
    seen: Counter[str] = Counter()
    made = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or not path.is_relative_to(ROOT):
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(path):
            yield f"{target}: no such heading"


def commands(page: Path) -> Iterator[list[str]]:
    """Words after `k3svc` of the command lines in a page."""
    for line in [*code_lines(page), *spans(prose(page))]:
        command = re.search(r"^(?:\$ )?(?:\S*/)?k3svc (?!\||of |serves |speaks )(.*)", line.strip())
        if command and (words := shlex.split(re.sub(r"(^|\s)#.*|[…]|\s\.\.\.", "", command[1]), posix=True)):
            yield list(until_shell(words))


def until_shell(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word in ("|", ">", "&", "&&", ";", "\\"):
            return
        yield word


def subcommands(command: Any) -> dict[str, Any]:
    """Of a group by name; none of others."""
    return getattr(command, "commands", {})


def problem_of(words: Sequence[str]) -> str | None:
    """What of a command line is unknown to the command."""
    command, path = COMMANDS, ["k3svc"]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        *("--help", "-h")
    }
    for word in words:
        if word in subcommands(command):
            command = subcommands(command)[word]
            path.append(word)
            known |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        elif path == ["k3svc"] and word.isalpha():
            return f"{' '.join(path)}: no command {word}"
        elif word.startswith("--") and word.partition("=")[0] not in known:
            return f"{' '.join(path)}: no option {word}"
    return None


def options_of(*path: str) -> set[str]:
    command = COMMANDS
    for word in path:
        command = subcommands(command)[word]
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    text = (ROOT / page).read_text()
    level = heading.partition(" ")[0]
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{1,{len(level)}}} ", text[start:], re.MULTILINE)
    return text[start : start + end.start()] if end else text[start:]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_anchors_lead_somewhere(page: Path):
    assert list(broken_links(page)) == []


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    listed = {target.partition("#")[0] for target in LINK.findall(prose(index))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} - listed == set()


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# A `b`: c-d\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n")
    good = "[a](other.md#a-b-c-d) [b](other.md#twice-1) [c](#here) [d](https://x.invalid/y) `[x](nowhere)`\n\n# Here\n"
    page.write_text(good.replace("`[x](nowhere)`", "") + "\n```\n[x](nowhere.md)\n```\n")
    assert list(broken_links(page)) == []
    page.write_text("[a](gone.md) [b](other.md#twice-2) [c](other.md#no-heading) [d](../../etc)\n")
    assert [line.partition(":")[0] for line in broken_links(page)] == [
        *("gone.md", "other.md#twice-2", "other.md#no-heading", "../../etc"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_options_and_targets_exist(page: Path):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    targets = {*phony[1].split(), "{proto,fmt,check,test,sim,bench,help}"}
    lines = [*code_lines(page), *spans(prose(page))]
    made = [line for line in lines if re.match(r"(\$ )?make [a-z]", line)]
    unknown = [line for line in made if line.removeprefix("$ ").split()[1] not in targets]
    problems = [f"{' '.join(words)}: {problem}" for words in commands(page) if (problem := problem_of(words))]
    assert unknown + problems == []


def test_unknown_commands_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        '`k3svc upp` `k3svc up --prefil 2`\n```\n$ .venv/bin/k3svc generate \\\n  --nope "a b" | jq\n'
        "k3svc --tls-ca ca.pem bench serve --concurrency 2   # --not-this\nk3svc bench sweep --burstiness 2\n```\n"
    )
    assert [problem for words in commands(page) if (problem := problem_of(words))] == [
        "k3svc generate: no option --nope",
        "k3svc bench sweep: no option --burstiness",
        "k3svc: no command upp",
        "k3svc up: no option --prefil",
    ]


def all_commands(command: Any = COMMANDS, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Of the command line, without groups."""
    if not subcommands(command):
        yield path, command
    for word, part in subcommands(command).items():
        yield from all_commands(part, (*path, word))


@pytest.mark.parametrize(("path", "command"), list(all_commands()), ids=str)
def test_the_help_of_a_command_has_an_example_that_fits(path: tuple[str, ...], command: Any):
    example = re.search(r"^\s*Example: k3svc (.+)$", command.help, re.MULTILINE)
    assert example is not None
    words = shlex.split(example[1])
    assert tuple(words[: len(path)]) == path
    assert problem_of(words) is None


@pytest.mark.parametrize(
    ("command", "page", "heading"),
    [
        (("up",), "docs/usage.md", "### up"),
        (("generate",), "docs/usage.md", "### generate"),
        (("bench", "serve"), "docs/load-testing.md", "## bench serve"),
    ],
)
def test_every_option_is_told(command: tuple[str, ...], page: str, heading: str):
    told = {word for span in spans(section(page, heading)) for word in re.findall(r"--[a-z][a-z-]*", span)}
    shared = {"--endpoint", "--model", "--device", "--set"}  # told once, above
    assert sorted(options_of(*command) - told - shared - {"--max-concurrency", "--restart"}) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_files_modules_and_keys_exist(page: Path):
    sections = {field.name: getattr(Config(), field.name) for field in dataclasses.fields(Config)}
    has_keys = page.name != "kubernetes.md"  # whose keys are values of the chart
    missing = []
    for span in spans(prose(page)):
        path = span.partition(":")[0]
        if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+", path) and not any((top / path).exists() for top in TOPS):
            missing.append(span)
        key = re.match(r"(?:--set )?([a-z]+)\.([a-z_]+)(?: = .*|=.*)?$", span)
        if has_keys and key and key[1] in sections and not hasattr(sections[key[1]], key[2]):
            missing.append(span)
    for line in [*code_lines(page), *spans(prose(page))]:
        for module in re.findall(r"python3? -m ((?:benchmarks|k3svc|services|tests|training)[\w.]*\w)", line):
            path = ROOT / module.replace(".", "/")
            if not (path.is_dir() or path.with_suffix(".py").exists()) and "ROLE" not in module:
                missing.append(module)
        for given in re.findall(r"--set '?([a-z]+\.[a-z_]+)=", line) if has_keys else ():
            is_key = given == "section.key" or hasattr(sections.get(given.partition(".")[0]), given.partition(".")[2])
            missing += [] if is_key else [given]
    assert missing == []


def reasons_in_code() -> set[str]:
    """Of the classes of errors, and of all `reason=` that errors are made with."""
    found: set[str] = set()
    for file in [*ROOT.glob("k3svc/**/*.py"), *ROOT.glob("services/**/*.py")]:
        if "testing" in file.parts or "v1" in file.parts:
            continue
        tree = ast.parse(file.read_text())
        constants = {
            target.id: str(node.value.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            given: list[ast.expr] = []
            if isinstance(node, ast.ClassDef):
                given = [
                    line.value
                    for line in node.body
                    if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == ["reason"]
                ]
            elif isinstance(node, ast.Call):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            for value in given:
                if isinstance(value, ast.Constant):
                    found.add(str(value.value))
                elif isinstance(value, ast.Name) and value.id in constants:
                    found.add(constants[value.id])
                else:
                    # Passed on: an error's own, a parameter, or no error's at all.
                    passed_on = ("error.reason", "reason", "info.reason")
                    assert ast.unparse(value) in passed_on, f"{file}: reason={ast.unparse(value)}"
    return found


def test_git_ignores_what_commands_of_the_pages_make_in_a_checkout():
    made = set[str]()
    for page in PAGES:
        for words in commands(page):
            made |= {value for option, value in pairwise(words) if option in ("--out", "--report", "--log-dir")}
            made |= {word.partition("=")[2] for word in words if word.startswith("tracing.file=")}
        made |= set(re.findall(r"^mkdir -p ([a-z]+)", "\n".join(code_lines(page)), re.MULTILINE))
        made |= set(re.findall(r"Save as `([^`]+)`", prose(page)))
    lowercase = {name for name in made if re.fullmatch(r"[a-z.]+", name)}
    assert {"ask.py", "client", "report.html", "request.json", "spans.jsonl"} <= lowercase
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert {name for name in lowercase if not {f"/{name}", f"/{name}/"} & set(lines)} == set()


def test_every_reason_of_an_error_has_cause_and_cure():
    rows = re.findall(r"^\| `([A-Z_]+)` \|(.+)\|$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    told = [reason for reason, _ in rows]
    assert sorted(told) == sorted(reasons_in_code())
    assert all(len(cell.strip()) > 3 for _, cells in rows for cell in cells.split("|"))


def test_the_protocol_reference_is_current():
    script = ROOT / "scripts" / "protocol_reference.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    page = (ROOT / "docs/protocol.md").read_text()
    for proto in (ROOT / "protos/k3svc/v1").glob("*.proto"):
        for kind, element in re.findall(r"^(service|message|enum) (\w+)", proto.read_text(), re.MULTILINE):
            assert f"\n### {'Service ' if kind == 'service' else ''}{element}\n" in page
        for field, number in re.findall(r"^\s+(?:[\w.<>, ]+) (\w+) = (\d+);$", proto.read_text(), re.MULTILINE):
            assert f"| {number} | `{field}` |" in page
