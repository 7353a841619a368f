"""Words of a command line or an environment variable as values, and back."""

from __future__ import annotations

import ipaddress
import math
import re
import urllib.parse

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DNS_PREFIX = "dns+"
"""Before a node's URL: the name stands for all its addresses."""

_SIZE_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
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


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches ``host``, an address or a name; no name but ``localhost`` is looked up or
    trusted."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
