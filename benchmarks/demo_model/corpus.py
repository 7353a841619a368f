"""Documentation text of the running Python: docstrings of the standard library and the language's help topics."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from benchmarks.demo_model.words import is_held_out

HELD_OUT_OF = 20
"""One documentation item in this many is held out."""
_MIN_CHARS = 40
_SKIPPED = frozenset({"site-packages", "test", "tests", "__phello__"})


@dataclass(frozen=True, slots=True)
class Item:
    """One docstring or topic. ``name`` is qualified (``json.decoder.JSONDecoder.decode``)."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.text, HELD_OUT_OF)


def documentation(*, with_sources: bool = True) -> list[Item]:
    """Every item of the running interpreter, in a fixed order, each text once (white space and case apart).
    ``with_sources``: also of the standard library's files, which take seconds to parse."""
    seen: set[str] = set()
    items = []
    for item in (*_topics(), *(_source_docstrings() if with_sources else ()), *_compiled_docstrings()):
        key = " ".join(item.text.lower().split())
        if len(item.text) >= _MIN_CHARS and key not in seen:
            seen.add(key)
            items.append(item)
    return items


def digest(items: list[Item]) -> str:
    """SHA-256 of names and texts, for the model card."""
    total = hashlib.sha256()
    for item in items:
        total.update(f"{item.name}\0{item.text}\0".encode())
    return total.hexdigest()


def _topics() -> Iterator[Item]:
    for name, text in sorted(topics.items()):
        # In pieces, so that a topic is not held out as a whole or not at all.
        for number, section in enumerate(_sections(text)):
            yield Item(f"{name}.{number}", section)


def _sections(text: str, chars: int = 2000) -> Iterator[str]:
    section: list[str] = []
    for paragraph in text.split("\n\n"):
        section.append(paragraph)
        if sum(map(len, section)) >= chars:
            yield "\n\n".join(section).strip()
            section = []
    yield "\n\n".join(section).strip()


def _source_docstrings() -> Iterator[Item]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.intersection(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 ships Python 2 sources
        yield from _docstrings(tree, ".".join(part for part in parts if part != "__init__"))


def _docstrings(node: ast.AST, name: str) -> Iterator[Item]:
    is_documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if is_documented and (text := ast.get_docstring(node)):
        yield Item(name, text.strip())
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if isinstance(child, (ast.ClassDef, ast.FunctionDef)) else name
        if not isinstance(child, ast.expr):
            yield from _docstrings(child, inner)


def _compiled_docstrings() -> Iterator[Item]:
    for name in sorted(sys.stdlib_module_names):
        if name.startswith(("_test", "_xx", "xx")) or (spec := importlib.util.find_spec(name)) is None:
            continue
        if spec.origin != "built-in" and not str(spec.origin).endswith(".so"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(name)
        except ImportError:
            continue
        if text := inspect.getdoc(module):
            yield Item(name, text.strip())
        for member_name, member in sorted(vars(module).items()):
            yield from _member(f"{name}.{member_name}", member)


def _member(name: str, member: object) -> Iterator[Item]:
    if not (inspect.isclass(member) or inspect.isroutine(member)):
        return
    if text := inspect.getdoc(member):
        yield Item(name, text.strip())
    if inspect.isclass(member):
        for attribute, value in sorted(vars(member).items()):
            if inspect.isroutine(value) and (text := inspect.getdoc(value)):
                yield Item(f"{name}.{attribute}", text.strip())
