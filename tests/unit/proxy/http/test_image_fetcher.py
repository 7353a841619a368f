"""URLs of images: where they may lead, and where not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import pytest

from common.config.command_line import parse_config
from common.config.proxy import ProxyConfig
from common.errors import ImageRefusedError
from common.images.rules import ImageLimits
from common.images.source import ImageSource
from common.openai.protocol import ChatRequest, parse_chat
from proxy.http.image_fetcher import ImageFetcher, is_public
from tests.support.fake_dns import FakeDns, refuse_loop_threads
from tests.unit.images.test_security import encoded

PICTURE = encoded(20, 10, "PNG")
LIMITS = ImageLimits(max_images=4, max_bytes=100_000)
MAX_BODY_BYTES = 1_000_000
BODY_BYTES = 500


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "192.0.0.1", "198.18.0.1", "203.0.113.7", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "::ffff:127.0.0.1", "::ffff:7f00:1", "0:0:0:0:0:ffff:a9fe:a9fe", "::127.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::", "64:ff9b:1::1"),
        *("fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "feff::1", "ff02::1", "2001:db8::1"),
        *("nonsense", ""),
    ],
)
def test_address_when_it_is_not_everybodys_then_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_address_when_it_is_of_the_internet_then_allowed(address: str) -> None:
    assert is_public(address)


@dataclass
class World:
    """A web server on this machine whose address counts as public, and a name server that is told what to say."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    addresses: list[Sequence[str]] = field(default_factory=lambda: [["127.0.0.1"]])

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.addresses[min(len(self.asked), len(self.addresses)) - 1]

    def fetcher(self, timeout_s: float = 5.0, max_body_bytes: int = MAX_BODY_BYTES) -> ImageFetcher:
        domains = [f"images.test:{self.port}", f"other.test:{self.port}", "plain.test", f"127.0.0.1:{self.port}"]
        return ImageFetcher(
            domains,
            LIMITS,
            timeout_s,
            max_body_bytes=max_body_bytes,
            lookup=self.look_up,
            is_allowed=lambda address: address == "127.0.0.1" or is_public(address),
        )

    def url(self, path: str, host: str = "images.test") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        self.paths.append(path)
        while (await reader.readline()).strip():
            pass
        kind, _, target = unquote(path[1:]).partition("?")
        if kind == "redirect":
            writer.write(f"HTTP/1.1 302 Found\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode())
        elif kind == "loop":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: /loop\r\ncontent-length: 0\r\n\r\n")
        elif kind == "endless":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(PICTURE + bytes(60_000))
                await writer.drain()
        elif kind == "slow":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n")
            for _ in range(100):
                writer.write(b"x")
                await asyncio.sleep(0.05)
        elif kind == "long":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n")
        elif kind == "zipped":
            head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(PICTURE)}\r\n\r\n"
            writer.write(head.encode() + PICTURE)
        elif kind == "missing":
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(PICTURE)}\r\n\r\n".encode() + PICTURE)
        await writer.drain()
        await reader.read()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()

    answering: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(cast("asyncio.Task[Any]", asyncio.current_task()))
        try:
            await made.answer(reader, writer)
        except (ConnectionError, IndexError, asyncio.CancelledError):
            pass  # as the test ends
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        await asyncio.sleep(0)


def request(*urls: str) -> ChatRequest:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return parse_chat({"messages": [{"role": "user", "content": content}]})


async def fetched(
    it: World, *urls: str, timeout_s: float = 5.0, max_body_bytes: int = MAX_BODY_BYTES
) -> tuple[ImageSource, ...]:
    fetcher = it.fetcher(timeout_s, max_body_bytes)
    try:
        return (await fetcher.fetch(request(*urls), num_bytes=BODY_BYTES)).images
    finally:
        await fetcher.close()


@pytest.mark.asyncio
async def test_image_when_its_host_is_allowed_then_its_bytes_take_the_urls_place() -> None:
    async with world() as it:
        given = ImageSource("messages[0].content[1].image_url.url", "data:image/png;base64,aaaa")
        plain, data, moved = await fetched(
            it, it.url("/a"), given.url, it.url("/redirect?" + it.url("/b", "other.test"))
        )
        assert plain.read(LIMITS).data == moved.read(LIMITS).data == PICTURE
        assert data == given
        # Once for each connection, to the address that was looked at.
        assert sorted(it.asked) == ["images.test", "images.test", "other.test"]


