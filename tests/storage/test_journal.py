"""The journal: what is committed is there after reopening, what is not is nowhere, and one opening may write."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.errors import DataFault, ServiceUnavailable
from storage.journal import Journal, Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal lies; its folder does not exist yet."""
    return tmp_path / "new" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    """An open, empty journal."""
    journal = Journal(path)
    yield journal
    journal.close()


def job(seq: int, state: str = "reserved") -> Record:
    """A descriptor as far as the journal looks."""
    return Record("job", seq, {"created_seq": seq, "state": state})


def change(seq: int, created_seq: int, state: str = "reserved") -> Record:
    """A change as far as the journal looks."""
    return Record("change", seq, {"seq": seq, "created_seq": created_seq, "state": state})


def test_what_was_committed_is_there_after_reopening(journal: Journal, path: Path) -> None:
    """Facts, jobs in order of creation and changes, to the value."""
    journal.commit([job(10), job(2), change(1, 10), change(2, 2)])
    journal.commit(
        [Record("policy", "a.rl", {"x": [1, 2.5, None, "ü", {"y": True}]}), Record("counters", "", {"n": 3})]
    )
    again = Journal(path)
    assert list(again.jobs()) == [{"created_seq": 2, "state": "reserved"}, {"created_seq": 10, "state": "reserved"}]
    assert again.facts("policy") == {"a.rl": {"x": [1, 2.5, None, "ü", {"y": True}]}}
    assert again.facts("counters") == {"": {"n": 3}}
    assert again.facts("tenant") == {}
    assert [found["seq"] for found in again.changes(0, 10)] == [1, 2]
    again.close()


def test_the_last_record_of_a_key_counts(journal: Journal) -> None:
    """Within a group and between groups."""
    journal.commit([job(1), job(1, "ready"), Record("tenant", "t", {"n": 1}), Record("tenant", "t", {"n": 2})])
    assert list(journal.jobs()) == [{"created_seq": 1, "state": "ready"}]
    journal.commit([job(1, "leased"), Record("tenant", "t", {"n": 3})])
    assert list(journal.jobs()) == [{"created_seq": 1, "state": "leased"}]
    assert journal.facts("tenant") == {"t": {"n": 3}}


def test_changes_are_read_in_pages_and_by_job(journal: Journal) -> None:
    """After a sequence number, at most so many; a story has one job's alone."""
    journal.commit([change(seq, created_seq=seq % 2) for seq in range(1, 8)])
    assert [found["seq"] for found in journal.changes(2, 3)] == [3, 4, 5]
    assert journal.changes(7, 3) == []
    assert [found["seq"] for found in journal.story(1)] == [1, 3, 5, 7]


def test_a_forgotten_job_is_gone_with_its_changes(journal: Journal) -> None:
    """Others stay; a fact cannot be forgotten."""
    journal.commit([job(1), job(2), change(1, 1), change(2, 2)])
    journal.commit([Record("job", 1, None)])
    assert [found["created_seq"] for found in journal.jobs()] == [2]
    assert [found["seq"] for found in journal.changes(0, 10)] == [2]
    with pytest.raises(ValueError, match="record policy x: got no body; only a job can be forgotten"):
        journal.commit([Record("policy", "x", None)])


def test_a_group_is_written_whole_or_not_at_all(journal: Journal) -> None:
    """A change number that exists already fails the group: its job is not there either, and the journal goes on."""
    journal.commit([change(1, 1)])
    with pytest.raises(sqlite3.IntegrityError):
        journal.commit([job(5), change(1, 5)])
    assert list(journal.jobs()) == []
    journal.commit([job(6), change(2, 6)])
    assert [found["created_seq"] for found in journal.jobs()] == [6]


def test_a_newer_opening_fences_the_older(journal: Journal, path: Path) -> None:
    """Nothing of the older one's group is written."""
    newer = Journal(path)
    assert newer.epoch == journal.epoch + 1
    with pytest.raises(ServiceUnavailable) as fenced:
        journal.commit([job(1)])
    assert str(fenced.value) == (
        "journal epoch: got 1; possible: 2, a newer scheduler has the journal; look it up again"
    )
    assert list(newer.jobs()) == []
    newer.commit([job(1)])
    newer.close()


def test_a_process_killed_between_commits_loses_none(path: Path) -> None:
    """SIGKILL right after each of 50 commits was reported: all that were reported are there."""
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from storage.journal import Journal, Record
        journal = Journal(Path({str(path)!r}))
        for seq in range(1, 10**6):
            journal.commit([Record("job", seq, {{"created_seq": seq}})])
            print(seq, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    reported = 0
    for line in process.stdout:
        reported = int(line)
        if reported == 50:
            process.kill()
            break
    process.wait()
    journal = Journal(path)
    found = [body["created_seq"] for body in journal.jobs()]
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= reported
    journal.close()


def test_another_file_is_refused(path: Path) -> None:
    """No database, and a database of a later format: a message with the path and what to do."""
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(DataFault, match=r"journal: got .*; possible: a journal of format 1 .*; move it away"):
        Journal(path)
    path.unlink()
    Journal(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '2' WHERE key = 'format'")
    connection.close()
    with pytest.raises(DataFault, match=r"journal format: got '2'; possible: 1; move .* away"):
        Journal(path)


def test_it_is_durable_by_setting(journal: Journal) -> None:
    """WAL and synchronous=FULL (2): a commit is synced before it returns."""
    assert journal._writer.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
