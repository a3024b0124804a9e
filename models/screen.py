"""Texts on a terminal, or in a file, while they grow."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence

from models.continuation import Continuation


class Screen:
    """Prints prompts and their continuations in their order: each streams once those before it are complete."""

    def __init__(self, prompts: Sequence[bytes]):
        self.prompts = prompts
        self.current = -1  # the text that streams
        self.printed = 0  # bytes of its continuation
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self, texts: Sequence[Continuation], complete: bool = False) -> None:
        """Prints what is new; with `complete`, all that there is."""
        if self.current < 0:
            self._begin(0)
        while True:
            text = texts[self.current]
            ended = complete or text.stopped
            settled = len(text.data) if ended else text.settled
            self._write(bytes(text.data[self.printed : settled]), ended)
            self.printed = settled
            if not ended or self.current + 1 == len(texts):
                break
            self._begin(self.current + 1)
        sys.stdout.flush()

    def _begin(self, index: int) -> None:
        if len(self.prompts) > 1:
            print(f"{chr(10) if index else ''}--- {index + 1} of {len(self.prompts)} ---")
        self.current, self.printed = index, 0
        self.decoder.reset()
        self._write(self.prompts[index], False)

    def _write(self, data: bytes, final: bool) -> None:
        text = self.decoder.decode(data, final)
        if sys.stdout.isatty():  # where a control character would do what it says
            text = "".join(x if x.isprintable() or x in "\n\t" else f"\\x{ord(x):02x}" for x in text)
        sys.stdout.write(text)
