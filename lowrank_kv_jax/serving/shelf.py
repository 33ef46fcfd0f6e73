"""Which shared prefix lies in which row."""

import collections

Ids = tuple[int, ...]


class Shelf:
    """Rows by prefix; the one that was asked for longest ago makes room."""

    def __init__(self, rows: int):
        self._free = list(range(rows))[::-1]
        self._rows: collections.OrderedDict[Ids, int] = collections.OrderedDict()

    def find(self, prefix: Ids) -> int | None:
        """Its row, or None."""
        if prefix in self._rows:
            self._rows.move_to_end(prefix)
        return self._rows.get(prefix)

    def place(self, prefix: Ids) -> int | None:
        """A row for a prefix that has none; None where there are no rows."""
        row = self._free.pop() if self._free else self._rows.popitem(last=False)[1] if self._rows else None
        if row is not None:
            self._rows[prefix] = row
        return row

    def __len__(self) -> int:
        return len(self._rows)
