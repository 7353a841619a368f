"""What the ranks of a node say to each other within a forward: sums, in rank order."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

HOST = "127.0.0.1"
"""The ranks of a node are processes of one machine."""


class RankGroup:
    """Rank ``rank`` of ``size``, connected with the others over gloo; every rank calls the same in the same order.

    A sum is one gather, added up in rank order and in float32. So all ranks have the same bits, and a row's do not
    depend on which other rows there are: gloo's own sum over three ranks or more cuts a tensor into as many pieces and
    adds each up in an order of its own.
    """

    def __init__(self, store_path: str, rank: int, size: int, timeout_s: float) -> None:
        """Waits until all ranks are here. ``store_path``: a file that they share, by which they find each other; not
        there before. ``timeout_s``: also of everything that is waited for later.

        Raises:
            RuntimeError: not all are here after ``timeout_s`` seconds.
        """
        self.rank, self.size = rank, size
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.FileStore(store_path, size)
        store.set_timeout(timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timeout
        options._threads = 1
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, in rank order; all are of the same shape and dtype.

        Raises:
            RuntimeError: a rank is gone, or does not answer.
        """
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` added up, in its dtype. Raises as ``gather``."""
        first, *others = self.gather(x)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)
