"""Compressing in parts: the content is the same whatever their number, and nothing half-written is live."""

import json
import os
import pickle
import pkgutil
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

import inshrink_core
from inshrink_core.archive import ArchiveReader, ArchiveWriter, PartWriter, check_archive
from inshrink_core.chain import Archive
from inshrink_core.chain.parts import Share, share_of
from inshrink_core.cli import main
from inshrink_core.codec import get_codec
from inshrink_core.errors import (
    ConflictError,
    InputError,
    LockedError,
    MissingFrameError,
    StepConflictError,
    UnreadableError,
)
from inshrink_core.execution.engines import ENGINES, TotalProgress
from inshrink_core.verbs import commit, compress, export, prune, restore, verify
from tests.docs.pages import blocks
from tests.formats.run_builders import content_of
from tests.processes import ran

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "inshrinkerator": ({"codec": "inshrinkerator", "settings": {"prune": 0.1, "protect": 0.01}}, (3,)),
    "lossless": ({"codec": "lossless", "optimizer": "exact"}, (8,)),
    "no optimizer": ({"codec": "lattice", "optimizer": "drop", "coarseness": 4.0}, (2,)),
    "keyframes": ({"codec": "lattice", "keyframe_every": 2}, (1, 3)),
}
"""What an archive is written with, and in how many parts."""
N_STEPS = 4


@pytest.fixture(scope="module")
def run():
    return inshrink_core.open(inshrink_core.sample("digits-cnn"))


def write(run, target, n_parts, order=None, **settings):
    """Write an archive in parts, one after the other."""
    settings = {"codec": "lattice", "steps": run.steps[:N_STEPS], **settings}
    for part in order or range(n_parts):
        compress(run, target, part=f"{part + 1}/{n_parts}", **settings)
    return target


def content(path):
    """Return every block by step and key, and every decoded tensor; ids, and what is of a part, left out."""
    archive = Archive.open(path)
    found = {}
    for info in archive.frames:
        frame = archive.frame(info)
        blocks = [(e.key, e.attachment, e.codec, e.attributes, frame.read(e)) for e in frame.entries]
        meta = {key: value for key, value in frame.meta.items() if key not in ("content", "rekeyed")}
        values = {s.key: archive.decode(info, s.key)[0].numpy().tobytes() for s in archive[info.step].specs}
        found[info.step] = (info.kind, blocks, meta, values)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_content_does_not_depend_on_the_number_of_parts(tmp_path, run, name):
    settings, numbers = SETTINGS[name]
    compress(run, tmp_path / "whole", steps=run.steps[:N_STEPS], **settings)
    expected = content(tmp_path / "whole")
    assert len(expected) == N_STEPS
    for n_parts in numbers:
        path = write(run, tmp_path / str(n_parts), n_parts, **settings)
        assert content(path) == expected, n_parts
        assert check_archive(path) == ()
        assert {frame.n_parts for frame in Archive.open(path).frames} == {n_parts}


@pytest.fixture(scope="module")
def template(tmp_path_factory, run):
    """An archive in three parts, and the same whole."""
    folder = tmp_path_factory.mktemp("parts")
    compress(run, folder / "whole", codec="lattice", steps=run.steps[:N_STEPS])
    write(run, folder / "parts", 3)
    return folder


def test_running_parts_again_in_any_order_changes_nothing(tmp_path, run, template):
    path = Path(shutil.copytree(template / "parts", tmp_path / "x"))
    before = content_of(path)
    assert write(run, path, 3, order=[2, 0, 1]) == path
    assert content_of(path) == before
    other = write(run, tmp_path / "y", 3, order=[2, 0, 1])
    assert content(other) == content(path)


