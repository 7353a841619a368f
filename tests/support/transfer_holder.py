"""A process that holds memory for others to read: ``python -m tests.support.transfer_holder``.

Speaks JSON lines: the first line of stdin configures it, then each line is one command and gets one line of answer on
stdout. That stdout carries nothing else is part of what the tests check.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common.transfer.nixl.backend import NixlBackend
from common.transfer.nixl.bindings import load_bindings
from tests.support.transfer_memory import EndpointMemory


def main() -> None:
    config = json.loads(sys.stdin.readline())
    memory = create_memory(config.get("device", "cpu"), **config["memory"])
    # The package without the meta package in front: also the fallback of an installation that lacks the latter.
    backend = NixlBackend(
        engine_id=config["engine_id"],
        epoch=memory.epoch,
        fingerprint=config.get("fingerprint", ""),
        bindings=load_bindings(("nixl_cu12", "nixl_cu13")),
        enter_thread=memory.enter_thread,
    )
    backend.register(list(memory.regions.values()))
    reply(backend.metadata().decode())
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "write":
            memory.write(command["region"], command["unit"], bytes.fromhex(command["data"]))
        elif command["do"] == "set_generation":
            memory.set_generation(command["region"], command["unit"], command["value"], command["tag"])
        elif command["do"] == "recreate":
            backend.recreate()
            reply(backend.metadata().decode())
            continue
        elif command["do"] == "stop":
            break
        reply("ok")
    backend.close()
    reply("closed")


def create_memory(device: str, **sizes: Any) -> EndpointMemory:
    if device == "cpu":
        return EndpointMemory(**sizes)
    from tests.support.transfer_vram import VramMemory  # which imports torch

    return VramMemory(device, **sizes)


def reply(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
