"""Images in prefixes: what tells two prompts apart whose token ids are equal."""

from __future__ import annotations

from array import array

import pytest

from common.images.span import ImageSpan
from common.kv_cache.keys import PrefixKeys, chain_root
from common.kv_cache.manager import KVCacheManager
from proxy.prefix_index.prompt_keys import PromptKeys
from tests.unit.kv_cache.world import make_config

ROOT = chain_root(b"model")
PAD = 7
RED, BLUE = bytes(32), bytes([1, *[0] * 31])
TOKENS = [1, 2, 3, *[PAD] * 6, 4, 5, *[PAD] * 6, 6, 8, 9]
"""Two images of 2 x 3 tokens, at 3 and at 11; blocks of 4."""


def keys(first: bytes = RED, second: bytes = BLUE) -> PrefixKeys:
    return PrefixKeys(ROOT, 4, TOKENS, [ImageSpan(3, 2, 3, first), ImageSpan(11, 2, 3, second)])


def test_key_when_a_prefix_has_no_image_then_it_is_that_of_its_tokens() -> None:
    text = PrefixKeys(ROOT, 4, TOKENS)
    assert [keys().key_at(position) for position in range(4)] == [text.key_at(position) for position in range(4)]
    assert all(keys().key_at(position) != text.key_at(position) for position in range(4, len(TOKENS) + 1))


def test_key_when_an_image_differs_then_every_prefix_with_a_token_of_it_differs() -> None:
    for other, first_at in ((keys(first=BLUE), 3), (keys(second=RED), 11), (keys(BLUE, RED), 3)):
        equal = [other.key_at(position) == keys().key_at(position) for position in range(len(TOKENS) + 1)]
        assert equal == [position <= first_at for position in range(len(TOKENS) + 1)]


def test_key_when_the_same_image_lies_one_token_later_then_differs() -> None:
    tokens = [PAD] * 12
    at_1, at_2 = (PrefixKeys(ROOT, 4, tokens, [ImageSpan(start, 2, 3, RED)]) for start in (1, 2))
    assert at_1.key_at(4) != at_2.key_at(4)


def test_key_when_the_shape_of_the_data_could_be_other_tokens_then_differs() -> None:
    image = RED + (0).to_bytes(8, "little")
    as_tokens = array("I", image).tolist()
    assert PrefixKeys(ROOT, 64, [PAD, *as_tokens]).key_at(11) != PrefixKeys(
        ROOT, 64, [PAD], [ImageSpan(0, 1, 1, RED)]
    ).key_at(1)


def test_chain_when_hashed_in_any_order_forked_or_by_the_proxy_then_equal() -> None:
    by_token = PrefixKeys(ROOT, 4, (), keys().images)
    for position, token in enumerate(TOKENS, start=1):
        by_token.extend([token])
        assert by_token.key_at(position) == keys().key_at(position)
    assert by_token.fork().key_at(len(TOKENS)) == keys().key_at(len(TOKENS))
    proxy = PromptKeys.of_prompt(b"model", 4, TOKENS, None, keys().images)
    assert [proxy.key_at(position) for position in range(len(TOKENS) + 1)] == [
        keys().key_at(position) for position in range(len(TOKENS) + 1)
    ]
    later = proxy.source.followed_by([5, 5, 5, 5])
    assert later.boundary_keys[:-1] == proxy.boundary_keys
    assert later.key_at(len(TOKENS)) == proxy.key_at(len(TOKENS))


def test_tail_when_two_images_have_one_size_then_no_token_of_one_is_the_others() -> None:
    one, other = keys().content(0, len(TOKENS)), keys(first=BLUE, second=RED).content(0, len(TOKENS))
    same = [position for position in range(len(TOKENS)) if one[position] == other[position]]
    assert same == [0, 1, 2, 9, 10, 17, 18, 19]
    assert len(set(one[3:9])) == 6
    assert [each < 2**32 for each in one] == [token != PAD for token in TOKENS]


@pytest.mark.parametrize("end", [6, 9, 10, 13])
def test_lookup_when_another_image_of_the_same_size_was_computed_then_nothing_of_it_is_found(end: int) -> None:
    # Ends inside a block, where a checkpoint is found by its tail: its keys' boundary is the same up to token 3.
    manager = KVCacheManager(make_config())
    root = manager.prefix_keys([]).boundary_key(0)

    def prompt(first: bytes) -> PrefixKeys:
        return PrefixKeys(root, 4, TOKENS[:end], keys(first=first).images)

    computed = prompt(RED)
    assert manager.admit("a", computed, None, end)
    manager.complete_step("a", end)
    manager.finish_prompt("a", "row")
    manager.free("a", donate=False)
    assert manager.lookup(prompt(RED), end).num_tokens == end
    assert manager.lookup(prompt(BLUE), end).num_tokens == 0
    # The control: told apart by their ids alone, the state of the one image would be found for the other.
    text = PrefixKeys(root, 4, TOKENS[:end])
    assert text.tail_tokens(end) == tuple(TOKENS[end - end % 4 : end])
    assert manager.check() == []