def test_nothing_is_live_before_the_last_part_and_no_other_writer_goes_on(tmp_path, run):
    path = tmp_path / "x"
    report = compress(run, path, codec="lattice", steps=run.steps[:2], part="1/3")
    assert (report.part, report.appended, report.waiting) == ("1/3", run.steps[:2], run.steps[:2])
    compress(run, path, codec="lattice", steps=run.steps[:2], part="3/3")
    assert Archive.open(path).frames == ()
    with pytest.raises(ConflictError, match=r"waits for part 2/3.*--discard"):
        compress(run, path, codec="lattice", steps=run.steps[:2])
    committed = commit(path)
    assert committed.committed == ()
    assert committed.waiting == tuple((step, ("2/3",)) for step in run.steps[:2])
    assert commit(path, discard=True).discarded == run.steps[:2]
    assert not [*(path / "frames").iterdir()]
    compress(run, path, codec="lattice", steps=run.steps[:2])
    assert check_archive(path) == ()


def test_a_part_that_was_cut_off_goes_on_where_it_was(tmp_path, run, template):
    def cut_off(now):
        if now.step == run.steps[2]:
            raise ZeroDivisionError

    path = tmp_path / "x"
    options = {"codec": "lattice", "steps": run.steps[:N_STEPS]}
    for part in ("1/3", "2/3", "3/3"):
        with pytest.raises(ZeroDivisionError):
            compress(run, path, part=part, progress=cut_off, **options)
    assert [frame.step for frame in ArchiveReader.open(path).frames] == list(run.steps[:2])
    assert commit(path).committed == run.steps[:2]
    report = compress(run, path, part="3/3", **options)
    assert (report.skipped, report.appended) == (run.steps[:2], run.steps[2:N_STEPS])
    with pytest.raises(ConflictError, match="waits for parts 1/3, 2/3"):
        ArchiveWriter(path)
    assert compress(run, path, part="3/3", **options).skipped == run.steps[:N_STEPS]
    for part in ("1/3", "2/3"):
        compress(run, path, part=part, **options)
    assert content(path) == content(template / "whole")


def test_an_archive_goes_on_in_another_number_of_parts(tmp_path, run):
    contents = []
    for name, parts in (("one", [0, 0, 0]), ("many", [3, 0, 2])):
        path = tmp_path / name
        for at, n_parts in enumerate(parts):
            steps = run.steps[2 * at : 2 * at + 2]
            if n_parts:
                write(run, path, n_parts, steps=steps)
            else:
                compress(run, path, codec="lattice", steps=steps)
        contents.append(content(path))
        assert check_archive(path) == ()
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"coarseness": 2.0}, "another config"),
        ({"codec": "lossless"}, "another (codec|config)"),
        ({"optimizer": "exact"}, "another optimizer"),
        ({"steps": [200, 300]}, r"part 1/2 has other steps"),
        ({"part": "1/3"}, r"which another job began, waits for part 2/2"),
    ],
    ids=["coarseness", "codec", "optimizer", "steps", "job"],
)
def test_a_part_with_other_settings_or_of_another_job_is_refused(tmp_path, run, changed, match):
    compress(run, tmp_path / "x", codec="lattice", steps=run.steps[:2], part="1/2")
    with pytest.raises(ConflictError, match=match):
        compress(
            run, tmp_path / "x", **{"codec": "lattice", "steps": run.steps[:2], "part": "2/2", **changed}
        )


def test_writers_of_parts_and_of_frames_keep_each_other_out(tmp_path, template, monkeypatch):
    path = Path(shutil.copytree(template / "parts", tmp_path / "x"))
    monkeypatch.setattr("inshrink_core.archive.parts._PATIENCE_S", 0.1)
    with ArchiveWriter(path), pytest.raises(LockedError):
        PartWriter(path, 0, 3)
    with PartWriter(path, 0, 3), PartWriter(path, 1, 3):
        with pytest.raises(LockedError):
            ArchiveWriter(path)
        with pytest.raises(LockedError):
            commit(path)
    commit(path)


