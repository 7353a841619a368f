"""The model that Tandem serves when none is given: a small trained hybrid, with everything it was made from.

:data:`FOLDER` holds ordinary Hugging Face files. README.md is its card; ``python -m common.demo_model.train`` made it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "tandem-demo"
"""The checkpoint; the name of the folder is the name it is served under."""
