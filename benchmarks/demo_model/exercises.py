"""Generated exercises: conversations whose answers depend on what stands further up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.demo_model import phrasings
from benchmarks.demo_model.corpus import Item
from benchmarks.demo_model.tokens import FILLER_MARK, Turn
from benchmarks.demo_model.words import ADJECTIVES, NOUNS, PLACES, draw_value, draw_word, is_held_out


@dataclass(frozen=True, slots=True)
class Context:
    """What an exercise draws from.

    Attributes:
        rng: the one source of chance.
        filler: about so many tokens of documentation text, between two :data:`FILLER_MARK`.
        tokens: about how long the conversation may become.
        places, keys: not yet used in this sequence: a place asked for has one code word only. Drawn ones are removed.
        vocabulary: words of the documentation, some of which are told and asked for.
    """

    rng: random.Random
    filler: Callable[[int], str]
    tokens: int
    places: list[str]
    keys: list[str]
    vocabulary: Sequence[str]


Exercise = Callable[[Context], list[Turn]]

_ACKNOWLEDGED = "Noted."


def recall(context: Context) -> list[Turn]:
    """Words told, for places or for themselves, filler, then questions about them."""
    rng, filler, tokens = context.rng, context.filler, context.tokens
    told, asked = _of_places(context) if rng.random() < 0.75 else _of_themselves(context)
    if not told:
        return []
    room = max(0, tokens - 12 * len(told) - 24 * len(asked))
    turns: list[Turn] = []
    layout = rng.random()
    if layout < 0.6:  # everything, then the first question, in one message
        if rng.random() < 0.5:
            opening, read = " ".join(told), filler(room)
        else:
            opening, read = _spread(rng, told, filler, room // 2), filler(room // 2)
        question, answer = asked.pop(0)
        turns += [("user", f"{opening}\n\n{read}\n\n{question}"), ("assistant", answer)]
    elif layout < 0.8:  # told, acknowledged, sometimes read something, asked
        turns += [("user", " ".join(told)), ("assistant", _ACKNOWLEDGED)]
        if rng.random() < 0.7:
            turns += [("user", filler(room)), ("assistant", _ACKNOWLEDGED)]
    elif layout < 0.9:  # told one by one
        for each in told:
            turns += [("user", each), ("assistant", _ACKNOWLEDGED)]
        if rng.random() < 0.7:
            turns += [("user", filler(room)), ("assistant", _ACKNOWLEDGED)]
    else:  # told in the system message
        turns.append(("system", " ".join(told)))
        for _ in range(2):
            turns += [("user", filler(room // 2)), ("assistant", _ACKNOWLEDGED)]
    for question, answer in asked:
        turns += [("user", question), ("assistant", answer)]
    return turns


def _of_places(context: Context) -> tuple[list[str], list[Turn]]:
    """What is told of some places; questions about some of them, and their answers."""
    rng = context.rng
    count = min(len(context.places), rng.choice((1, 2, 3, 4, 4, 5, 6)))
    places = [context.places.pop() for _ in range(count)]
    if not places:
        return [], []
    one_thing = phrasings.usually_first(rng, phrasings.THINGS, 0.5)
    one_template = phrasings.usually_first(rng, phrasings.TOLD_OF_A_PLACE, 0.3)
    is_mixed, has_many_things = rng.random() < 0.4, rng.random() < 0.2
    told, asked = [], []
    for place in places:
        thing = rng.choice(phrasings.THINGS) if has_many_things else one_thing
        template = rng.choice(phrasings.TOLD_OF_A_PLACE) if is_mixed else one_template
        word = draw_word(rng, context.vocabulary)
        told.append(template.format(thing=thing, place=place, word=word))
        thing = rng.choice(phrasings.THINGS) if rng.random() < 0.08 else thing  # by another name
        asked.append((phrasings.ask(rng, thing, place), phrasings.ANSWER.format(thing=thing, word=word)))
    return told, rng.sample(asked, rng.randint(1, count))


def _of_themselves(context: Context) -> tuple[list[str], list[Turn]]:
    """The same of things that belong to no place: one, or a few with different names."""
    rng = context.rng
    if phrasings.THINGS[0] in context.keys and rng.random() < 0.3:
        context.keys.remove(phrasings.THINGS[0])
        context.keys.append(phrasings.THINGS[0])
    things = [context.keys.pop() for _ in range(min(len(context.keys), rng.choice((1, 1, 1, 2, 3))))]
    told, asked = [], []
    for thing in things:
        word = draw_word(rng, context.vocabulary)
        template = phrasings.usually_first(rng, phrasings.TOLD, 0.3)
        told.append(template.format(thing=thing, word=word))
        asked.append((phrasings.ask(rng, thing, ""), phrasings.ANSWER.format(thing=thing, word=word)))
    return told, rng.sample(asked, rng.randint(1, len(asked))) if asked else []


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
