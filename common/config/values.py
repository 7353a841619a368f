"""Words of a command line or an environment variable as values, and back."""

from __future__ import annotations

import ipaddress
import math
import re
import urllib.parse
from dataclasses import dataclass

from common.names import HOST, MAX_NODE_NAME_CHARS, WORD

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_TARGET_MS = 86_400_000
"""Of a target for the first token, or for the time between two: a day."""
DNS_PREFIX = "dns+"
"""Before a node's URL: the name stands for all its addresses."""

_SIZE_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MEDIA_DOMAIN = re.compile(
    r"(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?|\[(?P<ipv6>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?"
)
_OWN_PORTS = {"http": ":80", "https": ":443"}
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off"})


def parse_size(text: str) -> int:
    """Bytes of ``2GiB``, ``512 MiB``, ``1.5gb`` or a plain number. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("not a size such as 512MiB, 2GiB or 1000000")
    return int(float(match[1]) * _SIZE_UNITS[match[2]]) if "." in match[1] else int(match[1]) * _SIZE_UNITS[match[2]]


def format_size(num_bytes: int) -> str:
    """The shortest exact text that ``parse_size`` reads back to ``num_bytes``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def parse_bool(text: str) -> bool:
    """``1 true yes on`` and ``0 false no off`` in any case. Raises ValueError."""
    word = text.strip().lower()
    if word not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError("not one of true, false, 1, 0, yes, no, on, off")
    return word in _TRUE_WORDS


def parse_int(text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise ValueError("not a whole number") from None


def parse_seconds(text: str) -> float:
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("not a number of seconds")
    return value


def format_seconds(seconds: float) -> str:
    return repr(float(seconds)).removesuffix(".0")


def parse_share(text: str) -> float:
    """A number such as ``0.25``. Raises ValueError."""
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("not a number")
    return value


def parse_device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Raises ValueError."""
    word = text.strip()
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", word):
        raise ValueError("not one of auto, cpu, cuda, cuda:N")
    return word


def parse_node_name(text: str) -> str:
    """A name that leaves room for the rest of an engine's name. Raises ValueError."""
    name = text.strip()
    if len(name) > MAX_NODE_NAME_CHARS or not WORD.fullmatch(name):
        raise ValueError(f"not a name of 1 to {MAX_NODE_NAME_CHARS} of the characters A-Z a-z 0-9 . _ : -")
    return name


def parse_host(text: str) -> str:
    """A host name or an IP address as other nodes put it into a URL. Raises ValueError."""
    host = text.strip()
    is_name = not any(character in host for character in ":%[]")
    if not HOST.fullmatch(host) or not (is_name or _is_ipv6(host)):
        raise ValueError(
            "not a host name or an IP address without scheme, port and brackets, such as node-1.example.org, 10.0.0.7 "
            "or fd00::7 (1 to 253 of the characters A-Z a-z 0-9 . _ : - %)"
        )
    return host


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_media_domain(text: str) -> str:
    """``HOST`` or ``HOST:PORT`` in lower case, IPv6 addresses as short as may be and in brackets. Raises ValueError."""
    word = text.strip().lower()
    match = _MEDIA_DOMAIN.fullmatch(f"[{word}]" if _is_ipv6(word) else word)
    port = int(match["port"]) if match is not None and match["port"] else None
    is_port = port is None or 1 <= port <= 65_535
    if match is None or not is_port or (match["ipv6"] and not _is_ipv6(match["ipv6"])):
        raise ValueError(
            "not HOST or HOST:PORT in ASCII, without scheme, path and wildcards: example.org, example.org:8443 or "
            "[2606:4700::1111]:443"
        )
    host = f"[{ipaddress.IPv6Address(match['ipv6'])}]" if match["ipv6"] else match["name"]
    return host if port is None else f"{host}:{port}"


def parse_origin(text: str) -> str:
    """``*``, or ``SCHEME://HOST[:PORT]`` as browsers write it: in lower case, http and https without their own port.
    Raises ValueError."""
    word = text.strip().lower()
    if word == "*":
        return word
    scheme, _, domain = word.partition("://")
    try:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
            raise ValueError
        origin = f"{scheme}://{parse_media_domain(domain)}"
    except ValueError:
        raise ValueError(
            "not * or SCHEME://HOST[:PORT] in ASCII, without a path: https://app.example.org or http://localhost:3000"
        ) from None
    return origin.removesuffix(_OWN_PORTS[scheme]) if scheme in _OWN_PORTS else origin


def parse_url(text: str) -> str:
    """An ``http(s)://host[:port]`` base URL without its trailing slash. Raises ValueError."""
    url = text.strip().rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("not a base URL such as http://127.0.0.1:8100")
    if parts.username is not None or parts.port == 0:  # reading .port raises ValueError when it is out of range
        raise ValueError("not a base URL such as http://127.0.0.1:8100")
    return url


def parse_node_url(text: str) -> str:
    """A base URL, or ``dns+http://name:port``: a node at each address of the name. Raises ValueError."""
    text = text.strip()
    if not text.startswith(DNS_PREFIX):
        return parse_url(text)
    url = parse_url(text.removeprefix(DNS_PREFIX))
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or parts.path:
        # Certificates are for names, and here addresses are called.
        raise ValueError(f"not a name to resolve such as {DNS_PREFIX}http://tandem-decode:8200")
    return DNS_PREFIX + url


@dataclass(frozen=True, slots=True)
class PriorityTargets:
    """Targets of requests with one ``priority``, in milliseconds. None: what all requests have."""

    priority: int
    ttft_ms: int | None = None
    itl_ms: int | None = None

    def __str__(self) -> str:
        return f"{self.ttft_ms or ''}:{self.itl_ms or ''}@{self.priority}"


def parse_priority_targets(text: str) -> PriorityTargets:
    """``TTFT:ITL@PRIORITY``, either target left out: ``500:40@-1``, ``:100@5``. Raises ValueError."""
    match = re.fullmatch(r"(\d{0,8}):(\d{0,8})@([+-]?\d{1,10})", text.strip())
    if match is None or not (match[1] or match[2]):
        raise ValueError("not TTFT:ITL@PRIORITY in milliseconds, such as 500:40@-1 or :100@5")
    ttft_ms, itl_ms = (int(word) if word else None for word in match.groups()[:2])
    for value in (ttft_ms, itl_ms):
        if value is not None and not 1 <= value <= MAX_TARGET_MS:
            raise ValueError(f"out of bounds: a target is from 1 to {MAX_TARGET_MS} milliseconds, got {value}")
    if not -(2**31) <= int(match[3]) < 2**31:
        raise ValueError(f"out of bounds: a priority is from {-(2**31)} to {2**31 - 1}, got {match[3]}")
    return PriorityTargets(int(match[3]), ttft_ms, itl_ms)


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches ``host``, an address or a name; no name but ``localhost`` is looked up or
    trusted."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
