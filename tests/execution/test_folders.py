"""Working folders: each its process's own, and gone with it."""

import tempfile

from inshrink_core.execution.files import new_locked, working_folder


def test_a_folder_that_another_process_takes_for_one_that_was_left_is_made_again(tmp_path, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def taken(**asked):
        made.append(folder := make(**asked))
        if len(made) == 1:
            new_locked(tmp_path)[1].close()  # another process begins before the first folder is held
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with working_folder(tmp_path) as folder:
        assert folder.is_dir()
        assert len(made) == 3, "the first was taken"
        with working_folder(tmp_path) as other:
            assert folder.is_dir(), "this one is held"
            assert other.is_dir()
    assert not list(tmp_path.glob(".inshrink-*"))
