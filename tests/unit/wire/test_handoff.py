from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.images.span import ImageSpan
from common.wire.handoff import TransferMode, prefill_leg_params, transfer_mode
from common.wire.manifest import Manifest, ManifestShape, PrefillReport

U64 = st.integers(0, 2**64 - 1)


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "engine_id": "engine-1", "request_id": "req-1", "host": "127.0.0.1", "port": 8100, "num_tokens": 5,
        "block_size": 4, "block_ids": ((3, 9),), "generations": ((2**64 - 1, 2**53 + 1),), "epoch": 2**64 - 5,
        "fingerprint": "00ff", "lease_id": "lease-1", "lease_seconds": 30.0, "prefix_key": bytes(range(32)),
        "prompt_token_ids": (1, 2, 3, 4, 5), "slot_id": 7, "slot_generation": 2**63 + 3,
        "output_row": b"\x00\x01\x02\x03", "output_row_dtype": "bfloat16",
        "prefill": PrefillReport("p0", 2, 3, 0.25, 0.5), "proof": "ab" * 32,
    }  # fmt: skip
    return Manifest(**(values | changes))


def test_params_through_a_reader_that_holds_numbers_as_doubles_survive() -> None:
    text = json.dumps(manifest().to_params())
    assert Manifest.from_params(json.loads(text, parse_int=lambda digits: int(float(digits)))) == manifest()


@given(epoch=U64, generations=st.lists(U64, min_size=1, max_size=8), slot=U64, row=st.binary(min_size=1, max_size=64))
def test_any_manifest_survives_json(epoch: int, generations: list[int], slot: int, row: bytes) -> None:
    count = len(generations)
    given_manifest = manifest(
        epoch=epoch, num_tokens=count, block_size=1, prompt_token_ids=tuple(range(count)), slot_generation=slot,
        block_ids=(tuple(range(1, count + 1)),), generations=(tuple(generations),), output_row=row * 2, prefill=None,
    )  # fmt: skip
    assert Manifest.from_params(json.loads(json.dumps(given_manifest.to_params()))) == given_manifest


IMAGE = ImageSpan(1, 1, 2, bytes(range(32)))


def test_manifest_when_the_prompt_has_images_then_their_places_travel_and_bad_ones_are_refused() -> None:
    given = manifest(images=(IMAGE, ImageSpan(4, 1, 1, bytes(32))))
    params = json.loads(json.dumps(given.to_params()))
    assert Manifest.from_params(params).images == given.images
    for wrong in (
        {"start": 4},  # beyond the prompt's five tokens
        {"rows": 0},
        {"digest": "00"},
        {"columns": None},
        {"start": -1},
    ):
        [first, second] = params["tandem_images"]
        with pytest.raises(InvalidRequestError, match="tandem_images"):
            Manifest.from_params({**params, "tandem_images": [{**first, **wrong}]})
    with pytest.raises(InvalidRequestError, match="tandem_images"):
        Manifest.from_params({**params, "tandem_images": [second, first]})


def test_dense_and_pure_recurrent_models_have_their_shapes() -> None:
    dense = manifest(slot_id=0, slot_generation=0, output_row=None, output_row_dtype=None, prefill=None)
    assert Manifest.from_params(dense.to_params(), ManifestShape(num_block_groups=1, has_state=False)) == dense
    recurrent = manifest(block_ids=(), generations=())
    assert Manifest.from_params(recurrent.to_params(), ManifestShape(num_block_groups=0, has_state=True)) == recurrent
    with pytest.raises(InvalidRequestError, match="tandem_slot_id"):
        Manifest.from_params(dense.to_params(), ManifestShape(has_state=True))
    with pytest.raises(InvalidRequestError, match="tandem_slot_id"):
        Manifest.from_params(recurrent.to_params(), ManifestShape(has_state=False))
    with pytest.raises(InvalidRequestError, match="1 groups"):
        Manifest.from_params(recurrent.to_params(), ManifestShape(num_block_groups=1))


def test_digest_when_anything_that_is_promised_changes_then_changes() -> None:
    first = manifest()
    carried = json.dumps({"added": "by a proxy", **first.to_params()}).replace("30.0", "30")
    assert Manifest.from_params(json.loads(carried)).digest() == first.digest()
    elsewhere = manifest(host="10.0.0.1", port=1, prompt_token_ids=(), proof=None)
    assert elsewhere.digest() == first.digest()
    changes: dict[str, Any] = {
        "engine_id": "e", "request_id": "r", "num_tokens": 6, "block_size": 8, "block_ids": ((3, 8),),
        "generations": ((2**64 - 1, 2**53),), "epoch": 1, "fingerprint": "00fe", "lease_id": "x", "lease_seconds": 31.0,
        "prefix_key": bytes(32), "slot_id": 8, "slot_generation": 1, "output_row": bytes(4), "output_row_dtype": "x",
        "prefill": PrefillReport("p0", 2, 3, 0.25, 0.6), "digests": (("0" * 16, None),), "slot_digest": "0" * 16,
        "tp_size": 2, "images": (IMAGE,),
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(Manifest)} - set(changes) == {
        "host", "port", "prompt_token_ids", "proof",
    }  # fmt: skip
    assert len({first.digest(), *(manifest(**{name: value}).digest() for name, value in changes.items())}) == 21


