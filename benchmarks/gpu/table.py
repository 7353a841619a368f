"""What was found, as Markdown: one table for each kind of rows of each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def to_markdown(result: Mapping[str, Any]) -> str:
    """Fields that are lists or objects are in the JSON alone."""
    lines = ["# GPU benchmark", ""]
    for name, job in result["jobs"].items():
        lines += [f"## {name}: {job['status']} ({job['seconds']} s)", ""]
        kinds: dict[str, list[Mapping[str, Any]]] = {}
        for row in job["rows"]:
            kinds.setdefault(row.get("kind", ""), []).append(row)
        for kind, rows in kinds.items():
            lines += [f"{kind}:", "", *(_upright(rows[0]) if len(rows) == 1 else _table(rows)), ""]
        if "log" in job:
            lines += ["```", *job["log"], "```", ""]
    return "\n".join(lines)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        name for name in names if name != "kind" and not any(isinstance(row.get(name), list | dict) for row in rows)
    ]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = _columns(rows)
    lines = [_line(columns), _line(["---"] * len(columns))]
    return lines + [_line([_text(row.get(name)) for name in columns]) for row in rows]


def _upright(row: Mapping[str, Any]) -> list[str]:
    names = _columns([row])
    return [_line(["what", "value"]), _line(["---", "---"]), *(_line([name, _text(row[name])]) for name in names)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "/").replace("\n", " ")[:160]
