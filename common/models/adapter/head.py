"""The output head of any family: the stock causal-LM forward, with rows handed in instead of the base model's.

Scaling, soft-capping and the like are applied by the family's own code after the base model returns. So that code is
run as it is, on rows kept from an earlier step, while the base model's forward hands those rows out instead of
computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_STANDING_IN: ContextVar[Tensor | None] = ContextVar("standing_in", default=None)


class Head:
    """Replaces the forward of one base model, which still computes as before outside of :meth:`forward`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        base = model.base_model
        self._stock = base.forward
        self._output_class: type | None = None
        base.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = _STANDING_IN.get()
        if rows is None:
            output = self._stock(*args, **kwargs)
            self._output_class = type(output)
            return output
        assert self._output_class is not None, "the head ran before the first forward"
        return self._output_class(last_hidden_state=rows[None])

    def logits(self, rows: Tensor) -> Tensor:
        """[R, hidden] rows after the final norm -> [R, vocab] float32 logits."""
        return self.forward(rows).float()

    @torch.inference_mode()
    def forward(self, rows: Tensor) -> Tensor:
        """The same logits in the model's own dtype."""
        with _stand_in(rows):
            ids = torch.zeros(1, rows.shape[0], dtype=torch.long, device=rows.device)
            output = self._model(input_ids=ids, use_cache=False)
        logits: Tensor = output.logits[0]
        return logits


@contextmanager
def _stand_in(rows: Tensor) -> Iterator[None]:
    token = _STANDING_IN.set(rows)
    try:
        yield
    finally:
        _STANDING_IN.reset(token)
