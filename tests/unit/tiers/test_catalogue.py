"""What can be resumed from a folder's headers: whole closures alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.tiers.catalogue import Catalogue
from common.tiers.object_header import HEADER_BYTES, ObjectHeader, ObjectKind

MODEL = b"m" * 32
FULL, WINDOW = (lambda position: 0), (lambda position: max(0, position - 64) // 16)


def key(name: object) -> bytes:
    return str(name).encode().ljust(32, b".")


def extent(group_id: int, start: int, num_blocks: int, line: str = "a") -> ObjectHeader:
    end = start + num_blocks
    return ObjectHeader(
        ObjectKind.EXTENT, MODEL, group_id, key(f"{line}{end}"), key(f"{line}{start}"), end * 16, 100, start, num_blocks
    )


def state(position: int, line: str = "a", **fields: int) -> list[ObjectHeader]:
    """And its tail, when it does not end with a block."""
    boundary, tail = key(f"{line}{position // 16}"), tuple(range(position % 16))
    name = key(f"{line}@{position}") if tail else boundary
    header = ObjectHeader(
        ObjectKind.STATE, MODEL, 0, name, boundary, position, 500, tail_tokens=tail, origin="semantic",
        history=(16, 1), **fields,
    )  # fmt: skip
    return [header, ObjectHeader(ObjectKind.TAIL, MODEL, 0, name, boundary, position, 70)] if tail else [header]


DEEP = [extent(0, 0, 16), extent(0, 16, 16), extent(0, 32, 5), *state(37 * 16 + 3, row_bytes=8)]
SHALLOW = [extent(0, 16, 4), *state(20 * 16)]


def found(headers: Sequence[ObjectHeader]) -> list[int]:
    return sorted(prefix.position for prefix in Catalogue(16, [FULL]).add(headers))


def test_headers_when_all_are_there_then_prefixes_share_extents() -> None:
    catalogue = Catalogue(16, [FULL])
    prefixes = catalogue.add([*reversed(DEEP), *SHALLOW])
    assert catalogue.useless() == []
    deep, shallow = sorted(prefixes, key=lambda prefix: -prefix.position)
    assert (deep.position, deep.has_row, deep.checkpoint.tail_tokens) == (595, True, (0, 1, 2))
    assert (shallow.position, shallow.has_row, shallow.checkpoint.history) == (320, False, (16, 1))
    assert deep.extents[0] == shallow.extents[0]
    assert [item.start for item in deep.extents] == [0, 16, 32]
    assert deep.own_bytes == 570 + 2 * HEADER_BYTES
    assert set(deep.extent_bytes) == {100 + HEADER_BYTES}


@pytest.mark.parametrize("missing", range(len(DEEP)))
def test_closure_when_one_object_is_missing_then_the_state_is_of_no_use(missing: int) -> None:
    left = [header for number, header in enumerate(DEEP) if number != missing]
    catalogue = Catalogue(16, [FULL])
    assert 595 not in {prefix.position for prefix in catalogue.add([*left, *SHALLOW])}
    needed = {id(header) for header in (*SHALLOW, DEEP[0])} if missing else set()
    assert {id(header) for header in catalogue.useless()} == {id(each) for each in (*left, *SHALLOW)} - needed
    assert found([*DEEP, *SHALLOW]) == [320, 595]
    # It comes later, as from another writer; then it is deleted.
    gone = {595} | ({320} if missing == 0 else set())
    assert {prefix.position for prefix in catalogue.add([DEEP[missing]])} == gone
    assert catalogue.useless() == []
    positions = {prefix.key: prefix.position for prefix in Catalogue(16, [FULL]).add([*DEEP, *SHALLOW])}
    assert {positions[key] for key in catalogue.remove([DEEP[missing]])} == gone
    assert catalogue.remove([DEEP[missing]]) == []


def test_state_when_it_is_there_with_its_row_and_without_then_one_is_told_and_when_that_goes_the_other() -> None:
    catalogue, bare = Catalogue(16, [FULL]), state(37 * 16 + 3)[0]
    with_row = next(header for header in DEEP if header.row_bytes)
    assert [prefix.has_row for prefix in catalogue.add([bare, *DEEP])] == [True]
    assert catalogue.useless() == []
    assert catalogue.remove([with_row]) == [with_row.key]
    assert [prefix.has_row for prefix in catalogue.add([])] == [False]
    assert catalogue.add([with_row]) == []
    assert catalogue.remove([bare]) == [bare.key]
    assert [prefix.has_row for prefix in catalogue.add([])] == [True]
    assert catalogue.remove([with_row]) == [with_row.key]
    assert catalogue.add([]) == []


def test_window_when_it_covers_the_end_then_only_its_blocks_are_needed() -> None:
    headers = [extent(0, 0, 16), extent(0, 16, 4), extent(1, 16, 4), *state(20 * 16)]
    assert len(Catalogue(16, [FULL, WINDOW]).add(headers)) == 1
    assert Catalogue(16, [FULL, WINDOW]).add(headers[:2] + headers[3:]) == []


def test_model_when_it_has_no_attention_then_the_state_is_all() -> None:
    assert [prefix.extents for prefix in Catalogue(16, []).add(state(35)[:1])] == [()]
