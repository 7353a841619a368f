"""A forward on the meta device, where there are shapes but no values: how many kernels it launches, and what in it a
graph could not capture. Asking for a value raises there by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from common.models.fused.residual import ResidualSum
from tests.support.row_ops import TorchElementwise, TorchFusedOps, TorchNorms, TorchRotary

_NO_KERNEL = frozenset({"aten::_unsafe_view", "aten::detach", "aten::lift_fresh"})
_KERNELS = {"attention": 2}
"""Of ops that take more than one: the parts of a context, then what joins them."""


class KernelCounter(TorchDispatchMode):
    """Attributes: ``kernels`` by name; ``cpu_tensors``: operations whose result lies in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.cpu_tensors: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.kernels.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ResidualSum) for kind in types):
            return NotImplemented  # it may come to nothing; what it comes to is seen here again
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and "empty" not in name and name not in _NO_KERNEL:
            self.kernels[name] += 1
        if any(isinstance(x, Tensor) and x.device.type == "cpu" for x in tree_flatten(result)[0]):
            self.cpu_tensors[name] += 1
        return result


class CountedOps(TorchFusedOps):
    """Computes with torch where there are values; on the meta device an op gives shapes and counts as its kernels in
    ``counter``, if one is set."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: KernelCounter | None = None
        self.norms, self.elementwise, self.rotary = (
            self._counted(ops) for ops in (TorchNorms(), TorchElementwise(), TorchRotary())
        )
        for name, fake in _FAKES.items():
            setattr(self, name, self._count(name, getattr(super(), name), fake))

    def _counted(self, ops: Any) -> Any:
        for name in [name for name in dir(ops) if not name.startswith("_")]:
            setattr(ops, name, self._count(name, getattr(ops, name)))
        return ops

    def _count(self, name: str, op: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(x, Tensor) and x.is_meta for x in tree_flatten((args, kwargs))[0]):
                return op(*args, **kwargs)
            counter, self.counter = self.counter, None  # what an op calls is part of it
            if counter is not None:
                counter.kernels[name] += _KERNELS.get(name, 1)
            try:
                with _disable_current_modes():
                    return (fake or op)(*args, **kwargs)
            finally:
                self.counter = counter

        return counted


_FAKES: dict[str, Callable[..., Any]] = {
    "activation": lambda name, x: torch.empty_like(x),
    "conv1d": lambda x, *args, **kwargs: x.new_empty(x.shape),
    "mamba2": lambda x, *args, **kwargs: x.new_empty(x.shape),
    "mamba1": lambda x, *args, **kwargs: x.new_empty(x.shape, dtype=torch.float32),
    "gated_delta": lambda query, key, value, *args: value.new_empty(value.shape),
    "kimi_delta": lambda query, key, value, *args: value.new_empty(value.shape),
    "write_kv": lambda *args: None,
    "attention": lambda query, key, value, *args: query.new_empty(*query.shape[:2], value.shape[-1]),
}
