"""``python -m common.cli`` is the ``tandem`` command of an uninstalled checkout."""

from __future__ import annotations

import sys

from common.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
