"""Asks the process of this container whether it is well: ``python -m common.cli.probe /health`` (or ``/ready``).

For container health checks, where neither curl nor the flags of the process are at hand: address and port are those of
``TANDEM_HOST`` and ``TANDEM_PORT``, asked over TLS where ``TANDEM_SSL_CERTFILE`` is set. Status 0 on a 200, else 1 with
the reason.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

TIMEOUT_S = 2.0
"""Seconds for the answer; container engines give a check a few more."""
ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - not bound to, but looked up
"""Address that a process binds to -> address at which it is reached from its own machine."""


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    if len(argv) != 1 or not argv[0].startswith("/"):
        sys.stderr.write("usage: python -m common.cli.probe /PATH\n")
        return 2
    port = environment.get("TANDEM_PORT")
    if port is None:
        sys.stderr.write("TANDEM_PORT is not set: the port of this process is not known\n")
        return 2
    host = environment.get("TANDEM_HOST", "")
    scheme = "https" if environment.get("TANDEM_SSL_CERTFILE") else "http"
    place = ANY_ADDRESS.get(host, f"[{host}]" if ":" in host else host)
    url = f"{scheme}://{place}:{port}{argv[0]}"
    try:
        # The certificate names the address that clients use, not this one.
        context = ssl._create_unverified_context() if scheme == "https" else None  # noqa: S323
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:  # noqa: S310
            answer.read()
    except (urllib.error.URLError, OSError, ValueError) as exc:
        sys.stderr.write(f"{url}: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
