"""A certificate of its own for 127.0.0.1, for processes that serve HTTPS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from common.server.serve import Tls


def make_certificate(folder: Path) -> Tls:
    tls = Tls(str(folder / "cert.pem"), str(folder / "key.pem"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(tls.keyfile), "-out", tls.certfile),
        ],
        check=True,
        capture_output=True,
    )
    return tls
