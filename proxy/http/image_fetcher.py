"""Images that requests name by URL, fetched from the few hosts that the operator allows (``--allowed-media-domains``).

A URL is text from anybody, and what it names may be a machine that only this one reaches. So: 1 its host is one of
those allowed, by name, 2 the name is resolved once, and where any of its addresses is not a public one it is refused, 3
the connection goes to an address that was looked at, whatever the name stands for a moment later, 4 each redirect
begins at 1, and there are few, 5 bytes, of each image and of all of a request, and time are bounded, and nothing is
decompressed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from common.config.dns import Resolver, SystemResolver, host_in_url
from common.errors import ImageRefusedError
from common.images.rules import ImageLimits
from common.images.source import ImageSource, too_long
from common.openai.protocol import ChatRequest

MAX_REDIRECTS = 3
MAX_AT_ONCE = 16
"""Images fetched at a time, by all requests."""
MAX_URL_CHARS = 4096
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PIECE_BYTES = 64 * 1024
# Networks whose addresses stand for IPv4 addresses that lie elsewhere, maybe here.
_TRANSLATED = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")))


def is_public(address: str) -> bool:
    """Whether an IP address is one of the Internet's, for everybody."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        # Site-local ones came before fc00::/7, and count as global.
        if ip.is_site_local or any(ip in network for network in _TRANSLATED):
            return False
    return ip.is_global and not ip.is_multicast


class _NotAllowedError(Exception):
    """Says why, for the client."""


@dataclasses.dataclass(slots=True)
class _Room:
    """Bytes that the images of a request may still have, all together, as they come."""

    num_bytes: int


class _PublicResolver(AbstractResolver):
    """Resolves a name for one connection, which goes to what it returns."""

    def __init__(self, lookup: Resolver, is_allowed: Callable[[str], bool]) -> None:
        self._lookup = lookup
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._lookup(host, port)
        for address in addresses:
            if not self._is_allowed(address):
                raise _NotAllowedError(f"{host} has an address that is not public")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


class ImageFetcher:
    """Lives on the event loop. ``domains``: as ``parse_media_domain`` gives them; none: nothing is fetched.
    ``max_body_bytes``: of a request's body with its images in it, in base64: nodes take no longer one.
    ``lookup`` and ``is_allowed``: instead of the system's resolver and the rule for addresses."""

    def __init__(
        self,
        domains: Sequence[str],
        limits: ImageLimits,
        timeout_s: float,
        *,
        max_body_bytes: int,
        lookup: Resolver | None = None,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._domains = frozenset(domains)
        self._limits = limits
        self._timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._resolver = _PublicResolver(lookup or SystemResolver(), is_allowed)
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, request: ChatRequest, *, num_bytes: int) -> ChatRequest:
        """The request with data in the place of URLs. ``num_bytes``: its body's length.

        Raises:
            ImageRefusedError: a URL is not allowed, or does not give an image within the bounds.
        """
        sources = request.images
        if not self._domains or not any(source.is_remote for source in sources):
            return request
        if len(sources) > self._limits.max_images:
            return request  # to be refused for that
        room = _Room((self._max_body_bytes - num_bytes) * 3 // 4)
        tasks = [asyncio.ensure_future(self._fetched(source, room)) for source in sources]
        try:
            return dataclasses.replace(request, images=tuple(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()

    async def _fetched(self, source: ImageSource, room: _Room) -> ImageSource:
        if not source.is_remote:
            return source
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                data = await self._get(source, room)
        except TimeoutError as exc:
            raise self._refused(source, f"it did not come within --image-fetch-seconds {self._timeout_s:g}") from exc
        except _NotAllowedError as exc:
            raise self._refused(source, str(exc)) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            # Why a connection failed would tell the client about this network.
            raise self._refused(source, "it could not be fetched") from exc
        return await asyncio.to_thread(source.with_data, data)

    @staticmethod
    def _refused(source: ImageSource, why: str) -> ImageRefusedError:
        # What is refused is logged: a query may hold a signature, and what comes before the host a password.
        shown = re.sub(r"//[^/]*@", "//", source.url.partition("?")[0])[:80]
        return ImageRefusedError(f"{source.name}: {shown!r}: {why}", reason="fetch", param=source.name)

    async def _get(self, source: ImageSource, room: _Room) -> bytes:
        if len(source.url) > MAX_URL_CHARS:
            raise _NotAllowedError(f"a URL must have at most {MAX_URL_CHARS} characters")
        url = URL(source.url)
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            async with self._connected().get(url, allow_redirects=False) as answer:
                if answer.status in _REDIRECTS:
                    url = url.join(URL(answer.headers.get("location", "")))
                    continue
                if answer.status != 200:
                    raise _NotAllowedError(f"the answer's status is {answer.status}")
                return await self._read(answer, source, room)
        raise _NotAllowedError(f"it redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: URL) -> None:
        """The same parsed URL is connected to: no second reading of its text could find another host in it."""
        if url.scheme not in ("http", "https"):
            raise _NotAllowedError(f"scheme {url.scheme[:20]!r} is not http or https")
        if url.user is not None or url.password is not None:
            raise _NotAllowedError("user names and passwords are not allowed in URLs")
        host, port = (url.raw_host or "").lower().rstrip("."), url.port
        is_usual = port == {"http": 80, "https": 443}[url.scheme]
        domain = host_in_url(host)
        if f"{domain}:{port}" not in self._domains and not (is_usual and domain in self._domains):
            raise _NotAllowedError("its host is not one of --allowed-media-domains")
        # An address is no name: it is connected to without being resolved.
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return
        if not self._resolver._is_allowed(host):
            raise _NotAllowedError(f"{host} is not a public address")

    async def _read(self, answer: aiohttp.ClientResponse, source: ImageSource, room: _Room) -> bytes:
        if (answer.content_length or 0) > self._limits.max_bytes:
            raise too_long(source.name, self._limits)
        pieces: list[bytes] = []
        num_bytes = 0
        async for piece in answer.content.iter_chunked(_PIECE_BYTES):
            num_bytes += len(piece)
            if num_bytes > self._limits.max_bytes:
                raise too_long(source.name, self._limits)
            room.num_bytes -= len(piece)
            if room.num_bytes < 0:
                raise self._too_long_together(source)
            pieces.append(piece)
        return b"".join(pieces)

    def _too_long_together(self, source: ImageSource) -> ImageRefusedError:
        return ImageRefusedError(
            f"{source.name}: the body with its images in base64 must have at most --max-body-bytes "
            f"{self._max_body_bytes} bytes, whatever --max-image-bytes {self._limits.max_bytes} allows for each",
            reason="limit",
            param=source.name,
        )

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector: Any = aiohttp.TCPConnector(resolver=self._resolver, use_dns_cache=False, force_close=True)
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                headers={"accept-encoding": "identity", "accept": "image/*"},
            )
        return self._session
