"""What the proxy knows of the nodes' caches is what they have: of whatever prompt, the index says to the token what the
node then reports as cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import pytest

from common.config.proxy import ProxyConfig
from common.text.tokenizer_document import TokenizerDocument
from common.wire.cache_events import CHECKPOINT, CacheNews
from common.wire.routes import CACHE_EVENTS_ROUTE, TOKENIZER_ROUTE
from proxy.app import Service as ProxyService
from proxy.app import create_app
from proxy.prefix_index.coverage import Coverage
from proxy.prefix_index.prompt_keys import PromptKeys
from tests.e2e.conftest import NODE_FLAGS
from tests.support.client import complete
from tests.support.http_server import serving, wait_for
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.service import Node, Service

SALT = "prefix index"


@dataclass
class Site:
    """``url``: of a proxy in this process, over the nodes of ``nodes``."""

    nodes: Service
    url: str
    proxy: ProxyService
    document: TokenizerDocument

    @property
    def decode(self) -> Node:
        return self.nodes.decode[0]

    def settle(self) -> None:
        """Until the index has as many entries of each node as the node."""
        for node in (*self.nodes.prefill, *self.nodes.decode):
            wait_for(lambda node=node: self.proxy.index.num_entries(node.url) == _num_entries(node), "the events")

    def coverage(self, token_ids: Sequence[int], node: Node, salt: str = SALT) -> Coverage:
        keys = PromptKeys.of_prompt(self.document.root_key, self.document.block_size, token_ids, salt)
        return self.proxy.index.lookup(keys).get(node.url, Coverage(0, 0))


def _num_entries(node: Node) -> int:
    news = CacheNews.from_json(httpx.get(node.url + CACHE_EVENTS_ROUTE).json())
    assert news.is_snapshot
    return len({(change.group == CHECKPOINT, key) for change in news.changes for key in change.keys})


def site_of(nodes: Service) -> Iterator[Site]:
    config = ProxyConfig(
        prefill=tuple(node.url for node in nodes.prefill),
        decode=tuple(node.url for node in nodes.decode),
        health_interval_seconds=0.1,
    )
    app = create_app(config)
    with serving(app) as server:
        wait_for(lambda: httpx.get(server.url + "/ready").status_code == 200, "the proxy to be ready")
        document = TokenizerDocument.from_json(httpx.get(nodes.decode[0].url + TOKENIZER_ROUTE).json())
        site = Site(nodes, server.url, app.state.service, document)
        site.settle()
        yield site


@pytest.fixture
def site(service: Service) -> Iterator[Site]:
    yield from site_of(service)


def test_index_when_a_request_is_done_then_it_covers_prompt_and_reply_as_the_node_reports(site: Site) -> None:
    check_coverage(site, seed=811)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "mamba2", "kimi_linear"])
def test_index_of_other_kinds_of_model_covers_what_the_node_reports(family: str) -> None:
    with Service(checkpoint(family), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as nodes:
        for site in site_of(nodes):
            check_coverage(site, seed=812)


def check_coverage(site: Site, seed: int) -> None:
    prompt, other = random_tokens(150, seed=seed), random_tokens(40, seed=seed + 50)
    first = complete(site.url, prompt, 40, cache_salt=SALT)
    reply = first.token_ids()
    site.settle()
    whole = [*prompt, *reply]
    assert site.coverage(whole, site.decode).state_tokens >= len(whole) - 1 - site.document.block_size
    assert site.coverage(whole, site.decode, salt="another").attention_tokens == 0
    num_covered = 0
    for token_ids in (
        prompt,  # an exact repeat
        [*whole, *other],  # turn two
        whole[:-1],  # ends where the reply's own state is, without a row for its last token
        [*prompt[:100], *other],  # parts from it inside a block
        [*whole[:170], *other],
        other,
    ):
        known = site.coverage(token_ids, site.decode).state_tokens
        answer = complete(site.decode.url, token_ids, 2, cache_salt=SALT)  # nobody else is asked: all is local
        assert answer.cached_tokens == known
        num_covered += known
        site.settle()
    assert num_covered > 3 * len(prompt)


def test_prefill_node_when_it_computed_a_prompt_then_the_index_has_it_there_too(site: Site) -> None:
    prompt = random_tokens(100, seed=820)
    complete(site.url, prompt, 4, cache_salt=SALT)
    site.settle()
    assert site.coverage(prompt, site.nodes.prefill[0]) == Coverage(100, 100)


def test_index_when_the_proxy_starts_later_then_a_snapshot_tells_the_same(site: Site, service: Service) -> None:
    prompt = random_tokens(100, seed=821)
    complete(service.url, prompt, 4, cache_salt=SALT)  # through another proxy
    site.settle()
    for later in site_of(service):
        assert later.coverage(prompt, site.decode) == site.coverage(prompt, site.decode) == Coverage(100, 100)
