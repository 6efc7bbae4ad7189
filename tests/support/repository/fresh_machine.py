"""A machine as a newcomer has it: a checkout, nothing installed, and a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.repository.readmes import ROOT


class FreshMachine:
    """A copy of the tree, and a shell there that knows nothing of this environment."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "warpfit"
        left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
        shutil.copytree(ROOT, self.checkout, ignore=left_out)

    def shell(self, code: str, environment: Path | None = None, **variables: str) -> str:
        """Paste code into a shell in the checkout; return what it prints, errors included.

        What it leaves in the background is ended.

        Args:
            code: the lines.
            environment: a virtual environment whose commands are found first.
            variables: further variables.

        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        binaries = [str(environment / "bin")] if environment else []
        kept["PATH"] = os.pathsep.join([*binaries, kept["PATH"]])
        done = subprocess.run(
            ["bash", "-e", "-c", f"trap 'kill $(jobs -p) 2>&- || true; wait' EXIT\n{code}"],
            cwd=self.checkout,
            env={**kept, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def index_answers() -> bool:
    """Whether `pip` finds packages here at all."""
    ask = ["pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    done = subprocess.run(
        [sys.executable, "-m", *ask, "typing-extensions"], capture_output=True, check=False
    )
    return done.returncode == 0
