"""deploy/venv.sh where it cannot make an environment, or makes one that nobody has tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# As that version for what asks for it; makes no environments.
NEWER_PYTHON = f"""#!/bin/sh
case "$1" in
    -c) exec {sys.executable} -c "import sys; sys.version_info = (3, 14, 1)
$2" ;;
    --version) echo "Python 3.14.1" ;;
    *) exit 1 ;;
esac
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def ensure_venv(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In ``folder``, whose programs are found first."""
    return subprocess.run(
        ["bash", "-c", f". {ROOT}/deploy/venv.sh; ensure_venv node"],
        cwd=folder,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_venv_when_the_system_is_not_linux_then_says_so_and_makes_none(tmp_path: Path) -> None:
    write_program(tmp_path / "uname", "#!/bin/sh\necho Darwin\n")
    done = ensure_venv(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Tandem runs on Linux, this is Darwin")
    assert done.stdout == ""
    assert not (tmp_path / ".venv").exists()


def test_venv_when_python_is_newer_than_any_that_was_tried_then_a_note_says_so_and_it_goes_on(tmp_path: Path) -> None:
    write_program(tmp_path / "newer", NEWER_PYTHON)
    done = ensure_venv(tmp_path, PYTHON=str(tmp_path / "newer"))
    assert "note: Python 3.14.1 is newer than 3.13, the newest that was tried\n" in done.stderr
    assert done.stdout == "making .venv with Python 3.14.1\n"
