"""One chain of keys names every prefix."""

from __future__ import annotations

import pytest

from common.kv_cache.keys import KEY_BYTES, PrefixKeys, chain_root

ROOT = chain_root(b"model")


def test_key_when_hashed_then_it_never_changes_between_versions() -> None:
    # Keys cross nodes: two versions that disagree would miss each other's prefixes silently.
    key = PrefixKeys(ROOT, 4, [1, 2, 3, 4, 5]).key_at(5)
    assert len(key) == KEY_BYTES
    assert key.hex() == "27a805a03024a67c6557418fc6dc65e56323824b6d4177f85d283341cb37ba17"


def test_chain_when_grown_token_by_token_then_keys_equal_those_of_the_whole() -> None:
    tokens = list(range(23))
    whole, grown = PrefixKeys(ROOT, 4, tokens), PrefixKeys(ROOT, 4)
    for position, token in enumerate(tokens, start=1):
        grown.extend([token])
        assert grown.key_at(position) == whole.key_at(position)


def test_keys_when_any_token_or_extra_key_differs_then_differ() -> None:
    base = list(range(10))
    keys = {PrefixKeys(ROOT, 4, base).key_at(position) for position in range(11)}
    assert len(keys) == 11
    for position in range(10):
        other = PrefixKeys(ROOT, 4, [*base[:position], 99, *base[position + 1 :]])
        assert other.key_at(10) not in keys
        assert (other.key_at(position)) in keys
    roots = {chain_root(b"model"), chain_root(b"other"), chain_root(b"model", ""), chain_root(b"model", "salt")}
    assert len(roots) == 4


def test_tail_when_not_on_a_boundary_then_tokens_since_it() -> None:
    keys = PrefixKeys(ROOT, 4, range(10))
    assert keys.tail_tokens(10) == (8, 9)
    assert keys.tail_tokens(8) == ()
    assert keys.boundary_key(2) == keys.key_at(8)


def test_fork_when_extended_then_the_parent_is_untouched() -> None:
    parent = PrefixKeys(ROOT, 4, range(10))
    child = parent.fork()
    child.extend([7])
    assert (parent.num_tokens, child.num_tokens) == (10, 11)
    assert child.key_at(10) == parent.key_at(10)


def test_key_when_position_is_beyond_known_tokens_then_refused() -> None:
    keys = PrefixKeys(ROOT, 4, range(10))
    with pytest.raises(IndexError):
        keys.key_at(11)
    with pytest.raises(IndexError):
        keys.boundary_key(3)
