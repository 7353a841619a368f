"""``tandem_sources``: nodes that may have a longer prefix of the prompt than the node that is asked to compute it.

Whoever places requests sends it, as a top-level field or inside ``kv_transfer_params``. Nodes take it from their proxy
alone (which has the cluster key, where one is set); from anybody else it is an unknown field, which is ignored. A wrong
or missing source costs time, never an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.names import WORD
from common.wire.fields import Fields, invalid
from common.wire.manifest_reader import PREFIX, check_u64

SOURCES_KEY = "tandem_sources"
LEASE_ID_KEY = "lease_id"
MAX_SOURCES = 2
"""Sources of one request: each that has nothing costs a question and its deadline."""

_BASE_URL = re.compile(r"https?://[A-Za-z0-9._\-\[\]:%]{1,260}/?")


@dataclass(frozen=True, slots=True)
class PullSource:
    """A node's base URL, and its life (epoch) in which it had the prefix. ``lease_id``: it holds the prefix under this
    name already, for whoever asks by it; the reader ends that lease, used or not."""

    url: str
    epoch: int
    lease_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        leased = {} if self.lease_id is None else {LEASE_ID_KEY: self.lease_id}
        return {"url": self.url, "epoch": str(self.epoch), **leased}


def read_pull_sources(body: Mapping[str, Any], params: Sequence[Mapping[str, Any]]) -> tuple[PullSource, ...]:
    """The sources of a request body, or of the first of its ``kv_transfer_params``, most promising first.

    Raises:
        InvalidRequestError: not a list of at most two objects with a base URL and an epoch; ``param`` names the field.
    """
    name, value = SOURCES_KEY, body.get(SOURCES_KEY)
    if value is None and params:
        name, value = PREFIX + SOURCES_KEY, params[0].get(SOURCES_KEY)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) > MAX_SOURCES:
        invalid(name, value, f"a list of at most {MAX_SOURCES} objects")
    return tuple(_read_source(f"{name}[{index}]", item) for index, item in enumerate(value))


def _read_source(name: str, value: object) -> PullSource:
    if not isinstance(value, Mapping):
        invalid(name, value, "an object with url and epoch")
    fields = Fields(value, prefix=name + ".")
    url = fields.string("url", pattern=_BASE_URL)
    if url is None:
        invalid(name + ".url", url, "the node's base URL")
    epoch = check_u64(name + ".epoch", fields.raw("epoch"))
    return PullSource(url.rstrip("/"), epoch, fields.string(LEASE_ID_KEY, pattern=WORD))
