"""`PageAllocator`: which pages of a `PagedCache` belong to which sequences. Plain Python; it touches no device."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pallas_fa.operands.pytree import as_count


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. The allocator is as it was before."""


class PageAllocator:
    """Hands out the pages of a cache to sequences, and takes them back.

    A page belongs to one sequence, or to several that begin with the same tokens (`fork`); to these until the last of them
    is freed. Sequences are named by numbers, which are never used again.

    Attributes:
      num_pages: how many pages there are: P of the cache.
      page_size: rows of a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        sizes = {"num_pages": num_pages, "page_size": page_size}
        self.num_pages, self.page_size = (
            as_count(name, size, "Pass the sizes of the PagedCache.") for name, size in sizes.items()
        )
        self._free = list(reversed(range(self.num_pages)))
        self._pages: dict[int, list[int]] = {}
        self._users: Counter[int] = Counter()
        self._next_sequence = 0

    @property
    def free_pages(self) -> int:
        """How many pages no sequence has."""
        return len(self._free)

    def allocate(self, tokens: int = 0) -> int:
        """Returns a new sequence that has pages for `tokens` rows, at least 0.

        Raises:
          OutOfPages: fewer pages are free.
        """
        return self._new_sequence([], tokens)

    def extend(self, sequence: int, tokens: int) -> None:
        """Gives a sequence the pages that it lacks for `tokens` rows in all.

        Raises:
          OutOfPages: fewer pages are free.
        """
        pages = self._of(sequence)
        pages += self._take(self._count("tokens", tokens) - len(pages))

    def fork(self, sequence: int, shared: int, tokens: int) -> tuple[int, int]:
        """Makes a sequence that begins with rows of another one, and shares the pages that these fill.

        Only whole pages are shared: both sequences go on writing in pages of their own. The lengths of neither may be set
        back into the shared rows, since rows that are appended there are written into the pages of both.

        Args:
          sequence: the sequence to begin with.
          shared: how many of its first rows both have. They are in the cache before the new sequence reads them.
          tokens: for how many rows in all the new sequence has pages.

        Returns:
          The new sequence, and how many rows it finds there: `shared`, rounded down to whole pages. That is its length in
          the cache; append the rest to it.

        Raises:
          OutOfPages: fewer pages are free.
          ValueError: the other sequence has no pages for `shared` rows, or `tokens` is less than these.
        """
        pages = self._of(sequence)
        if self._count("shared", shared) > len(pages):
            raise ValueError(
                f"shared={shared}, but sequence {sequence} has pages for {len(pages) * self.page_size} rows only. Share"
                " rows that it has."
            )
        self._count("tokens", tokens)  # raises where it is no number
        if tokens < shared:
            raise ValueError(
                f"tokens={tokens} is less than shared={shared}: it counts the shared rows, too. Pass more."
            )
        whole = shared // self.page_size
        return self._new_sequence(pages[:whole], tokens), whole * self.page_size

    def free(self, sequence: int) -> None:
        """Takes back the pages of a sequence, but for those that others share; the sequence is gone."""
        pages = self._of(sequence)
        del self._pages[sequence]
        self._users.subtract(pages)
        self._free += [page for page in pages if not self._users[page]]

    def page_table(self, sequences: Sequence[int], pages_per_sequence: int) -> np.ndarray:
        """Returns the table int32 [len(sequences), pages_per_sequence] of a cache: the pages of each, then -1.

        Raises:
          ValueError: a sequence has more pages than that, or is named twice.
        """
        width = as_count("pages_per_sequence", pages_per_sequence, "Pass the width of the cache's page_table.")
        try:
            sequences = list(sequences)
        except TypeError as e:
            raise TypeError(f"sequences={sequences!r} must be a list of what allocate and fork return.") from e
        pages_of = [self._of(sequence) for sequence in sequences]
        table = np.full((len(sequences), width), -1, np.int32)
        for row, sequence, pages in zip(table, sequences, pages_of, strict=True):
            if sequences.count(sequence) > 1:
                raise ValueError(
                    f"{sequences=} names {sequence} more than once: two rows of the cache would write into the same pages."
                    " Make another sequence that begins like it, with fork."
                )
            if len(pages) > pages_per_sequence:
                raise ValueError(
                    f"{pages_per_sequence=}, but sequence {sequence} has {len(pages)} pages. Make a wider table, or give"
                    " the sequence fewer tokens."
                )
            row[: len(pages)] = pages
        return table

    def _count(self, name, rows):
        """How many pages hold so many rows."""
        return -(-as_count(name, rows, "Pass a number of rows, one for each token.", least=0) // self.page_size)

    def _of(self, sequence):
        sequence = as_count("sequence", sequence, "Pass one sequence, as allocate and fork return it.", least=0)
        if sequence not in self._pages:
            raise ValueError(f"sequence={sequence!r} is not there: it was never allocated, or is already freed.")
        return self._pages[sequence]

    def _new_sequence(self, shared, tokens):
        pages = [*shared, *self._take(self._count("tokens", tokens) - len(shared), also=shared)]
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._pages[sequence] = pages
        return sequence

    def _take(self, count, also=()):
        """Takes `count` free pages, if positive; they and the pages `also` have one user more."""
        if count > len(self._free):
            raise OutOfPages(
                f"{count} more pages of {self.page_size} rows are needed, but of num_pages={self.num_pages} only"
                f" {len(self._free)} are free. Free sequences, or make a cache with more pages."
            )
        pages = [self._free.pop() for _ in range(count)]
        self._users.update((*pages, *also))
        return pages
