"""Generated exercises: conversations whose answers depend on what stands further up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.demo_model.corpus import Item
from benchmarks.demo_model.tokens import FILLER_MARK, Turn
from benchmarks.demo_model.words import ADJECTIVES, NOUNS, PLACES, draw_pair, draw_value, is_held_out


@dataclass(frozen=True, slots=True)
class Context:
    """What an exercise draws from.

    Attributes:
        rng: the one source of chance.
        filler: about so many tokens of documentation text, between two :data:`FILLER_MARK`.
        tokens: about how long the conversation may become.
        places, keys: not yet used in this sequence: a place asked for has one code word only. Drawn ones are removed.
    """

    rng: random.Random
    filler: Callable[[int], str]
    tokens: int
    places: list[str]
    keys: list[str]


Exercise = Callable[[Context], list[Turn]]

ANSWER = "The code word is {}."
"""Names no place: which word is asked for must be remembered from the question."""
_ACKNOWLEDGED = "Noted."


def recall(context: Context) -> list[Turn]:
    """Code words of some places, filler, then questions about them."""
    rng, filler, tokens = context.rng, context.filler, context.tokens
    count = min(len(context.places), rng.choice((1, 2, 3, 4, 4, 5, 6)))
    places = [context.places.pop() for _ in range(count)]
    if not places:
        return []
    words = {place: draw_pair(rng, held_out=False) if rng.random() < 0.6 else draw_value(rng) for place in places}
    facts = [f"The code word of the {place} is {word}." for place, word in words.items()]
    asked = rng.sample(places, rng.randint(1, count))
    if rng.random() < 0.15 and len(context.places) + count == len(PLACES):  # the plain form: one word, no place
        word = next(iter(words.values()))
        facts, asked, words = [f"The code word is {word}."], [""], {"": word}
    room = max(0, tokens - 12 * len(facts) - 24 * len(asked))
    turns: list[Turn] = []
    layout = rng.random()
    if layout < 0.6:  # everything, then the first question, in one message
        if rng.random() < 0.5:
            told, read = " ".join(facts), filler(room)
        else:
            told, read = _spread(rng, facts, filler, room // 2), filler(room // 2)
        turns.append(("user", f"{told}\n\n{read}\n\n{_question(asked[0])}"))
        turns.append(("assistant", ANSWER.format(words[asked[0]])))
        asked = asked[1:]
    elif layout < 0.8:  # told, acknowledged, read something, asked
        turns += [("user", " ".join(facts)), ("assistant", _ACKNOWLEDGED)]
        turns += [("user", filler(room)), ("assistant", _ACKNOWLEDGED)]
    else:  # told in the system message, one by one
        turns.append(("system", " ".join(facts)))
        for _ in range(2):
            turns += [("user", filler(room // 2)), ("assistant", _ACKNOWLEDGED)]
    for place in asked:
        turns += [("user", _question(place)), ("assistant", ANSWER.format(words[place]))]
    return turns


def _question(place: str) -> str:
    return f"What is the code word of the {place}?" if place else "What is the code word?"


def _spread(rng: random.Random, facts: list[str], filler: Callable[[int], str], tokens: int) -> str:
    rng.shuffle(facts)
    return "\n\n".join(f"{fact}\n\n{filler(tokens // len(facts))}" for fact in facts)


def copying(context: Context) -> list[Turn]:
    rng = context.rng
    turns: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            text = " ".join(rng.choice(ADJECTIVES + NOUNS + PLACES) for _ in range(rng.randint(2, 8)))
        elif rng.random() < 0.5:
            text = " ".join(draw_value(rng) for _ in range(rng.randint(1, 4)))
        else:
            text = " ".join(context.filler(24).replace(FILLER_MARK, " ").split())
        if not is_held_out(text):
            turns += [("user", f"Repeat: {text}"), ("assistant", text)]
    return turns


def counting(context: Context) -> list[Turn]:
    rng = context.rng
    if rng.random() < 0.5:
        start = rng.randint(0, 40)
        stop = start + rng.randint(2, 9)
        question, answer = f"Count from {start} to {stop}.", ", ".join(map(str, range(start, stop + 1))) + "."
    else:
        words = [rng.choice(NOUNS)] * rng.randint(1, 6)
        question, answer = f"How many words are these: {' '.join(words)}?", f"{len(words)} words."
    return [] if is_held_out(question) else [("user", question), ("assistant", answer)]


def settings(context: Context) -> list[Turn]:
    """Key-value pairs told and asked over turns; a later value replaces an earlier one."""
    rng = context.rng
    values: dict[str, str] = {}
    turns: list[Turn] = []
    keys = [context.keys.pop() for _ in range(min(len(context.keys), rng.randint(2, 5)))]
    for _ in range(max(3, min(12, context.tokens // 24)) if keys else 0):
        key = rng.choice(keys)
        if key not in values or rng.random() < 0.15:
            values[key] = draw_value(rng)
            turns += [("user", f"Set {key} to {values[key]}."), ("assistant", f"The {key} is {values[key]}.")]
        else:
            turns += [("user", f"What is the {key}?"), ("assistant", f"The {key} is {values[key]}.")]
    return turns


def arithmetic(context: Context) -> list[Turn]:
    rng = context.rng
    turns: list[Turn] = []
    for _ in range(rng.randint(1, 3)):
        sign = rng.choice("++-*")
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        if sign == "*":
            a, b = a % 11, b % 11
        if sign == "-" and a < b:
            a, b = b, a
        task = f"{a} {sign} {b}"
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if not is_held_out(task):
            turns += [("user", f"What is {task}?"), ("assistant", f"{task} = {result}.")]
    return turns


def questions(items: list[Item]) -> Exercise:
    """Short turns about the library: what something does, with its documentation in view or not."""
    short = [item for item in items if not item.is_held_out and len(_first_sentence(item.text)) < 160]

    def ask(context: Context) -> list[Turn]:
        item = context.rng.choice(short)
        is_shown = context.rng.random() < 0.6 and len(item.text) <= 2 * context.tokens
        told = f"{item.name}:\n{item.text}\n\n" if is_shown else ""
        return [("user", f"{told}What does {item.name} do?"), ("assistant", _first_sentence(item.text))]

    return ask


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."
