"""``python -m tests.support.faulty_up up ...``: ``tandem up`` whose nodes are ``tests.support.faulty_node``'s."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from common.cli import up
from common.cli.main import main
from common.cli.supervisor import ChildSpec

SUFFIX = "_node"


def faulty_specs(*args: Any) -> list[ChildSpec]:
    return [_faulty(spec) for spec in _child_specs(*args)]


def _faulty(spec: ChildSpec) -> ChildSpec:
    program, option, module, *flags = spec.argv
    if not module.endswith(SUFFIX):
        return spec
    argv = (program, option, "tests.support.faulty_node", module.removesuffix(SUFFIX), *flags)
    return dataclasses.replace(spec, argv=argv)


_child_specs = up.child_specs

if __name__ == "__main__":
    up.child_specs = faulty_specs
    sys.exit(main())
