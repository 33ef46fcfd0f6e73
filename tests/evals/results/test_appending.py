"""Several programs append to one file of records: no line is torn or lost."""

import errno
import threading

import pytest

from lowrank_kv_jax.evals.results import records
from lowrank_kv_jax.files import lock


def appending(path, score):
    """Another program's record, on its way; flock knows no difference between programs and threads that open a file."""
    thread = threading.Thread(target=records.append_record, args=(path, {"score": score}))
    thread.start()
    thread.join(0.2)
    return thread


def scores(path):
    return [record["score"] for record in records.read_records(path)]


def test_a_record_waits_until_that_of_another_program_is_written(tmp_path):
    path = tmp_path / "r.jsonl"
    with open(path, "ab", buffering=0) as other:
        assert lock(other.fileno())
        other.write(b'{"sco')
        waiting = appending(path, 2)
        other.write(b're": 1}\n')
        assert waiting.is_alive()
    waiting.join()
    assert scores(path) == [1, 2] and path.read_text().count("\n") == 2


def test_a_disk_that_fills_up_takes_back_no_record_of_another_program(tmp_path, monkeypatch):
    path, others = tmp_path / "r.jsonl", []
    records.append_record(path, {"score": 1})

    def full(file, data):
        monkeypatch.undo()
        file.write(data[:5])
        others.append(appending(path, 2))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        records.append_record(path, {"score": 3})
    others[0].join()
    assert scores(path) == [1, 2]


def test_a_look_at_a_new_file_deletes_no_record_of_another_program(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"

    def late(*arguments):
        monkeypatch.undo()
        records.append_record(path, {"score": 1})
        return open(*arguments)

    monkeypatch.setattr(records, "open", late, raising=False)
    records.check_writable(path)
    assert scores(path) == [1]


def test_a_file_that_was_deleted_meanwhile_is_made_again(tmp_path):
    path = tmp_path / "r.jsonl"
    with open(path, "ab") as looking:
        assert lock(looking.fileno())
        waiting = appending(path, 1)
        path.unlink()
    waiting.join()
    assert scores(path) == [1]
