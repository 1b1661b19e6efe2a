"""A fuzzer that does not find planted defects is worth nothing."""

import dataclasses
import re
from unittest import mock

import pytest

from benchmarks.fuzz import __main__ as program
from benchmarks.fuzz import runs
from benchmarks.fuzz.archive_mutants import beheaded
from benchmarks.fuzz.archive_target import ArchiveTarget
from benchmarks.fuzz.campaign import Fuzzer, limits_of
from benchmarks.fuzz.judging import Limits, judge_alone
from benchmarks.fuzz.target import case_rng
from benchmarks.fuzz.targets import all_targets
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.codecs.lossless import LosslessCodec
from inshrink_core.formats.source import FileSource
from tests.fuzz.planted import Planted

pytestmark = pytest.mark.attack

N_CASES = 150
N_HANGING = 40

LIMITS = Limits(cpu_seconds=1.0, wall_seconds=2.0)


def _attacked(target, cases, limits=LIMITS):
    return Fuzzer([target], seed=1, limits=limits, workers=1).run(None, cases)


@pytest.mark.parametrize(
    ("defect", "kind", "frame"),
    [
        ("key_error", "raw", "_key_error"),
        ("wrong_value", "silent", "_wrong_value"),
        ("allocation", "memory", "_allocation"),
        ("loop", "hang", "_loop"),
        ("segfault", "crash", "_segfault"),
        ("long", "long", "_long"),
        ("disk", "memory", "_disk"),
    ],
)
def test_a_planted_defect_is_found_named_and_matched_to_its_case(defect, kind, frame):
    target = Planted(defect)
    n_cases = N_HANGING if kind == "hang" else N_CASES
    campaign = _attacked(target, n_cases)
    (finding,) = campaign.findings.values()
    assert finding.verdict.kind == kind
    assert frame in "".join(finding.verdict.frames)
    assert finding.data == target.mutate(case_rng(target.name, 1, finding.case))
    # The other cases were run too, each once, whatever the bad ones did to their process.
    assert campaign.tallies[target.name].n_cases == 1 + n_cases
    assert finding.n_cases == campaign.n_bad


class _IgnoredChecksum(int):
    """A checksum that equals every other."""

    def __call__(self, *chunks):
        return self

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0


def linked(rng, files):
    frames = {"frames": runs.SPECIAL + b"folder outside", "stray": rng.randbytes(4)}
    return {MANIFEST_NAME: files[MANIFEST_NAME], **frames}


def wrong(self, spec, block, reference, device="cpu", decode=LosslessCodec.decode):
    decoded = decode(self, spec, block, reference, device)
    return dataclasses.replace(decoded, tensor=decoded.tensor + 1)


@pytest.mark.parametrize(
    ("archive", "change", "place", "defect", "promise"),
    [
        ("lossless", None, "archive.layout.crc32c", _IgnoredChecksum(), "(verify|restore) gives"),
        ("branched", beheaded, "archive.catalog.Catalog.require_complete", mock.Mock(), "no other steps"),
        ("lossless", linked, "archive.storage.local.require_private", mock.Mock(), "nothing behind a link"),
        ("lossless", None, "codecs.lossless.LosslessCodec.decode", wrong, "silent"),
    ],
)
def test_a_defect_of_an_archives_reader_is_found(archive, change, place, defect, promise):
    target = ArchiveTarget("archive", sealed=False, is_chosen=lambda name: name == archive, change=change)
    target.seeds()
    with mock.patch(f"inshrink_core.{place}", defect):
        campaign = _attacked(target, 60, Limits())
    assert any(re.search(promise, key) for key in campaign.findings), campaign.findings


def test_a_reader_of_runs_that_returns_another_value_is_found_by_the_round_trip():
    target = next(target for target in all_targets() if target.name == "torch-blind")
    (sound,) = target.seeds()
    assert judge_alone(target, sound, Limits()).kind == "same"
    read = FileSource.read
    with mock.patch.object(FileSource, "read", lambda self, spec: read(self, spec) + 1):
        verdict = judge_alone(target, sound, Limits())
    assert verdict.kind == "silent"


def test_every_target_makes_the_same_case_whenever_asked_and_accepts_what_is_sound():
    for target in all_targets():
        for data in target.seeds()[:3]:
            verdict = judge_alone(target, data, limits_of(target, Limits()))
            assert verdict.kind in ("same", "different"), (target.name, verdict)
        first = [target.mutate(case_rng(target.name, 1, case)) for case in range(3)]
        assert first == [target.mutate(case_rng(target.name, 1, case)) for case in range(3)]
        assert len(set(first)) == len(first)


def test_the_command_counts_replays_and_saves_what_it_finds(tmp_path, capsys):
    with mock.patch.object(program, "named", return_value=[Planted("key_error")]):
        code = program.main(["--cases", "40", "--workers", "1", "--save", str(tmp_path)])
        output = capsys.readouterr().out
        (case,) = re.findall(r"--replay planted-key_error 1 (-?\d+)", output)
        replayed = program.main(["--replay", "planted-key_error", "1", case])
    assert code == replayed == 1
    assert re.search(r"41 cases, [1-9]\d* bad, 1 findings", output)
    (saved,) = (tmp_path / "planted-key_error").iterdir()
    assert judge_alone(Planted("key_error"), saved.read_bytes(), LIMITS).kind == "raw"
    with mock.patch.object(program, "named", return_value=[Planted(None)]):
        assert program.main(["--cases", "40", "--workers", "1"]) == 0
    assert "0 bad" in capsys.readouterr().out
