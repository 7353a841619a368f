"""One chain of keys names every prefix."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common.kv_cache.keys import KEY_BYTES, PrefixKeys, chain_root, prompt_root

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


def test_root_when_any_extra_key_differs_then_differs_and_parts_cannot_run_into_each_other() -> None:
    extras: list[list[tuple[str, bytes]]] = [
        [],
        [("cache_salt", b"")],
        [("cache_salt", b"ab")],
        [("cache_salta", b"b")],
        [("cache_salt", b"a"), ("b", b"")],
        [("cache_salt", b"a"), ("lora", b"b")],
        [("lora", b"b"), ("cache_salt", b"a")],
    ]
    assert len({chain_root(b"model", extra) for extra in extras}) == len(extras)
    assert chain_root(b"other") not in {chain_root(b"model", extra) for extra in extras}


def test_root_of_a_prompt_when_it_has_a_salt_then_that_is_an_extra_key() -> None:
    assert prompt_root(b"model", None) == ROOT
    assert prompt_root(b"model", "") == chain_root(b"model", [("cache_salt", b"")])
    assert prompt_root(b"model", "\u00fc") == chain_root(b"model", [("cache_salt", "\u00fc".encode())])


def test_chain_when_hashed_in_another_process_then_equal() -> None:
    program = (
        "from common.kv_cache.keys import PrefixKeys, chain_root;"
        "root = chain_root(b'model', [('cache_salt', b'tenant')]);"
        "print(PrefixKeys(root, 16, range(1000)).key_at(1000).hex())"
    )
    keys = PrefixKeys(chain_root(b"model", [("cache_salt", b"tenant")]), 16, range(1000))
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == keys.key_at(1000).hex()


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
