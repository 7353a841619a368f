"""Answers cut, ended and reset at every byte: they are read in one way however they come, and as httptools and aiohttp
read them, but for what is listed with its reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.proxy.node_http.answers import ANSWERS, HUGE
from tests.unit.proxy.node_http.readings import AiohttpReader, End, Outcome, Reading, bare, ours

LENIENT = "aiohttp lets its parser accept what RFC 9112 has deprecated or forbids; our nodes do not send it"
CUT_OFF = "aiohttp takes a connection that broke for one that ended: part of a body for the whole"
CODED = "a coding that was not asked for and is not chunked: where the body ends is not known"
UPGRADE = "nobody has asked for another protocol, and what follows is none of ours"
FOLLOWED = "aiohttp gives up a whole answer for what follows it in one piece; ours is read, its connection closed"

DIFFERENCES = {
    "chunks with a space after the size": LENIENT,
    "chunks shorter than said": LENIENT,
    "a folded header": LENIENT,
    "a folded length": LENIENT,
    "a header with a control character": LENIENT,
    "a header that ends with a line feed": LENIENT,
    "a head with bare line feeds": LENIENT,
    "status 099": LENIENT,
    "until the end": CUT_OFF,
    "until the end, told so": CUT_OFF,
    "until the end, HTTP/1.0": CUT_OFF,
    "until the end, identity": CUT_OFF,
    "chunks, then identity": CUT_OFF,
    "an empty coding": CUT_OFF,
    "gzip": CUT_OFF,
    "chunks before gzip": CODED,
    "no chunks, but a word like it": CODED,
    "101": UPGRADE,
    "101 without an upgrade": UPGRADE,
    "length too short": FOLLOWED,
    "204 with a length": FOLLOWED,
    "204 with chunks": FOLLOWED,
    "garbage after the end": FOLLOWED,
    "garbage after the last": FOLLOWED,
    "a second answer after the last": FOLLOWED,
}

# Of what is compared with another reader, every byte only in the whole matrix.
STEPS = [pytest.param(11, id="some bytes"), pytest.param(1, id="every byte", marks=pytest.mark.full)]


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def points(name: str, step: int) -> Iterator[int]:
    """Where an answer is cut. Not the same bytes of each."""
    return iter(range(len(name) % step, len(ANSWERS[name]) + 1, step))


def is_same(reading: Reading, other: Reading) -> bool:
    """But for the connection, which the other may keep where ours does not."""
    return reading.answer == other.answer and (other.is_kept or not reading.is_kept)


def agrees(reading: Reading, aiohttps: Reading) -> bool:
    """aiohttp goes on waiting when what follows a head is wrong, if it comes later (3.14)."""
    return is_same(reading, aiohttps) or (reading.outcome, aiohttps.outcome) == (Outcome.BROKEN, Outcome.WAITS)


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_when_cut_anywhere_then_is_read_as_in_one_piece(name: str) -> None:
    data = ANSWERS[name]

    async def scenario() -> None:
        for end in (End.NOTHING, End.CLOSE):
            whole = await ours([data], end)
            for point in range(len(data)):
                assert await ours([data[:point], data[point:]], end) == whole, data[:point]
            assert await ours(cut(data, 1), end) == whole

    asyncio.run(scenario())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ANSWERS)
def test_answer_when_it_ends_anywhere_then_is_read_as_by_httptools(name: str, step: int) -> None:
    async def scenario() -> None:
        for point in (*points(name, step), len(ANSWERS[name])):
            for end in End:
                data = ANSWERS[name][:point]
                reading, expected = await ours([data], end), bare(data, end)
                assert reading == expected, (data, end)

    asyncio.run(scenario())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in DIFFERENCES])
def test_answer_when_cut_or_ended_anywhere_then_is_read_as_by_aiohttp(name: str, step: int) -> None:
    data = ANSWERS[name]

    async def scenario() -> None:
        async with AiohttpReader() as aiohttps:

            async def check(pieces: Sequence[bytes], end: End) -> None:
                reading, other = await ours(pieces, end), await aiohttps.read(pieces, end)
                assert agrees(reading, other), (pieces, end, reading, other)

            for end in End:
                await check([data], end)
                for point in points(name, step):
                    await check([data[:point]], end)
                    await check([data[:point], data[point:]], end)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", DIFFERENCES)
def test_difference_to_aiohttp_when_listed_then_is_one(name: str) -> None:
    async def scenario() -> None:
        async with AiohttpReader() as aiohttps:
            pairs = [(await ours([ANSWERS[name]], end), await aiohttps.read([ANSWERS[name]], end)) for end in End]
        assert not all(agrees(*pair) for pair in pairs)
        # What is taken for whole by both is the same.
        assert all(is_same(*pair) for pair in pairs if {each.outcome for each in pair} == {Outcome.WHOLE})

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("a hundred headers", Outcome.WHOLE),
        ("a header of 4 KiB", Outcome.WHOLE),
        ("a header of 40 KiB", Outcome.WHOLE),
        ("a header of 200 KiB", Outcome.BROKEN),
        ("a thousand headers", Outcome.WHOLE),
        ("a hundred thousand headers", Outcome.BROKEN),
        ("a reason of 200 KiB", Outcome.BROKEN),
        ("a chunk extension of 200 KiB", Outcome.BROKEN),
        ("ten thousand chunks", Outcome.WHOLE),
        ("trailers of 200 KiB", Outcome.BROKEN),
        ("ten thousand 100s", Outcome.BROKEN),
        ("a body of 1 MiB", Outcome.WHOLE),
        ("a chunk of 1 MiB", Outcome.WHOLE),
    ],
)
@pytest.mark.parametrize("size", [1000, 2**14])
def test_huge_answer_when_it_comes_in_pieces_then_its_head_is_bounded_and_its_body_is_not(
    name: str, outcome: Outcome, size: int
) -> None:
    async def scenario() -> None:
        reading = await ours(cut(HUGE[name], size), End.NOTHING)
        assert reading.outcome is outcome
        if outcome is Outcome.WHOLE:
            assert is_same(reading, bare(HUGE[name], End.NOTHING))

    asyncio.run(scenario())


def mutated(data: bytes, rng: random.Random) -> bytes:
    """With a few bytes changed, left out, doubled or put in."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.randint(0, 4))
        new = rng.choice([b"", data[start:stop] * 2, rng.randbytes(1), b"\r", b"\n", b"\r\n", b"0", b":", b" "])
        data = data[:start] + new + data[stop:]
    return data


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 100))])
def test_answer_when_bytes_are_changed_by_chance_then_all_readers_say_the_same_or_one_says_nothing(seed: int) -> None:
    """httptools' bare parser says the same; aiohttp may take for broken what is whole and the reverse, but what both
    take for whole is the same."""
    rng = random.Random(seed)

    async def scenario() -> None:
        async with AiohttpReader() as aiohttps:
            for _ in range(200):
                data = mutated(ANSWERS[rng.choice(list(ANSWERS))], rng)
                end, point = rng.choice(list(End)), rng.randrange(len(data) + 1)
                reading = await ours([data[:point], data[point:]], end)
                assert reading == bare(data, end), (data, point, end)
                other = await aiohttps.read([data[:point], data[point:]], end)
                if reading.outcome is other.outcome is Outcome.WHOLE:
                    assert is_same(reading, other), (data, point, end)

    asyncio.run(scenario())
