"""Memory of a transfer endpoint whose blocks and slots are on a GPU, as a node's pools are; its generations are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from common.node.device import thread_entry
from tests.support.transfer_memory import BLOCKS, SLOTS, EndpointMemory


class VramMemory(EndpointMemory):
    """``arenas``: uint8 [num_units, unit_bytes] by region."""

    def __init__(self, device: str, **sizes: Any) -> None:
        self.arenas: dict[str, torch.Tensor] = {}
        self._device = torch.device(device)
        self.enter_thread = thread_entry(self._device)
        super().__init__(**sizes)
        for name in (BLOCKS, SLOTS):
            region = self.regions[name]
            host = torch.frombuffer(self._memory[name], dtype=torch.uint8)
            arena = self.arenas[name] = host.view(region.num_units, -1).to(self._device)
            self.regions[name] = dataclasses.replace(region, address=arena.data_ptr(), device=str(arena.device))
        torch.cuda.synchronize(self._device)

    def read(self, name: str, unit: int) -> bytes:
        if name not in self.arenas:
            return super().read(name, unit)
        return self.arenas[name][unit].cpu().numpy().tobytes()

    def peek(self, name: str, unit: int, num_bytes: int) -> bytes:
        if name not in self.arenas:
            return super().peek(name, unit, num_bytes)
        return self.arenas[name][unit, :num_bytes].cpu().numpy().tobytes()

    def write(self, name: str, unit: int, data: bytes) -> None:
        if name not in self.arenas:
            super().write(name, unit, data)
            return
        self.arenas[name][unit] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        torch.cuda.synchronize(self._device)
