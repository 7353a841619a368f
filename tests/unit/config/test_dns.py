"""How hosts are looked up: what a lookup that hangs costs others, and what it does not."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from common.config import dns
from common.config.dns import DnsName, SystemResolver
from tests.support.fake_dns import FakeDns, refuse_loop_threads

NAME = DnsName("dns+http://prefill:8100")


@pytest.mark.asyncio
async def test_name_when_its_lookup_hangs_then_there_is_no_second_one_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_loop_threads()
    fake = FakeDns(monkeypatch, prefill=["10.0.0.7", "fd00::7"], decode=["10.0.0.8"])
    fake.hanging.add("prefill")
    resolve = SystemResolver()
    with monkeypatch.context() as patch:
        patch.setattr(dns, "RESOLVE_TIMEOUT_S", 0.01)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await NAME.node_urls(resolve)
    assert await resolve("decode", 8200) == ["10.0.0.8"]  # hangs behind nobody
    first = asyncio.create_task(NAME.node_urls(resolve))
    left = asyncio.create_task(NAME.node_urls(resolve))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    assert sorted(fake.asked) == ["decode", "prefill"]
    fake.go_on.set()
    assert await first == {"http://10.0.0.7:8100", "http://[fd00::7]:8100"}
    fake.answers["prefill"] = ["10.0.0.9"]
    assert await NAME.node_urls(resolve) == {"http://10.0.0.9:8100"}
    assert fake.asked.count("prefill") == 2


@pytest.mark.asyncio
async def test_name_when_its_answer_comes_late_then_who_asks_next_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a name that always takes longer than anybody waits would never be resolved."""
    fake = FakeDns(monkeypatch, prefill=["10.0.0.7"])
    fake.hanging.add("prefill")
    resolve = SystemResolver()
    for _ in range(2):
        fake.go_on.clear()
        with monkeypatch.context() as patch:
            patch.setattr(dns, "RESOLVE_TIMEOUT_S", 0.01)
            with pytest.raises(TimeoutError):
                await NAME.node_urls(resolve)
        fake.go_on.set()
        for thread in threading.enumerate():
            if thread.name == "dns prefill":
                thread.join()
        num_asked = len(fake.asked)
        if fake.answers["prefill"]:
            assert await NAME.node_urls(resolve) == {"http://10.0.0.7:8100"}
            assert len(fake.asked) == num_asked
            fake.answers["prefill"] = []
        else:  # that it failed is no answer
            fake.answers["prefill"] = ["10.0.0.8"]
            assert await NAME.node_urls(resolve) == {"http://10.0.0.8:8100"}


@pytest.mark.asyncio
async def test_name_when_its_lookup_fails_then_all_that_wait_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_loop_threads()
    fake = FakeDns(monkeypatch, prefill=[])
    fake.hanging.add("prefill")
    resolve = SystemResolver()
    asking = [asyncio.create_task(resolve("prefill", 8100)) for _ in range(3)]
    await asyncio.sleep(0)
    fake.go_on.set()
    failures = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(failure) for failure in failures] == [socket.gaierror] * 3
    assert fake.asked == ["prefill"]
    with pytest.raises(UnicodeError):
        await resolve("a" * 64 + ".test", 80)


@pytest.mark.asyncio
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fd00::7"])
async def test_address_when_it_is_looked_up_then_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    refuse_loop_threads()
    resolve = SystemResolver()
    with monkeypatch.context() as patch:
        patch.setattr(dns.threading, "Thread", None)
        assert await resolve(address, 80) == [address]
        [(family, kind, *_, found)] = await resolve.look_up(address, 80)
    assert family == (socket.AF_INET6 if ":" in address else socket.AF_INET)
    assert (kind, found[:2]) == (socket.SOCK_STREAM, (address, 80))