def test_digest_when_the_grid_of_an_image_is_turned_then_is_another() -> None:
    """No key tells the two apart: they have as many tokens, at the same offset."""
    first = manifest(images=(IMAGE,))
    carried = json.loads(json.dumps(first.to_params()))
    assert Manifest.from_params(carried).digest() == first.digest()
    [span] = carried["tandem_images"]
    turned = {**span, "rows": span["columns"], "columns": span["rows"]}
    assert turned != span
    assert Manifest.from_params({**carried, "tandem_images": [turned]}).digest() != first.digest()


def test_generations_as_json_integers_are_read_too() -> None:
    params = manifest().to_params() | {"tandem_generations": [[5, "6"]], "tandem_epoch": 12}
    parsed = Manifest.from_params(params)
    assert (parsed.generations, parsed.epoch) == (((5, 6),), 12)


REQUIRED = [
    "remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port", "remote_num_tokens",
    "prompt_token_ids", "tandem_block_size", "tandem_epoch", "tandem_fingerprint", "tandem_lease_id",
    "tandem_lease_seconds", "tandem_generations", "tandem_slot_generation", "tandem_prefix_key", "tandem_proof",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("is_absent", [True, False])
def test_required_key_absent_or_null_is_named(key: str, is_absent: bool) -> None:
    params = manifest().to_params()
    params[key] = None
    if is_absent:
        del params[key]
    with pytest.raises(InvalidRequestError) as caught:
        Manifest.from_params(params)
    assert caught.value.param == f"kv_transfer_params.{key}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final", False),
        ("remote_engine_id", ""),
        ("remote_engine_id", "a b"),
        ("remote_request_id", "x\r\nHost: y"),
        ("remote_host", "http://x/"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "8100"),
        ("remote_num_tokens", 0),
        ("remote_num_tokens", 2**40),
        ("remote_num_tokens", True),
        ("remote_block_ids", [3, 9]),
        ("remote_block_ids", [[3]]),
        ("remote_block_ids", [[3, 9, 10]]),
        ("remote_block_ids", [[3, -1]]),
        ("remote_block_ids", [[3, True]]),
        ("remote_block_ids", [[]] * 100),
        ("tandem_generations", [["1"]]),
        ("tandem_generations", [["1", "-1"]]),
        ("tandem_generations", [["1", str(2**64)]]),
        ("tandem_generations", [["1", "01"]]),
        ("tandem_generations", [["1", "1" * 5000]]),
        ("tandem_generations", [["1", "٣"]]),
        ("tandem_generations", [["1", 1.0]]),
        ("tandem_generations", []),
        ("tandem_epoch", "x"),
        ("tandem_epoch", -1),
        ("tandem_fingerprint", "zz"),
        ("tandem_fingerprint", "abc"),
        ("tandem_lease_id", "../x"),
        ("tandem_lease_seconds", 0),
        ("tandem_lease_seconds", "30"),
        ("tandem_slot_id", -1),
        ("tandem_slot_id", "7"),
        ("tandem_prefix_key", ""),
        ("tandem_output_row", "!!!!"),
        ("tandem_output_row", "AAA="),
        ("tandem_output_row", ""),
        ("tandem_output_row", "é"),
        ("tandem_output_row", "A" * 2_000_000),
        ("tandem_output_row_dtype", "object"),
        ("tandem_output_row_dtype", None),
        ("prompt_token_ids", [1, 2, 3, 4]),
        ("prompt_token_ids", [1, 2, 3, 4, "5"]),
        ("prompt_token_ids", "12345"),
        ("tandem_prefill.cached_tokens", {"cached_tokens": 6}),
        ("tandem_prefill.seconds.queue", {"seconds": {"queue": -1}}),
        ("tandem_proof", "x" * 64),
        ("tp_size", 0),
    ],
)
def test_malformed_key_is_named(key: str, value: Any) -> None:
    params = manifest().to_params() | {key.split(".")[0]: value}
    if key == "tandem_output_row" and value == "AAA=":
        params["tandem_output_row_dtype"] = "float32"
    with pytest.raises(InvalidRequestError) as caught:
        Manifest.from_params(params)
    assert caught.value.param == f"kv_transfer_params.{key}"


def test_prompt_token_ids_beyond_the_vocabulary_are_refused() -> None:
    assert Manifest.from_params(manifest().to_params(), ManifestShape(vocab_size=6))
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        Manifest.from_params(manifest().to_params(), ManifestShape(vocab_size=5))


def test_transfer_mode_of_each_leg() -> None:
    assert transfer_mode(None) is TransferMode.NONE
    assert transfer_mode({}) is TransferMode.NONE
    assert transfer_mode(prefill_leg_params()) is TransferMode.REMOTE_DECODE
    assert transfer_mode(manifest().to_params()) is TransferMode.REMOTE_PREFILL


def test_manifest_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest().port = 1  # type: ignore[misc]
