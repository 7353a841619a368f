"""Liveness: alive, suspect, dead; who waits is told once, who comes to a suspect peer is refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.errors import TransferError
from common.node.peers import liveness
from tests.support.http_server import AppServer
from tests.unit.node.conftest import Reader, Served
from tests.unit.node.holder import PeerHolder

pytestmark = pytest.mark.asyncio
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENT_S", 0.3)
    monkeypatch.setattr(liveness, "RETRY_S", 0.02)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def lost(reader: Reader, url: str) -> asyncio.Future[str]:
    """Connected, and waiting to be told."""
    await reader.peers.meet(url)
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reader.peers.liveness.subscribe(url, told.set_result)
    return told


async def test_peer_when_it_beats_then_nobody_is_told(reader: Reader, served: Served) -> None:
    told = await lost(reader, served.url)
    await asyncio.sleep(0.6)
    assert not told.done()
    assert served.holder.num_handshakes == 1
    await reader.peers.meet(served.url)
    assert served.holder.num_handshakes == 1


async def test_peer_when_its_stream_ends_then_is_dead_and_shaken_hands_with_anew(
    reader: Reader, served: Served
) -> None:
    told = await lost(reader, served.url)
    served.holder.is_over = True
    assert "ended" in await asyncio.wait_for(told, WAIT_S)
    served.holder.is_over = False
    await reader.peers.meet(served.url)
    assert served.holder.num_handshakes == 2


async def test_peer_when_silent_thenis_suspect_until_it_beats_again(reader: Reader, served: Served) -> None:
    told = await lost(reader, served.url)
    served.holder.beats = False
    assert "silent" in await asyncio.wait_for(told, WAIT_S)
    for attempt in (reader.peers.meet(served.url), reader.peers.connect(served.url, "holder", 77)):
        with pytest.raises(TransferError) as caught:
            await attempt
        assert caught.value.code == "peer_lost"
    late: list[str] = []
    reader.peers.liveness.subscribe(served.url, late.append)
    await until(lambda: late)
    assert served.holder.num_handshakes == 1
    served.holder.beats = True

    await until(lambda: not is_suspect(reader, served.url))
    await reader.peers.meet(served.url)
    assert served.holder.num_handshakes == 1, "the same life: what was shaken hands on still holds"


async def test_peer_when_silent_for_long_then_the_stream_is_opened_anew_and_a_dead_one_found_out(
    reader: Reader, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "REOPEN_S", 0.4)
    told = await lost(reader, served.url)
    served.holder.beats = False
    await asyncio.wait_for(told, WAIT_S)
    assert is_suspect(reader, served.url)
    served.holder.is_over = True  # streams that are opened from now on end at once
    await until(lambda: not is_suspect(reader, served.url))
    served.holder.is_over = False
    served.holder.beats = True
    await reader.peers.meet(served.url)
    assert served.holder.num_handshakes == 2, "that life was over"


def is_suspect(reader: Reader, url: str) -> bool:
    try:
        reader.peers.liveness.check(url)
    except TransferError:
        return True
    return False


async def test_peer_when_restarted_on_its_port_then_the_old_life_is_over(reader: Reader, served: Served) -> None:
    told = await lost(reader, served.url)
    served.holder.is_over = True
    await asyncio.to_thread(served.server.stop)
    await asyncio.wait_for(told, WAIT_S)
    successor = PeerHolder(served.holder.hub, epoch=78)
    server = AppServer(successor.app(), served.server.port)
    try:
        with pytest.raises(TransferError) as caught:
            await reader.peers.connect(served.url, "holder", 77)
        assert caught.value.code == "peer_restarted"
        assert (await reader.peers.connect(served.url, "holder", 78)).epoch == 78
    finally:
        successor.is_over = True
        await asyncio.to_thread(server.stop)
        successor.backend.close()


async def test_beat_when_of_another_life_then_the_known_one_is_over(reader: Reader, served: Served) -> None:
    told = await lost(reader, served.url)
    served.holder.epoch = 78
    assert "another life" in await asyncio.wait_for(told, WAIT_S)


async def test_peer_when_it_has_no_beats_then_is_taken_for_alive(reader: Reader, served: Served) -> None:
    served.holder.has_beats_route = False
    told = await lost(reader, served.url)
    await asyncio.sleep(0.6)
    assert not told.done()
    await reader.peers.meet(served.url)
    assert served.holder.num_handshakes == 1


async def test_subscriber_when_it_has_left_then_is_not_told(reader: Reader, served: Served) -> None:
    told = await lost(reader, served.url)
    called: list[str] = []
    leave = reader.peers.liveness.subscribe(served.url, called.append)
    leave()
    leave()
    served.holder.is_over = True
    await asyncio.wait_for(told, WAIT_S)
    await asyncio.sleep(0)
    assert called == []
