"""What the compiler says of all kernels for one kind of GPU, from a process of its own."""

import json
import subprocess
import sys
from typing import Any

from tests.elsewhere.targets import TARGETS


def kernels(architecture: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Compiles them; `variables` are those of `environment`. Raises RuntimeError where one fails."""
    variables = variables | {"COMPILE_FOR": TARGETS[architecture].number}
    command = [sys.executable, "-m", "tests.elsewhere.compile", architecture]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]
