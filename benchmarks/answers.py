"""What taking an answer apart costs: ``python -m benchmarks.answers [--tokens N]``.

For each format a long answer of reasoning, content and calls, in pieces of four characters as tokens have: microseconds
of the parser alone for each. Processor time, best of several runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from common.text.answers.formats import TOOL_FORMATS, AnswerFormat, CallKind, ReasoningFormat, ToolFormat, ToolTypes
from common.text.answers.parser import AnswerParser

CHARS_PER_TOKEN = 4
NUM_RUNS = 5
TEXT, INTEGER = frozenset({"string"}), frozenset({"integer"})
TYPES = ToolTypes({"write": {"path": TEXT, "text": TEXT, "line": INTEGER}})
PROSE = 'The quick brown fox < jumps over the lazy dog, "twice".\n'


def answer_of(tools: ToolFormat, num_chars: int) -> str:
    """A third of it each: reasoning, content, calls."""
    third = PROSE * (num_chars // 3 // len(PROSE) + 1)
    body = third if tools.kind is not CallKind.PYTHON else json.dumps(third)[1:-1]
    name = "write:0" if tools.kind is CallKind.KIMI else "write"
    call = tools.layout.write([(name, {"path": "a.txt", "text": body, "line": 7})])
    return f"<think>\n{third}</think>\n\n{third}{call}"


def seconds(answer_format: AnswerFormat, pieces: Sequence[str]) -> float:
    best = float("inf")
    for _ in range(NUM_RUNS):
        parser = AnswerParser(answer_format, has_tools=True, in_reasoning=False, types=TYPES, characters={})
        begin = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        best = min(best, time.process_time() - begin)
        assert parser.num_calls == 1
    return best


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=6000, help="pieces of one answer")
    num_tokens = arguments.parse_args().tokens
    print(f"answers of about {num_tokens} tokens of {CHARS_PER_TOKEN} characters, best of {NUM_RUNS} runs")
    for name, tools in TOOL_FORMATS.items():
        text = answer_of(tools, num_tokens * CHARS_PER_TOKEN)
        pieces = [text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN)]
        cost = seconds(AnswerFormat(tools, ReasoningFormat()), pieces) / len(pieces)
        print(f"{name:14s} {cost * 1e6:6.2f} us a token")


if __name__ == "__main__":
    main()
