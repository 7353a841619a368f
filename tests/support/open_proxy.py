"""A proxy to which one loopback address is a public one, as a web server on the Internet would have: so that fetching
images, and what is refused of it, can be tested through a real process. ``python -m tests.support.open_proxy FLAGS``.

``images.test`` is always that server; ``turns.test`` is it when first asked, and this machine from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.server.serve import end_process, run_main
from proxy.__main__ import main
from proxy.http import image_fetcher

SERVER = "127.0.0.2"
_num_asked: dict[str, int] = {}


async def _look_up(host: str, port: int) -> Sequence[str]:
    _num_asked[host] = _num_asked.get(host, 0) + 1
    if host == "turns.test":
        return [SERVER if _num_asked[host] % 2 else "127.0.0.1"]
    return [SERVER] if host == "images.test" else [host]


if __name__ == "__main__":
    defaults = image_fetcher.ImageFetcher.__init__.__kwdefaults__
    defaults |= {"lookup": _look_up, "is_allowed": lambda host: host == SERVER or image_fetcher.is_public(host)}
    end_process(run_main(main, program="tandem proxy"))
