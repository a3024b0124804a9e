"""Trains a model: `python -m models.train --help`. Here the program starts and ends; what it does is in run.py."""

from __future__ import annotations

import sys

from models.interrupt import exit_on_interrupt


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 bad arguments or data, 128 + the signal that stopped it (130: Ctrl-C, 141: a pipe
    that nobody reads)."""
    # Imported late: Ctrl-C must do what it should before what takes seconds.
    from models.endings import explain
    from models.output import print_error, printing
    from models.settings import parse

    out = None
    try:
        settings = parse(argv)
        out = settings.out
        from models.run import run  # JAX and all: bad arguments are refused before

        run(settings)
        with printing():
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error, out)
        if explained is None:
            raise
        status, message = explained
        print_error(message)
        return status
    return 0


if __name__ == "__main__":
    exit_on_interrupt("Nothing is lost: --resume continues from the last checkpoint, where there is one.")
    from models.output import finish_output, prepare_output

    prepare_output()
    try:
        sys.exit(main())
    finally:
        finish_output()
