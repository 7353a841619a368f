"""How a thing is told and asked for: a user does not know the words that the exercises were written with.

Templates name a ``{thing}`` (code word, password ...), the ``{place}`` that it belongs to where there are several, and
the ``{word}`` itself. Whatever the phrasing, the answer has one form: :data:`ANSWER`.
"""

from __future__ import annotations

import random

ANSWER = "The {thing} is {word}."
"""Names no place: which word is asked for must be remembered from the question."""

THINGS = (
    "code word",
    "password",
    "secret word",
    "passphrase",
    "magic word",
    "watchword",
    "codename",
    "key",
    "secret",
    "name",
)
"""What a word may be called. The first is the usual one."""

TOLD_OF_A_PLACE = (
    "The {thing} of the {place} is {word}.",
    "{word} is the {thing} of the {place}.",
    "The {place}'s {thing} is {word}.",
    "The {thing} for the {place} is {word}.",
    "Remember: the {thing} of the {place} is {word}.",
    "Remember that {word} is the {thing} of the {place}.",
    "The {place} has the {thing} {word}.",
    "For the {place}, the {thing} is {word}.",
    "Please note that the {thing} of the {place} is {word}.",
    "The {thing} of the {place}: {word}.",
    "We chose {word} as the {thing} of the {place}.",
)
WORD_FIRST = tuple(told for told in TOLD_OF_A_PLACE if told.index("{word}") < told.index("{place}"))
"""Of these the model learns little: where the word stands, what it belongs to is not yet known."""
ASKED_OF_A_PLACE = (
    "What is the {thing} of the {place}?",
    "Tell me the {thing} of the {place}.",
    "Do you remember the {place}'s {thing}?",
    "Which {thing} does the {place} have?",
    "What was the {thing} of the {place}?",
    "What is the {place}'s {thing}?",
    "What is the {thing} for the {place}?",
    "Please give me the {thing} of the {place}.",
    "Can you tell me the {thing} of the {place}?",
    "And the {thing} of the {place}?",
    "For the {place}, what is the {thing}?",
    "What did I say the {thing} of the {place} was?",
    "I need the {place}'s {thing}.",
    "The {place}: what is its {thing}?",
    "What {thing} did I give you for the {place}?",
    "I would like to know the {thing} of the {place}.",
    "The {place} has a {thing}. Which one?",
    "Say the {thing} of the {place} again.",
    "Let us talk about the {place}. What is its {thing}?",
    "I am at the {place} and they ask for the {thing}.",
    "How do I get into the {place}? Give me the {thing}.",
    "Please look up which {thing} I gave for the {place}.",
    "Would you repeat the {thing} of the {place}?",
    "Someone wants to know the {place}'s {thing}.",
    "Look up the {thing} of the {place} for me.",
    "Which {thing} is the one of the {place}?",
    "You were told the {thing} of the {place}. Repeat it.",
    "Say which {thing} goes with the {place}.",
    "Is there a {thing} of the {place}? Tell me.",
)
TOLD = (
    "The {thing} is {word}.",
    "{word} is the {thing}.",
    "My {thing} is {word}.",
    "Remember: the {thing} is {word}.",
    "Remember that {word} is the {thing}.",
    "Please note that the {thing} is {word}.",
    "The {thing}: {word}.",
    "We chose {word} as the {thing}.",
)
ASKED = (
    "What is the {thing}?",
    "What was the {thing}?",
    "Tell me the {thing}.",
    "Do you remember the {thing}?",
    "Which {thing} did I give you?",
    "What is my {thing}?",
    "Please give me the {thing}.",
    "Can you tell me the {thing}?",
    "And the {thing}?",
    "What did I say the {thing} was?",
    "I need the {thing}.",
    "I would like to know the {thing}.",
    "Say the {thing} again.",
    "Would you repeat the {thing}?",
    "Look up the {thing} for me.",
    "You were told the {thing}. Repeat it.",
)
NEVER_TRAINED = (
    "I forgot the {thing} of the {place}. What was it?",
    "Could you remind me which {thing} belongs to the {place}?",
)
"""Of what to ask: for the evaluation alone."""

_BEFORE_A_QUESTION = ("Thanks. ", "Now: ", "One question. ", "Good. ", "Hello. ")
_AFTER_A_QUESTION = (" Please answer.", " Answer in one sentence.", " Thank you.", " I want to know.")


def ask(rng: random.Random, thing: str, place: str) -> str:
    """A question in one of the trained phrasings, the first of them more often than others; ``place`` may be empty."""
    templates = ASKED_OF_A_PLACE if place else ASKED
    text = usually_first(rng, templates, 0.2).format(thing=thing, place=place)
    if rng.random() < 0.2:
        text = rng.choice(_BEFORE_A_QUESTION) + text
    return text + rng.choice(_AFTER_A_QUESTION) if rng.random() < 0.2 else text


def usually_first(rng: random.Random, choices: tuple[str, ...], share: float) -> str:
    return choices[0] if rng.random() < share else rng.choice(choices)
