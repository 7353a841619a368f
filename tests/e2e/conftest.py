"""Services that tests share: starting three processes takes longer than most tests.

Tests of the shared ``service`` leave it as they found it but for what is cached: they use prompts of their own (a seed
of ``random_tokens`` or a ``cache_salt`` that no other test uses) and kill nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.support.models import checkpoint
from tests.support.reference import Reference
from tests.support.reference import reference as reference_of
from tests.support.service import Service

FAMILY = "granitemoehybrid"
NODE_FLAGS = (
    *("--dtype", "float32"),
    *("--max-num-batched-tokens", "256"),
    *("--max-model-len", "4096"),
    *("--kv-cache-memory", "128MiB"),
)


@pytest.fixture(scope="package")  # its processes need not idle beside the tests of other folders
def service() -> Iterator[Service]:
    """One prefill node, one decode node and a proxy with the tiny Mamba-2 hybrid in float32, chunks of 256 tokens."""
    with Service(checkpoint(FAMILY), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as running:
        yield running


REPORTED_CHARS = 1500
"""Of each log: a failure's own words must not drown in them."""

TIGHT_FLAGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "2048"),
    *("--max-num-seqs", "6"),
    *("--kv-lease-seconds", "2"),
    *("--state-memory-share", "0.25"),
    *("--eviction-policy", "lru"),  # which memory is reused next must not depend on what came before
)


@pytest.fixture(scope="module")  # three files use it: it need not idle beside all the others
def tight_service() -> Iterator[Service]:
    """As ``service`` with hardly more memory than one longest sequence needs, short leases, few sequences at once and a
    slow prefill (8 tokens a step), so that requests queue, evict and preempt each other.

    Reads go over TCP, where the holder's process takes part in each: stopping it keeps a pull in flight.
    """
    with Service(
        checkpoint(FAMILY),
        prefill_flags=(*TIGHT_FLAGS, "--max-num-batched-tokens", "8", "--kv-cache-memory", "2MiB"),
        decode_flags=(*TIGHT_FLAGS, "--max-num-batched-tokens", "64", "--kv-cache-memory", "1400KiB"),
        environment={"UCX_TLS": "tcp,self"},
    ) as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers' own model of the checkpoint that ``service`` serves."""
    return reference_of(FAMILY)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows what the processes of a failed test said last."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            found = value if isinstance(value, Service) else getattr(value, "service", None)
            if isinstance(found, Service):
                for node in (each for each in found.nodes if each.process.log.exists()):
                    log = node.process.tail(REPORTED_CHARS)
                    report.sections.append((f"end of the log of {node.role} {node.url}", log))
    return report
