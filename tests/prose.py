"""Find the sentences that break docs/writing.md::

    python tests/prose.py                    # every violation, with its line
    python tests/prose.py README.md docs     # in these files and folders
    python tests/prose.py --words README.md  # words, sentences, and those within 25 words

The prose of a page is its Markdown outside of code. The prose of Python code is its docstrings and
comments; in the package also its texts: errors, warnings and printed texts. Proselint finds general
faults. The rules below find those that it misses.
"""

import argparse
import ast
import html
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 25  # words of a sentence
READ = (
    "*.md",
    "docs/**/*.md",
    "tutorials/*.ipynb",
    "benchmarks/*.md",
    "pyro_dp/**/*.md",
    "pyro_dp/**/*.py",
    "docs/*.py",
    "benchmarks/*.py",
    "examples/**/*.py",
    "tests/**/*.py",
)
CODE = "Code"  # a word that stands for code, numbers and formulas
_EXAMPLE = -1  # less than any indentation: a doctest and its output end at the next blank line

RULES = {
    "private word": r"(?<!-)\b(?:told|known|shown|given|places?|ways?)\b",
    "of which": r"\bof which\b",
    "tell of": r"\b(?:tell|tells|told|know|knows|knew|speak|speaks) of\b",
    "such that": r"\bsuch that\b|\bso that\b.*\bit\b",
    "but for": r"\bbut for\b",
    "nameless subject": r"^(?:and |but |or )?(?:who|what)(?:ever)?\b(?=.*[.:]$)"
    r"|[,;:] (?:and |but )?(?:who|what)(?:ever)? \w+s\b(?!.*\?$)"
    r"|\bwhoever\b|\b(?:against|for|by|from|with|than|as) who\b",
    "inverted": r"^(?:of|where|public|protected|not protected|missing|besides) "
    r"(?!course\b|to\b|next\b)(?!.*\?$)",
    "pun": r"\bno (\w+) is (?:no|a) \w+",
    "chain of colons": r"(?<!\d):\s(?!//).*:\s",
    "in one's place": r"\bin (?:its|their|one's) place\b|\bin place of\b",
    "is to be": r"\b(?:(?:is|are|was|were) (?:not )?to (?:be|have)|to be had|need not be)\b",
    "repeated word": r"\b(?!(?:code)+\b)([a-z]{2,}) \1\b",
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in RULES.items()}
# Straight quotes are ours, a repeated word has a rule above, and a record may be broken.
NOT_OURS = {"typography": False, "lexical_illusions": False}
ALLOWED = "broken record"
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(`*_]*[A-Z0-9\[{<])")
ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|cf|vs|al|eq|no|approx|fig|p|pp|[A-Z])\.$", re.IGNORECASE)


class Passage(NamedTuple):
    """A paragraph, an item, a cell or a comment, on one line, and where it begins."""

    line: int
    text: str


class Violation(NamedTuple):
    line: int
    rule: str
    sentence: str


def passages(path: Path) -> Iterator[Passage]:
    """The prose of a file."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from of_markdown(text)
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield from of_markdown("".join(cell["source"]))
    else:
        yield from of_python(text, with_texts=(ROOT / "pyro_dp") in path.parents)


def of_markdown(text: str) -> Iterator[Passage]:
    text = re.sub(r"^(?:\(\w+\)=|:::.*|:[\w-]+: .*)$", "", text, flags=re.MULTILINE)  # MyST's
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", CODE, text, flags=re.DOTALL)
    line = 1
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.map:
            line = token.map[0] + 1
        if token.type == "inline":
            yield Passage(line, one_line("".join(map(_inline, token.children or []))))


def _inline(token: Token) -> str:
    if token.type == "code_inline":
        return CODE
    return " " if token.type in ("softbreak", "hardbreak") else token.content


def of_python(text: str, with_texts: bool) -> Iterator[Passage]:
    tree = ast.parse(text)
    documented = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:  # what documents an attribute is below it
            if isinstance(statement, ast.Expr) and _is_text(statement.value):
                documented.add(statement.value)
                yield from of_docstring(statement.value.value, statement.lineno)
    yield from of_comments(text)
    if with_texts:
        inside: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inside.update(ast.walk(node))
                inside.discard(node)
        for node in ast.walk(tree):
            if node not in documented and node not in inside:
                yield from of_text(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def of_docstring(text: str, line: int) -> Iterator[Passage]:
    """Its paragraphs, fields and items, without literal blocks and examples."""
    literal: float | None = None  # the indentation of what introduced a literal block
    paragraph: list[str] = []
    begin = line
    for number, row in enumerate([*text.splitlines(), ""], start=line):
        stripped, indent = row.strip(), len(row) - len(row.lstrip())
        if not stripped and literal == _EXAMPLE:
            literal = None
        if literal is not None and stripped:
            if indent > literal or (number == line + 1 and not indent):
                continue
            literal = None
        starts = re.match(r"[*-] |\d+\. |:\w+[^:]*:|>>>|\.\. |[|+=]", stripped)
        if paragraph and (not stripped or starts):
            yield Passage(begin, _plain(" ".join(paragraph)))
            paragraph = []
        if stripped.startswith((">>>", "...", ".. ", "|", "+-", "==")):
            directive = indent if stripped.startswith((".. code", ".. math")) else None
            literal = _EXAMPLE if stripped.startswith(">>>") else directive
            continue
        if stripped:
            begin = begin if paragraph else number
            paragraph.append(re.sub(r"^([*-]|\d+\.) |^:\w+[^:]*:", "", stripped))
        if stripped.endswith("::"):
            literal = indent
    if paragraph:
        yield Passage(begin, _plain(" ".join(paragraph)))


def _plain(text: str) -> str:
    text = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`_?", CODE, text)
    return one_line(text)


def of_comments(text: str) -> Iterator[Passage]:
    """Comments on lines that follow each other are one passage."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#!|# (?:type|noqa|fmt|mypy|pragma)", token.string
        ):
            continue
        row, alone = token.start[0], not token.line[: token.start[1]].strip()
        if block and not (alone and row == last + 1):
            yield Passage(begin, _plain(" ".join(block)))
            block = []
        begin = begin if block else row
        block.append(token.string.lstrip("#").strip())
        last = row
    if block:
        yield Passage(begin, _plain(" ".join(block)))


def of_text(node: ast.AST) -> Iterator[Passage]:
    """A text of four words or more that a user may read."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if _is_text(part) else CODE for part in node.values)
        text = "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return
    if re.search(r"\{[^{}]*:[^{}]*;[^{}]*\}", text):  # a style sheet
        return
    text = re.sub(r"`[^`]*`|\{[^{}]*\}|%[sd]", CODE, html.unescape(re.sub(r"<[^<>]+>", " ", text)))
    for part in re.split(r"\n{2,}", text):
        part = one_line(part)
        if len(re.findall(r"[a-z]{2,}", part)) >= 4 and " " in part:
            yield Passage(node.lineno, part)


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def sentences(text: str) -> Iterator[str]:
    pieces: list[str] = []
    for piece in END.split(text):
        pieces.append(piece)
        if not ABBREVIATED.search(piece.rstrip("\"')*_")):
            yield " ".join(pieces)
            pieces = []
    if pieces:
        yield " ".join(pieces)


def words(sentence: str) -> int:
    return len(re.findall(r"[\w][\w'’./-]*", sentence))


def violations(path: Path) -> list[Violation]:
    found, whole = [], list(passages(path))
    for line, text in whole:
        for sentence in sentences(text):
            if words(sentence) > LONGEST:
                found.append(Violation(line, f"{words(sentence)} words", sentence))
            for name, pattern in PATTERNS.items():
                found += [Violation(line, name, sentence) for _ in pattern.finditer(sentence)]
    return sorted([*found, *of_proselint(whole)])


def of_proselint(whole: list[Passage]) -> Iterator[Violation]:
    if not whole:
        return
    if not CheckRegistry().checks:
        CheckRegistry().register_many(__register__)
    checks = Config(checks={**DEFAULT["checks"], **NOT_OURS}, max_errors=10_000)
    text = "\n\n".join(passage.text for passage in whole)
    for (row, _), check in (
        (found.pos, found.check_result) for found in LintFile("", text).lint(checks)
    ):
        if ALLOWED not in check.message:
            yield Violation(whole[(row - 2) // 2].line, check.check_path, check.message)


def files(names: Iterable[str] = READ) -> list[Path]:
    found = {path for name in names for path in ROOT.glob(name)}
    return sorted(path for path in found if "node_modules" not in path.parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or folders; all by default")
    parser.add_argument("--words", action="store_true", help="count words and long sentences")
    options = parser.parse_args()
    chosen = [Path(name).resolve() for name in options.paths] or [ROOT]
    inside = [path for path in files() if any(path == c or c in path.parents for c in chosen)]
    if options.words:
        for path in inside:
            every = [s for p in passages(path) for s in sentences(p.text)]
            short = sum(words(sentence) <= LONGEST for sentence in every)
            total = sum(map(words, every))
            print(f"{path.relative_to(ROOT)}: {total} words, {len(every)} sentences, {short} short")
        return 0
    with ProcessPoolExecutor(2) as pool:
        found = [*pool.map(violations, inside, chunksize=8)]
    for path, each in zip(inside, found, strict=True):
        for line, rule, sentence in each:
            print(f"{path.relative_to(ROOT)}:{line}: {rule}: {sentence}")
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
