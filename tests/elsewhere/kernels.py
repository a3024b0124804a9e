"""What compilers say of kernels and of the programs around them, from a process of its own."""

import json
import subprocess
import sys
from typing import Any

from tests.elsewhere.targets import TARGETS


def kernels(architecture: str, variables: dict[str, str], only_best: bool = False) -> list[dict[str, Any]]:
    """Compiles them, or those of the best tiles alone; `variables` are those of `environment`.

    Raises RuntimeError where one fails.
    """
    variables = variables | {"COMPILE_FOR": TARGETS[architecture].number}
    return lines_of("tests.elsewhere.compile", variables, architecture, "best" if only_best else "all")


def lines_of(module: str, variables: dict[str, str], *arguments: str) -> list[Any]:
    """Returns the lines of JSON that a module prints with `variables` as environment. Raises RuntimeError where it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]