@pytest.mark.parametrize("option", [{"resumed_from": 100}, {"max_drop": 0.1}, {"base": "x.pt"}])
def test_options_that_need_all_tensors_are_refused_in_parts(tmp_path, run, option):
    with pytest.raises(InputError, match="needs all tensors in one process"):
        compress(run, tmp_path / "x", part="1/2", **option)
    assert not (tmp_path / "x").exists()


def test_a_step_with_other_values_is_refused_in_parts(tmp_path, run, template):
    path = Path(shutil.copytree(template / "parts", tmp_path / "x"))
    moved = shutil.copytree(run.path, tmp_path / "run")
    names = [run.path_of(step) for step in run.steps[:2]]
    shutil.copy(names[0], Path(moved) / Path(names[1]).name)
    with pytest.raises((StepConflictError, UnreadableError)):
        compress(moved, path, codec="lattice", steps=run.steps[:2], part="1/3")


def test_a_lost_part_is_named_and_every_other_step_is_read(tmp_path, run, template, capsys):
    path = Path(shutil.copytree(template / "parts", tmp_path / "x"))
    last = ArchiveReader.open(path).head
    (path / last.files[1].path).unlink()
    assert main(["verify", str(path)]) == 1
    assert f"part 2/3 of the frame of step {last.step} is missing" in capsys.readouterr().out
    with pytest.raises(MissingFrameError, match="part 2/3 of the frame"):
        restore(path, tmp_path / "out", steps=[last.step])
    restore(path, tmp_path / "out", steps=run.steps[:2])
    assert len([*(tmp_path / "out").iterdir()]) == 2


def test_a_step_that_lost_a_part_can_be_given_up_with_or_without_the_manifest(tmp_path, run, template):
    for name in ("listed", "rebuilt"):
        path = Path(shutil.copytree(template / "parts", tmp_path / name))
        last = ArchiveReader.open(path).head
        (path / last.files[0].path).unlink()
        if name == "rebuilt":
            (path / "inshrink-manifest").unlink()
        prune(path, forget_missing=True, apply=True)
        if name == "rebuilt":
            assert commit(path, discard=True).discarded == (last.step,)
        assert check_archive(path) == ()
        assert Archive.open(path).steps == run.steps[: N_STEPS - 1]
        compress(run, path, codec="lattice", steps=run.steps[:N_STEPS])
        assert {step: row[3] for step, row in content(path).items()} == {
            step: row[3] for step, row in content(template / "whole").items()
        }


def test_everything_that_reads_or_rewrites_an_archive_takes_frames_in_parts(tmp_path, run, template):
    entire, parts = (Path(shutil.copytree(template / n, tmp_path / n)) for n in ("whole", "parts"))
    for path in (entire, parts):
        restore(path, tmp_path / f"restored {path.name}")
        export(path, pack=tmp_path / f"{path.name}.packed")
    assert content_of(tmp_path / "restored whole") == content_of(tmp_path / "restored parts")
    packed = tmp_path / "parts.packed"
    assert check_archive(packed) == ()
    assert content(packed) == content(entire)
    export(packed, unpack=tmp_path / "unpacked")
    assert content_of(tmp_path / "unpacked" / "frames") == content_of(parts / "frames")
    for path in (entire, parts):
        prune(path, keep=run.steps[2:N_STEPS], apply=True)
    assert check_archive(parts) == ()
    assert content(parts) == content(entire)
    assert {frame.n_parts for frame in Archive.open(parts).frames} == {3}
    (parts / "inshrink-manifest").unlink()
    ArchiveWriter(parts, rebuild=True).close()
    assert content(parts) == content(entire)
    assert verify(parts, deep=True).ok


def test_restore_and_verify_share_out_steps(tmp_path, run, template):
    restore(template / "parts", tmp_path / "whole", every=True)
    reports = [restore(template / "parts", tmp_path / "out", every=True, part=f"{i}/3") for i in (3, 1, 2)]
    assert sorted(step for report in reports for step in report.steps) == sorted(run.steps[:N_STEPS])
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")
    broken = Path(shutil.copytree(template / "parts", tmp_path / "x"))
    last = ArchiveReader.open(broken).head
    damaged = broken / last.files[2].path
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    found = [verify(broken, deep=True, part=f"{i}/2") for i in (1, 2)]
    assert [report.ok for report in found] == [True, False]
    assert all("00002.frame" in problem.where for problem in found[1].problems)
    assert sum(report.n_frames for report in found) == N_STEPS


