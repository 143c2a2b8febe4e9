"""Looking at runs costs no start of JAX."""

import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).parents[2] / "tomat" / "runs"


def test_the_room_imports_no_jax():
    names = ", ".join(f"tomat.runs.{path.stem}" for path in ROOM.glob("*.py") if path.stem != "__init__")
    code = f"import sys, {names}; sys.exit(bool({{'jax', 'levanter', 'haliax'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
