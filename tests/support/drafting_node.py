"""``python -m tests.support.drafting_node``: a node whose drafts come from known answers, right by chance; its role is
the first argument. States are taken for large ones: what is right of a draft runs again. With method ``mtp`` the
model's head drafts, as always; how much pays is not asked.

``TANDEM_DRAFT_ANSWERS`` names a file: a prompt with its answer as a JSON list in each line. It may grow.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from common.config.node import NodeConfig
from common.engine import speculation
from common.engine.drafting.config import MTP, SpeculativeConfig
from common.engine.drafting.drafter import Drafter
from common.engine.speculation import Speculation
from common.metrics.table import Role
from common.node import runtime
from common.node.main import run_node
from common.node.runtime import NodeModel
from tests.support.drafts import Oracle

ANSWERS_VARIABLE = "TANDEM_DRAFT_ANSWERS"
SHARE = 0.7
"""Of the drafted tokens that are right."""


def write_answers(path: Path, wholes: Sequence[Sequence[int]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(list(whole)) + "\n" for whole in wholes)


@contextlib.contextmanager
def known_answers(path: Path) -> Iterator[None]:
    """Nodes of this process draft from the answers in ``path``, when they draft at all."""
    rng, create = random.Random(0), runtime.create_speculation

    def create_drafter(config: SpeculativeConfig) -> Callable[[], Drafter] | None:
        if config.method == MTP:
            return None

        def drafter() -> Drafter:
            answers = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            return Oracle(answers, SHARE, rng, False)

        return drafter

    def always(config: NodeConfig, model: NodeModel) -> Speculation | None:
        made = create(config, model)
        if made is not None:
            made.adapts = False
        return made

    with (
        patch.object(SpeculativeConfig, "create_drafter", create_drafter),
        patch.object(speculation, "MAX_SAVE_BYTES", 0),
        patch.object(runtime, "create_speculation", always),
    ):
        yield


def run_drafting_node(role: Role) -> NoReturn:
    with known_answers(Path(os.environ[ANSWERS_VARIABLE])):
        run_node(role, default_port=8100)


if __name__ == "__main__":
    run_drafting_node(Role(sys.argv.pop(1)))
