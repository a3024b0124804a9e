"""Continues text with a trained GPT: `python -m models.generate --help`. What the program does is in generation.py."""

from __future__ import annotations

import sys

from models.interrupt import exit_on_interrupt


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 bad arguments, or no such run, 130 Ctrl-C, 141 a pipe that nobody reads."""
    # Imported late: Ctrl-C must do what it should before what takes seconds.
    from models.endings import explain
    from models.generation_settings import parse
    from models.output import print_error

    try:
        settings = parse(argv)
        from models.generation import run  # JAX and all: bad arguments are refused before

        run(settings)
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error, None, memory="Give fewer prompts at once, or a smaller --bytes")
        if explained is None:
            raise
        status, message = explained
        print_error(message)
        return status
    return 0


if __name__ == "__main__":
    exit_on_interrupt()
    from models.output import finish_output, prepare_output

    prepare_output()
    try:
        sys.exit(main())
    finally:
        finish_output()
