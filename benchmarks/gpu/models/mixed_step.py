"""One run with mixed steps of a tiny model, for a sanitizer to watch:
``python -m benchmarks.gpu.models.mixed_step FAMILY``.

Loading alone runs the numeric probe: cuts in odd places, saves, decode rows beside spans. Then an engine runs prompts
and decode rows in the same steps, without graphs. Prints ``mixed steps done`` at the end.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.models.answers import answers


def main() -> None:
    for family in sys.argv[2:]:
        answers(family, "float32", backend=sys.argv[1], eager=True, prompts=(1, 17, 70), num_output=4)
    print("mixed steps done")


if __name__ == "__main__":
    main()