def test_shares_come_from_the_option_or_from_what_started_the_process():
    assert share_of("2/8") == Share(1, 8)
    assert share_of(None, {"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert share_of("auto", {"RANK": "1", "WORLD_SIZE": "2"}) == Share(1, 2)
    array = {
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }
    assert share_of("auto", array | {"SLURM_ARRAY_TASK_MIN": "1"}) == Share(2, 4)
    assert share_of("auto", array) == Share(3, 4)
    assert share_of("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}) == Share(0, 3)
    for text, known in (
        ("3/2", {}),
        ("0/2", {}),
        ("x", {}),
        ("auto", {}),
        ("auto", {"RANK": "2", "WORLD_SIZE": "2"}),
    ):
        with pytest.raises(InputError):
            share_of(text, known)


# ---- what starts parts ---------------------------------------------------------------------------


def environment(**more):
    names = {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
    remaining = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("SLURM_")}
    return remaining | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def torchrun(*words, cwd):
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return ran(*launcher, "-m", "inshrink_core", *words, cwd=cwd, env=environment(), timeout=120)


def test_torchrun_is_one_command_with_one_report(tmp_path, run, template):
    steps = ",".join(map(str, run.steps[:N_STEPS]))
    done = torchrun(
        "compress", str(run.path), "-o", "x", "--codec", "lattice", "--steps", steps, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ratio of everything") == 1
    assert "1/2" in done.stdout
    assert content(tmp_path / "x") == content(template / "whole")
    assert {frame.n_parts for frame in Archive.open(tmp_path / "x").frames} == {2}

    done = torchrun("verify", "x", "--deep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"sound: {N_STEPS} frames" in done.stdout


# ---- engines -------------------------------------------------------------------------------------


@pytest.fixture
def on_the_spot(monkeypatch):
    """An engine that performs one part after the other here; returns what each was asked."""
    asked = []

    def perform(work):
        n = work.workers or 3
        total = TotalProgress(n, work.progress)
        tasks = json.loads(json.dumps(work.tasks(n, work.threads or 1)))
        asked.extend(argument for _, argument, _ in tasks)
        return [
            pickle.loads(pickle.dumps(pkgutil.resolve_name(function)(
                argument, partial(total.add, at)
            )))
            for at, (function, argument, _) in enumerate(tasks)
        ]  # fmt: skip

    monkeypatch.setitem(ENGINES, "processes", perform)
    monkeypatch.setattr("inshrink_core.verbs.shared.sharing.prepare_process", lambda: None)
    return asked


def test_an_engine_compresses_restores_and_verifies_as_one_process_does(tmp_path, run, template, on_the_spot):
    options = {"codec": "lattice", "steps": run.steps[:N_STEPS], "engine": "processes"}
    now = []
    report = compress(run.path, tmp_path / "x", **options, workers=3, progress=now.append)
    assert content(tmp_path / "x") == content(template / "whole")
    assert (report.part, report.waiting, report.appended) == (None, (), run.steps[:N_STEPS])
    assert (now[-1].done, now[-1].total) == (report.raw_bytes_read, report.raw_bytes_read)
    assert [item["request"]["fields"]["part"] for item in on_the_spot] == ["1/3", "2/3", "3/3"]
    again = compress(run.path, tmp_path / "x", **options, workers=2)
    assert (again.appended, again.skipped, again.relative_error) == ((), run.steps[:N_STEPS], None)
    entire = compress(run.path, tmp_path / "y", codec="lattice", steps=run.steps[:N_STEPS])
    assert report.relative_error == pytest.approx(entire.relative_error, rel=1e-12)
    assert report.size.raw_total == entire.size.raw_total

    single = restore(tmp_path / "x", tmp_path / "one", every=True, tensors="conv*")
    many = restore(
        tmp_path / "x", tmp_path / "many", every=True, tensors="conv*", engine="processes", workers=2
    )
    assert content_of(tmp_path / "one") == content_of(tmp_path / "many")
    for name in ("steps", "layout", "stored", "originals"):
        assert getattr(many, name) == getattr(single, name)
    assert {path.name for path in many.paths} == {path.name for path in single.paths}

    alone = verify(tmp_path / "x", deep=True, against=run.path)
    shared = verify(tmp_path / "x", deep=True, against=run.path, engine="processes")
    assert shared.to_json() == alone.to_json()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"engine": "dask"}, "choose one of threads, processes, ray"),
        ({"workers": 2}, "add --engine processes"),
        ({"engine": "processes", "part": "1/2"}, "--engine runs all parts"),
        ({"engine": "processes", "max_drop": 0.1}, "needs all tensors in one process"),
        ({"engine": "processes", "workers": 0}, "≥ 1"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_anything_is_written(tmp_path, run, options, match):
    with pytest.raises(InputError, match=match):
        compress(run.path, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_workers_are_given_paths_not_objects(tmp_path, run):
    with pytest.raises(InputError, match="cannot be given the object in 'run'"):
        compress(run, tmp_path / "x", engine="processes")
    with pytest.raises(InputError, match="cannot be given the object in 'config'"):
        compress(run.path, tmp_path / "x", config=get_codec("lossless")(), engine="processes")


SCHEDULER = """#!/bin/sh
# A stand-in for sbatch: the tasks of an array one after the other, the last first; it prints a job's number.
for word in "$@"; do
    case "$word" in
        --array=*|--dependency=*|--parsable|--export=*) ;;
        --wrap) wrapped=1 ;;
        *) if [ "$wrapped" = 1 ]; then sh -c "$word" >&2 || exit 1; echo 2; exit; fi; script="$word" ;;
    esac
done
SLURM_ARRAY_TASK_COUNT=2; SLURM_ARRAY_TASK_MIN=0; SLURM_PROCID=0; SLURM_NTASKS=1
export SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_MIN SLURM_PROCID SLURM_NTASKS
for task in 1 0; do
    SLURM_ARRAY_TASK_ID=$task sh "$script" >&2 || exit 1
done
echo 1
"""


@pytest.mark.documentation
def test_the_documented_job_of_slurm_compresses_and_commits(tmp_path, run):
    for block in blocks("docs/parts.md"):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
    (tmp_path / "bin").mkdir()
    inshrink = f'#!/bin/sh\nexec "{sys.executable}" -P -m inshrink_core "$@"\n'
    for name, text in (("sbatch", SCHEDULER), ("inshrink", inshrink)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    few = tmp_path / "run"
    few.mkdir()
    for step in run.steps[:N_STEPS]:
        shutil.copy(run.path_of(step), few)
    known = environment(RUN=str(few), ARCHIVE=str(tmp_path / "x"))
    known["PATH"] = f"{tmp_path / 'bin'}:{known['PATH']}"
    done = ran("sh", "submit.sh", cwd=tmp_path, env=known, timeout=200)
    assert done.returncode == 0, done.stderr
    compress(few, tmp_path / "whole")
    assert content(tmp_path / "x") == content(tmp_path / "whole")
    assert {frame.n_parts for frame in Archive.open(tmp_path / "x").frames} == {2}


def test_the_same_part_twice_at_a_time_is_refused(tmp_path):
    path = tmp_path / "x"
    with PartWriter(path, 0, 2) as one, PartWriter(path, 0, 2) as other:
        first = one.begin(step=1, kind="keyframe", parent_id=None)
        with pytest.raises(LockedError, match="writing this file"):
            other.begin(step=1, kind="keyframe", parent_id=None)
        first.commit({})