REFUSED = {
    "a host that is not allowed": ("http://example.com/a.png", "--allowed-media-domains"),
    "an allowed host at another port": ("http://images.test:22/", "--allowed-media-domains"),
    "an allowed host's subdomain": ("http://a.plain.test/", "--allowed-media-domains"),
    "the host in the user's place": ("http://images.test:{port}@169.254.169.254/", "user names"),
    "cloud metadata": ("http://169.254.169.254/latest/meta-data/", "--allowed-media-domains"),
    "loopback as a number": ("http://2130706433:{port}/a", "--allowed-media-domains"),
    "loopback in IPv6": ("http://[::1]:{port}/a", "--allowed-media-domains"),
    "a redirect to metadata": ("http://images.test:{port}/redirect?http://169.254.169.254/", "--allowed-media-domains"),
    "a redirect to loopback": ("http://images.test:{port}/redirect?http://[::ffff:7f00:1]/", "--allowed-media-domains"),
    "a redirect to a file": ("http://images.test:{port}/redirect?file:///etc/passwd", "scheme 'file'"),
    "redirects without an end": ("http://images.test:{port}/loop", "more than 3 times"),
    "an endless body": ("http://images.test:{port}/endless", "--max-image-bytes"),
    "a body that says it is long": ("http://images.test:{port}/long", "--max-image-bytes"),
    "a missing image": ("http://images.test:{port}/missing", "status is 404"),
    "a long URL": ("http://images.test:{port}/" + "a" * 5000, "4096 characters"),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("case", REFUSED)
async def test_url_when_it_leads_elsewhere_or_brings_too_much_then_refused(case: str) -> None:
    url, words = REFUSED[case]
    async with world() as it:
        with pytest.raises(ImageRefusedError, match=words):
            await fetched(it, url.replace("{port}", str(it.port)))
        assert all(path.startswith(("/redirect", "/loop", "/endless", "/long", "/missing")) for path in it.paths)


@pytest.mark.asyncio
async def test_url_when_it_is_refused_then_its_query_and_its_password_are_not_told() -> None:
    """What is refused is logged."""
    async with world() as it:
        with pytest.raises(ImageRefusedError, match="/missing") as refused:
            await fetched(it, it.url("/missing?signature=secret"))
        assert it.paths == ["/missing?signature=secret"]
        assert "secret" not in str(refused.value)
        with pytest.raises(ImageRefusedError, match="passwords are not allowed") as refused:
            await fetched(it, it.url("/missing").replace("://", "://somebody:secret@"))
    assert "secret" not in str(refused.value)
    assert "somebody" not in str(refused.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("word", "url"),
    [
        ("Example.ORG.", "https://example.org/a"),
        ("example.org.:08443", "https://EXAMPLE.org.:8443/a"),
        ("10.0.0.1:80", "http://10.0.0.1/a"),
        ("[0:0::1]:8080", "http://[::1]:8080/a"),
        ("0:0::1", "https://[0::1]/a"),
    ],
)
async def test_domain_when_the_flag_takes_it_then_urls_of_that_host_match(word: str, url: str) -> None:
    argv = ["--decode", "http://d:1", "--allowed-media-domains", word]
    domains = parse_config(ProxyConfig, argv, {}, prog="tandem proxy").allowed_media_domains
    fetcher = ImageFetcher(
        domains,
        LIMITS,
        5.0,
        max_body_bytes=MAX_BODY_BYTES,
        lookup=World().look_up,
        is_allowed=lambda _: False,
    )
    try:
        with pytest.raises(ImageRefusedError, match="public"):  # behind the look at the host
            await fetcher.fetch(request(url), num_bytes=BODY_BYTES)
    finally:
        await fetcher.close()


@pytest.mark.asyncio
async def test_name_when_dns_fails_then_no_thread_of_the_event_loop_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are few and everybody's: names that hang, which anybody may send, would have all of them."""
    refuse_loop_threads()
    fake = FakeDns(monkeypatch, images_test=[])
    fetcher = ImageFetcher(["images.test"], LIMITS, 30.0, max_body_bytes=MAX_BODY_BYTES)
    try:
        with pytest.raises(ImageRefusedError, match="could not be fetched"):
            await fetcher.fetch(request("http://images.test/a"), num_bytes=BODY_BYTES)
    finally:
        await fetcher.close()
    assert fake.asked == ["images.test"]


@pytest.mark.asyncio
async def test_name_when_one_of_its_addresses_is_not_public_then_nothing_is_connected_to() -> None:
    async with world() as it:
        it.addresses = [["127.0.0.1", "10.0.0.1"]]
        with pytest.raises(ImageRefusedError, match="not public"):
            await fetched(it, it.url("/a"))
        assert it.paths == []


@pytest.mark.asyncio
async def test_name_when_it_resolves_differently_the_second_time_then_that_is_looked_at_too() -> None:
    async with world() as it:
        it.addresses = [["127.0.0.1"], ["169.254.169.254"]]
        with pytest.raises(ImageRefusedError, match="not public"):
            await fetched(it, it.url("/redirect?" + it.url("/a")))
        assert it.paths == [it.paths[0]]


@pytest.mark.asyncio
async def test_body_when_it_is_slow_then_given_up_and_the_loop_is_free_meanwhile() -> None:
    async with world() as it:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        turning = asyncio.create_task(turn())
        with pytest.raises(ImageRefusedError, match=r"--image-fetch-seconds 0\.3"):
            await fetched(it, it.url("/slow"), timeout_s=0.3)
        turning.cancel()
        assert turns >= 5


@pytest.mark.asyncio
async def test_body_when_it_says_that_it_is_compressed_then_it_is_read_as_it_is() -> None:
    async with world() as it:
        [source] = await fetched(it, it.url("/zipped"))
        assert source.read(LIMITS).data == PICTURE


@pytest.mark.asyncio
async def test_request_when_it_has_too_many_images_then_nothing_is_fetched() -> None:
    async with world() as it:
        assert len(await fetched(it, *[it.url("/a")] * 5)) == 5
        assert it.paths == []


@pytest.mark.asyncio
async def test_images_when_they_would_make_the_body_too_long_together_then_refused_with_both_bounds() -> None:
    base64_bytes = 4 * -(-len(PICTURE) // 3)
    async with world() as it:
        urls = [it.url("/a"), it.url("/b")]
        most = BODY_BYTES + 2 * base64_bytes
        assert len(await fetched(it, *urls, max_body_bytes=most)) == 2
        with pytest.raises(ImageRefusedError) as refused:
            await fetched(it, *urls, max_body_bytes=most - 8)
    assert (refused.value.code, refused.value.reason) == ("invalid_image", "limit")
    assert f"--max-body-bytes {most - 8} bytes" in str(refused.value)
    assert f"--max-image-bytes {LIMITS.max_bytes}" in str(refused.value)
