"""Which of this node's peers are alive: one stream of beats from each, because the transport cannot tell.

A read from a frozen peer is in progress for as long as it stays frozen, so a peer says every ``BEAT_S`` that it runs.
States of a watched peer: *alive*, *suspect* (silent for ``SILENT_S``: whoever waits for it is told, no new wait begins;
a beat makes it alive again), *dead* (the stream was closed, or another life answers on it: whoever waits is told, the
watch ends; a new handshake begins a new one). A stream that stays silent is opened anew now and then, because a
connection to a machine that is gone may stay open for hours.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from common.errors import TransferError
from common.wire.routes import LIVENESS_ROUTE

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""Time between two beats of a holder."""

SILENT_S = 1.5
"""A peer that was silent for this long is suspect: three beats, so that one late beat is not enough."""

REOPEN_S = 5.0
"""A stream that was silent for this long is closed and opened anew."""

CONNECT_TIMEOUT_S = 1.5
"""How long opening a stream may take."""

RETRY_S = 1.0
"""Pause after a stream could not be opened in time."""

LostCallback = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Watch:
    url: str
    life: tuple[str, str]  # engine id and epoch
    is_suspect: bool = False
    last_beat_s: float = 0.0  # on the loop's clock
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Liveness:
    """Used on the event loop only, until ``close``.

    ``on_dead(url)``: the life behind a URL is over. ``http`` must allow any number of connections: a stream keeps one.
    """

    def __init__(self, http: httpx.AsyncClient, on_dead: Callable[[str], None]) -> None:
        self._http = http
        self._on_dead = on_dead
        self._watches: dict[str, _Watch] = {}
        self._subscribers: dict[str, list[LostCallback]] = {}

    async def close(self) -> None:
        watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            self._stop_timer(watch)
            if watch.task is not None:
                watch.task.cancel()
        await asyncio.gather(*(watch.task for watch in watches if watch.task is not None), return_exceptions=True)

    def watch(self, url: str, engine_id: str, epoch: int) -> None:
        """Begins to listen to a peer that has just answered; does nothing when that life is watched already."""
        life = (engine_id, str(epoch))
        old = self._watches.get(url)
        if old is not None:
            if old.life == life:
                return
            self._stop_timer(old)
            if old.task is not None:
                old.task.cancel()
            self._notify(url, "it was restarted")
        watch = self._watches[url] = _Watch(url, life)
        self._heard(watch)
        watch.task = asyncio.create_task(self._listen(watch), name=f"liveness {url}")

    def check(self, url: str) -> None:
        """Raises TransferError (``peer_lost``) for a suspect peer, so that no wait for it begins."""
        watch = self._watches.get(url)
        if watch is not None and watch.is_suspect:
            silent_s = asyncio.get_running_loop().time() - watch.last_beat_s
            raise TransferError(f"{url} has been silent for {silent_s:.1f} s", code="peer_lost")

    def subscribe(self, url: str, on_lost: LostCallback) -> Callable[[], None]:
        """``on_lost(why)`` is called once when the peer becomes suspect or dead, and soon if it is suspect now. Returns
        a function that ends the subscription; calling it twice is fine."""
        subscribers = self._subscribers.setdefault(url, [])
        subscribers.append(on_lost)
        watch = self._watches.get(url)
        if watch is not None and watch.is_suspect:
            asyncio.get_running_loop().call_soon(self._notify, url, "it is silent")

        def unsubscribe() -> None:
            if on_lost in self._subscribers.get(url, ()):
                self._subscribers[url].remove(on_lost)
                if not self._subscribers[url]:
                    del self._subscribers[url]

        return unsubscribe

    async def _listen(self, watch: _Watch) -> None:
        """Reads beats until the peer's life is over, or for good when it has no such route."""
        while True:
            try:
                why = await self._read_stream(watch)
            except TimeoutError:
                continue
            except httpx.TimeoutException:
                await asyncio.sleep(RETRY_S)
                continue
            except (httpx.HTTPError, httpx.StreamError) as exc:
                why = f"its liveness stream ended: {type(exc).__name__}"
            break
        self._stop_timer(watch)
        if why is None:
            watch.is_suspect = False  # a peer of another make has no beats: nothing is ever known of its life
            return
        if self._watches.get(watch.url) is watch:
            del self._watches[watch.url]
            logger.warning("peer dead url=%s: %s", watch.url, why)
            self._on_dead(watch.url)
            self._notify(watch.url, why)

    async def _read_stream(self, watch: _Watch) -> str | None:
        """Why the stream ended; None: the peer has no such route. Raises TimeoutError when it has been silent for
        ``REOPEN_S``."""
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)
        loop = asyncio.get_running_loop()
        async with (
            asyncio.timeout(REOPEN_S) as limit,
            self._http.stream("GET", watch.url + LIVENESS_ROUTE, timeout=timeout) as response,
        ):
            if response.status_code != 200:
                logger.warning("peer without beats url=%s status=%d", watch.url, response.status_code)
                return None
            async for line in response.aiter_lines():
                life = _life(line)
                if life != watch.life:
                    return f"another life answers: {life}, was {watch.life}"
                self._heard(watch)
                limit.reschedule(loop.time() + REOPEN_S)
        return "its liveness stream ended"

    def _heard(self, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        if watch.is_suspect:
            logger.info("peer alive again url=%s", watch.url)
        watch.is_suspect = False
        watch.last_beat_s = loop.time()
        self._stop_timer(watch)
        watch.timer = loop.call_later(SILENT_S, self._check_beats, watch)

    def _check_beats(self, watch: _Watch) -> None:
        # Our own event loop may have been busy: beats that have come by now are read before the next timer.
        watch.timer = asyncio.get_running_loop().call_later(BEAT_S / 10, self._suspect, watch)

    def _suspect(self, watch: _Watch) -> None:
        watch.timer = None
        watch.is_suspect = True
        logger.warning("peer suspect url=%s: silent for more than %.1f s", watch.url, SILENT_S)
        self._notify(watch.url, "it is silent")

    def _notify(self, url: str, why: str) -> None:
        for on_lost in self._subscribers.pop(url, ()):
            on_lost(why)

    @staticmethod
    def _stop_timer(watch: _Watch) -> None:
        if watch.timer is not None:
            watch.timer.cancel()
            watch.timer = None


def _life(line: str) -> tuple[str, str]:
    """Engine id and epoch of a beat; two empty texts for a line that is no beat."""
    try:
        beat = json.loads(line)
    except ValueError:
        beat = None
    return (str(beat.get("engine_id")), str(beat.get("epoch"))) if isinstance(beat, dict) else ("", "")
