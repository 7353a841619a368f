"""The model that Tandem serves when none is given: a small trained hybrid.

:data:`FOLDER` holds ordinary Hugging Face files. README.md is its card; ``benchmarks/demo_model`` made and measures it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "tandem-demo"
"""The checkpoint; the name of the folder is the name it is served under."""
