"""Two programs that want to write to one folder, at the worst moments; and two files that take one name."""

import errno
import fcntl
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from offload.checkpoint.files import locked, locked_anew, replacing
from offload.errors import UserError


def test_one_at_a_time(tmp_path: Path) -> None:
    told = pytest.raises(UserError, match=r"another process is writing to .*: wait for it")
    with locked(tmp_path), told, locked(tmp_path):
        raise AssertionError("it is locked")
    with locked(tmp_path):
        pass


def test_a_folder_that_another_finishes_meanwhile_is_not_ours(tmp_path: Path) -> None:
    """Opened before it was renamed and locked after: the lock is that of the finished one."""
    folder, flock = tmp_path / "work", fcntl.flock

    def finish_first(descriptor: int, how: int) -> None:
        folder.rename(tmp_path / "finished")
        folder.mkdir()
        (folder / "of a third").touch()
        flock(descriptor, how)

    told = pytest.raises(UserError, match="another process")
    with patch.object(fcntl, "flock", finish_first), told, locked_anew(folder):
        raise AssertionError("what lies there is a third one's")
    assert (folder / "of a third").exists() and (tmp_path / "finished").is_dir()


def test_a_folder_just_made_does_not_stay_where_its_lock_is_refused(tmp_path: Path) -> None:
    error = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    told = pytest.raises(OSError, match="No locks available")
    with patch.object(fcntl, "flock", side_effect=error), told, locked_anew(tmp_path / "work"):
        raise AssertionError("there is no lock")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("is_anothers", [False, True])
def test_a_folder_in_which_nothing_could_be_written_does_not_stay(is_anothers: bool, tmp_path: Path) -> None:
    """But for one that another has made since, under the same name."""
    folder = tmp_path / "work"
    with pytest.raises(OSError, match="full"), locked_anew(folder):
        if is_anothers:
            folder.rename(tmp_path / "moved")
            folder.mkdir()
        raise OSError(errno.ENOSPC, "full")
    assert folder.exists() == is_anothers


def test_two_that_replace_one_file_do_not_share_what_they_write(tmp_path: Path) -> None:
    """As threads of one process do, and programs that are process 1, each in a container of its own."""
    path = tmp_path / "profile.json"
    with replacing(path) as one, replacing(path) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and [*tmp_path.iterdir()] == [path]
