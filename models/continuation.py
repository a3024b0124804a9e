"""Texts that a model continues, byte by byte, each up to a stop string."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from models.decoder import Decoder


@dataclasses.dataclass
class Continuation:
    """The bytes that follow one prompt. The stop string ends it, and is no part of it."""

    stop: bytes = b""  # empty: none
    data: bytearray = dataclasses.field(default_factory=bytearray)
    stopped: bool = False

    def add(self, byte: int) -> None:
        if self.stopped:
            return
        self.data.append(byte)
        if self.stop and self.data.endswith(self.stop):
            del self.data[-len(self.stop) :]
            self.stopped = True

    @property
    def settled(self) -> int:
        """How many bytes will stay, whatever follows: the last ones may be the beginning of the stop string."""
        if self.stopped or not self.stop:
            return len(self.data)
        return len(self.data) - max(n for n in range(len(self.stop)) if self.data.endswith(self.stop[:n]))


def continued(
    decoder: Decoder, prompts: Sequence[bytes], count: int, seed: int, stop: bytes = b""
) -> Iterator[list[Continuation]]:
    """Yields the same list after each step, its texts one byte longer, up to `count` or until all have stopped."""
    texts = [Continuation(stop) for _ in prompts]
    for tokens in decoder.tokens([list(prompt) for prompt in prompts], count, seed):
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.add(token)
        yield texts
        if all(text.stopped for text in texts):
            return
