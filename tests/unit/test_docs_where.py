"""``docs/where.md`` answers "where is the rule that ...": each answer is one definition, and it exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHERE = ROOT / "docs" / "where.md"
ROW = re.compile(r"^\| (?P<question>[^|]+) \| `(?P<file>[\w/.]+)` \| `(?P<name>[\w.]+)` \|$")
MIN_QUESTIONS = 40


def rows() -> list[tuple[str, str, str]]:
    """Question, file, dotted name of every row of the tables."""
    lines = [line for line in WHERE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not line.startswith("| where is the rule")]
    matches = [(line, ROW.match(line)) for line in lines]
    assert all(match for _, match in matches), [line for line, match in matches if match is None]
    return [(match["question"], match["file"], match["name"]) for _, match in matches if match is not None]


def defined(path: Path) -> set[str]:
    """Dotted names of the classes, functions and constants that a module defines."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(prefix + each.id for each in node.targets if isinstance(each, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_answers_when_looked_up_then_the_file_defines_each() -> None:
    wrong = [
        f"{question}: {file} does not define {name}"
        for question, file, name in rows()
        if not (ROOT / file).is_file() or name not in defined(ROOT / file)
    ]
    assert not wrong, "\n".join(wrong)


def test_questions_when_counted_then_are_forty_and_none_twice() -> None:
    questions = [question for question, _, _ in rows()]
    assert len(questions) >= MIN_QUESTIONS
    assert len(set(questions)) == len(questions)
