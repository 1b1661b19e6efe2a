"""The guide's codec, as a package of its own, passes the suite and is used; see docs/guides/codec.md."""

import pytest

from tests.guides import install, keeps_its_suite, python

USE = """
import sys, torch, inshrink_core
from inshrink_core.codec import codec_names
assert "cut" in codec_names()
run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
archive = sys.argv[1] + "/run.inshrink"
report = inshrink_core.compress(run, archive, codec="cut", config={"bits": 6}, steps=run.steps[:3])
assert report.config == {"bits": 6}
assert inshrink_core.verify(archive).ok
opened = inshrink_core.open(archive)
weights, restored = run[run.steps[2]]["fc1.weight"], opened[run.steps[2]]["fc1.weight"]
assert 0 < float((weights - restored).abs().max()) <= float(weights.abs().max()) / 64
inshrink_core.restore(archive, sys.argv[1] + "/restored", steps=[run.steps[2]])
from inshrink_core.cli import main
assert main(["verify", archive, "--quiet"]) == 0
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return install("codec", tmp_path_factory.mktemp("installed"), "inshrink_cut.py", "test_cut.py")


@pytest.mark.documentation
def test_the_codec_of_the_guide_archives_a_run_that_is_refused_where_it_is_not_installed(package, tmp_path):
    done = python(package, "-c", USE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    code = "import sys, inshrink_core; a = inshrink_core.open(sys.argv[1]); a[a.steps[0]]['fc1.weight']"
    done = python(tmp_path, "-c", code, str(tmp_path / "run.inshrink"), installed=False)
    assert done.returncode != 0
    assert "no installed codec reads the bitstream 'cut/1'" in done.stderr


@pytest.mark.documentation
def test_the_codec_of_the_guide_keeps_the_laws(package):
    assert "passed" in keeps_its_suite(package, "test_cut.py")
