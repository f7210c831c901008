"""Load rows of an SQLite database in random order, with one query for each batch.

`__getitems__` gets the indices of a whole batch, so that the database is asked once and not once for each row. A
connection of SQLite is for one thread: each worker opens its own when it starts, and closes it when it ends, by
`worker_init_fn` and `worker_exit_fn`.
"""

import argparse
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from common import check, interpreter, items_per_second, standard_library

from dataloader_rs import PyDataloader, PyDataset

Row = tuple[int, str, str]
LARGEST_QUERY = 500  # places for values in one query; SQLite's own bound was 999 before 3.32


def write_database(path: Path, files: int) -> None:
    """Some modules of the standard library as a table with a row for each line."""
    connection = sqlite3.connect(path)
    try:
        with connection:  # a transaction
            connection.execute("CREATE TABLE lines (number INTEGER PRIMARY KEY, module TEXT, line TEXT)")
            for source in standard_library()[:files]:
                lines = source.read_text(encoding="utf-8").splitlines()
                connection.executemany(
                    "INSERT INTO lines (module, line) VALUES (?, ?)", [(source.stem, line) for line in lines])
    finally:
        connection.close()


class LinesOneByOne(PyDataset[Row]):
    """The rows of the table, with a query for each; index 0 is number 1.

    Thread safety: each thread that asks for rows has a connection of its own, between `connect` and `disconnect`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.own = threading.local()
        self.lock = threading.Lock()
        self.num_open = 0  # guarded by `lock`
        self.connect()
        (length,) = self.own.connection.execute("SELECT count(*) FROM lines").fetchone()
        self.length = int(length)

    def connect(self, worker_id: int | None = None) -> None:
        """Open the calling thread's connection, for reading only."""
        self.own.connection = sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)
        with self.lock:
            self.num_open += 1

    def disconnect(self, worker_id: int | None = None) -> None:
        """Close it. Only the thread that opened a connection may do that."""
        self.own.connection.close()
        with self.lock:
            self.num_open -= 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        row: Row = self.own.connection.execute("SELECT * FROM lines WHERE number = ?", (index + 1,)).fetchone()
        return row


class Lines(LinesOneByOne):
    """The same with a query for each batch."""

    def __getitems__(self, indices: list[int]) -> list[Row]:
        # The database gives the rows in an order of its own, and a row that is asked for twice once.
        found = {number: (number, module, line) for number, module, line in self.rows(indices)}
        return [found[index + 1] for index in indices]

    def rows(self, indices: list[int]) -> Iterator[Row]:
        for first in range(0, len(indices), LARGEST_QUERY):
            numbers = [index + 1 for index in indices[first : first + LARGEST_QUERY]]
            places = ", ".join("?" * len(numbers))
            yield from self.own.connection.execute(f"SELECT * FROM lines WHERE number IN ({places})", numbers)


def loader_of(lines: LinesOneByOne, batch_size: int, num_workers: int) -> PyDataloader[Row, list[Row]]:
    return PyDataloader(
        lines,
        batch_size=batch_size,
        shuffle=True,
        seed=0,
        num_workers=num_workers,
        worker_init_fn=lines.connect,
        worker_exit_fn=lines.disconnect,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="threads that load (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows in a batch (%(default)s)")
    parser.add_argument("--files", type=int, default=24, help="modules of the standard library (%(default)s)")
    options = parser.parse_args()
    print(f"{interpreter()}, SQLite {sqlite3.sqlite_version}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.db"
        write_database(path, options.files)
        lines, one_by_one = Lines(path), LinesOneByOne(path)
        expected = lines.own.connection.execute("SELECT count(*), sum(number), sum(length(line)) FROM lines").fetchone()

        with loader_of(lines, options.batch_size, options.workers) as loader:
            rows = [row for batch in loader for row in batch]
            check(lines.num_open == options.workers + 1, "each worker has a connection, and this thread")
        check(lines.num_open == 1, "each worker has closed its connection")
        found = (len(rows), sum(number for number, _, _ in rows), sum(len(line) for _, _, line in rows))
        check(found == expected, "an epoch is all rows, as the database counts them")
        print(f"{len(rows):,} rows of {len({module for _, module, _ in rows})} modules")

        loaders = [
            loader_of(dataset, options.batch_size, num_workers)
            for dataset, num_workers in ((one_by_one, 0), (lines, 0), (lines, options.workers))
        ]
        single, alone, together = items_per_second(loaders)
        for loader in loaders:
            loader.close()
        for dataset in (lines, one_by_one):
            dataset.disconnect()
            check(dataset.num_open == 0, "no connection is left open")
    print(f"rows per second with a query for each row: {single}")
    print(f"with a query for each batch: {alone} ({alone.against(single)})")
    print(f"the same with {options.workers} workers: {together} (compared with none, {together.against(alone)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
