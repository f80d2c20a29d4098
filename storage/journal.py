"""The Training Scheduler's journal: one SQLite file that alone restores it.

Layout (format 1):

    meta     key → value             format; epoch, counting openings of the file
    facts    (kind, key) → JSON      counters, tenants, policies: the latest of each
    jobs     created_seq → JSON      descriptors: the latest of each
    changes  seq → created_seq, JSON the story: every move of every job, appended

WAL with `synchronous=FULL`: what `commit` returned from survives the machine's sudden end. A group of records is one
transaction, and each table's rows of a group are one statement over a JSON array (`json_each`), so that SQLite works
without Python's interpreter lock in between: with a statement a row, the writing thread had to win the lock back
from a busy event loop for every row.

The journal knows nothing of what the records mean. One process writes: opening counts the epoch up, and a commit of
an earlier opening is refused. A local disk is assumed; SQLite's locks do not hold on network file systems.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from configs.errors import DataFault, ServiceUnavailable, refusal

FORMAT = "1"
FACTS = ("counters", "tenant", "policy")
BUSY_TIMEOUT_S = 30.0  # another program that reads the file (a backup, a person) may hold its lock so long

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (kind TEXT, key TEXT, body TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (created_seq INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS changes (seq INTEGER PRIMARY KEY, created_seq INTEGER NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS changes_of_job ON changes (created_seq, seq);
"""

# One statement a table and group; `:rows` is a JSON array.
_WRITE_FACTS = """INSERT OR REPLACE INTO facts (kind, key, body)
SELECT value ->> 0, value ->> 1, value -> 2 FROM json_each(:rows)"""
_WRITE_JOBS = (
    "INSERT OR REPLACE INTO jobs (created_seq, body) SELECT value ->> 'created_seq', value FROM json_each(:rows)"
)
_WRITE_CHANGES = """INSERT INTO changes (seq, created_seq, body)
SELECT value ->> 'seq', value ->> 'created_seq', value FROM json_each(:rows)"""
_FORGET_JOBS = "DELETE FROM jobs WHERE created_seq IN (SELECT value FROM json_each(:rows))"
_FORGET_CHANGES = "DELETE FROM changes WHERE created_seq IN (SELECT value FROM json_each(:rows))"


@dataclass(frozen=True)
class Record:
    """One thing to keep, or with `body` None a job to forget (with its changes).

    `key`: the fact's key, the job's `created_seq`, the change's `seq` (both also stand in their bodies). `body`:
    plain JSON values; NaN and infinity become null.
    """

    kind: Literal["counters", "tenant", "policy", "job", "change"]
    key: int | str
    body: dict[str, Any] | None


class Journal:
    """The open file. `commit` belongs to one thread, the reading methods may be called from any."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal and make this opening the one that may write.

        Raises:
            DataFault: if the file is of another format or no database.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._writer = _connect(path)
            self._writer.executescript(_TABLES)
            self.epoch = self._open_epoch()
            self._reader = _connect(path)
        except sqlite3.DatabaseError as error:
            raise DataFault(
                refusal("journal", str(path), f"a journal of format {FORMAT} ({error})", "move it away")
            ) from None
        self._reading = threading.Lock()

    def commit(self, records: Sequence[Record]) -> None:
        """Write all records or none, and return when they are on disk. Of several with one key the last one counts.

        Raises:
            ServiceUnavailable: if the journal was opened again since; nothing is written.
            sqlite3.Error: if the disk is full or fails; nothing is written.
        """
        facts: dict[tuple[str, int | str], dict[str, Any]] = {}
        jobs: dict[int | str, dict[str, Any] | None] = {}
        changes: list[dict[str, Any]] = []
        for record in records:
            if record.kind == "job":
                jobs[record.key] = record.body
            elif record.body is None:
                raise ValueError(f"record {record.kind} {record.key}: got no body; only a job can be forgotten")
            elif record.kind == "change":
                changes.append(record.body)
            else:
                facts[record.kind, record.key] = record.body
        gone = [key for key, body in jobs.items() if body is None]
        groups: tuple[tuple[str, list[Any]], ...] = (
            (_WRITE_FACTS, [(kind, key, body) for (kind, key), body in facts.items()]),
            (_WRITE_JOBS, [body for body in jobs.values() if body is not None]),
            (_WRITE_CHANGES, changes),
            (_FORGET_JOBS, gone),
            (_FORGET_CHANGES, gone),
        )
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            self._check_epoch()
            for statement, rows in groups:
                if rows:
                    self._writer.execute(statement, {"rows": orjson.dumps(rows).decode()})
            self._writer.execute("COMMIT")
        except BaseException:
            self._writer.execute("ROLLBACK")
            raise

    def facts(self, kind: str) -> dict[str, dict[str, Any]]:
        """{key: body} of one kind of `FACTS`."""
        return {key: orjson.loads(body) for key, body in self._read("SELECT key, body FROM facts WHERE kind = ?", kind)}

    def jobs(self) -> Iterator[dict[str, Any]]:
        """All descriptors in order of creation."""
        return (orjson.loads(body) for (body,) in self._read("SELECT body FROM jobs ORDER BY created_seq"))

    def changes(self, after: int, limit: int) -> list[dict[str, Any]]:
        """The first `limit` changes with `seq` > `after`."""
        rows = self._read("SELECT body FROM changes WHERE seq > ? ORDER BY seq LIMIT ?", after, limit)
        return [orjson.loads(body) for (body,) in rows]

    def story(self, created_seq: int) -> list[dict[str, Any]]:
        """All changes of one job, oldest first."""
        rows = self._read("SELECT body FROM changes WHERE created_seq = ? ORDER BY seq", created_seq)
        return [orjson.loads(body) for (body,) in rows]

    def close(self) -> None:
        """Close the file; what was committed stays."""
        self._writer.close()
        with self._reading:
            self._reader.close()

    def _read(self, statement: str, *values: object) -> list[Any]:
        with self._reading:
            return self._reader.execute(statement, values).fetchall()

    def _open_epoch(self) -> int:
        self._writer.execute("BEGIN IMMEDIATE")
        self._writer.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?), ('epoch', '0')", (FORMAT,))
        (found,) = self._writer.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if found != FORMAT:
            self._writer.execute("ROLLBACK")
            raise DataFault(refusal("journal format", found, FORMAT, f"move {self.path} away or use its own version"))
        self._writer.execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'epoch'")
        epoch = self._stored_epoch()
        self._writer.execute("COMMIT")
        return epoch

    def _stored_epoch(self) -> int:
        (epoch,) = self._writer.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        return int(epoch)

    def _check_epoch(self) -> None:
        stored = self._stored_epoch()
        if stored != self.epoch:
            raise ServiceUnavailable(
                refusal("journal epoch", self.epoch, f"{stored}, a newer scheduler has the journal", "look it up again")
            )


def _connect(path: Path) -> sqlite3.Connection:
    # isolation_level None: transactions are begun and ended here alone, not by the module's guesses.
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cache_size = -65536")  # KiB, negative by SQLite's convention: 64 MiB
    return connection
