"""What a part is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]
"""One finding: plain data. ``kind`` says which rows of a part make a table."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    Attributes:
        smoke: tiny sizes, so that the program itself can be tried on a CPU.
        work: of a model's job: ``decode``, ``prefill`` or both.
        model: whose job it is.
        backend: ``--ops-backend`` of what is measured.
        limit_s: the job's time limit; a part with several children of its own shares it out.
        soak_s: how long pulls are repeated.
    """

    smoke: bool
    out: str
    work: tuple[str, ...] = ()
    model: str = ""
    backend: str = "auto"
    limit_s: float = 60.0
    soak_s: float = 20.0

    def backend_on(self, device_type: str) -> str:
        """On a CPU ``auto`` is torch: what it would choose there has to be compiled, and is not what this is about."""
        return "torch" if (self.backend, device_type) == ("auto", "cpu") else self.backend

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        fields = json.loads(text)
        return cls(**{**fields, "work": tuple(fields["work"])})
