"""``python -m tests.support.swapped_ranks``: a node that announces its ranks last first; its role is the first
argument."""

from __future__ import annotations

import sys

from common.metrics.table import Role
from common.node.pull.rank_agents import RankAgents
from common.transfer.announcement import join_ranks
from tests.support.late_node import run_late_node


def swapped(agents: RankAgents) -> bytes:
    return join_ranks([backend.metadata() for backend in reversed(agents.backends)])


if __name__ == "__main__":
    RankAgents.metadata = swapped  # type: ignore[method-assign]
    run_late_node(Role(sys.argv.pop(1)))
