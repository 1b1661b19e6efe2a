"""An evaluator of an installed package is named, imported as its module, and runs in the child alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_EVALUATOR = """
import os

from named_metrics.parts import norm


def evaluate(state_dict):
    here = os.listdir()
    assert here == [], here
    return {"loss": 1 + norm(state_dict)}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder in which a package with two evaluators is installed, the second one broken."""
    site = tmp_path_factory.mktemp("site")
    package = site / "named_metrics"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(
        "def norm(state):\n    return sum(float(t.double().square().mean()) for t in state.values())\n"
    )
    (package / "language.py").write_text(_EVALUATOR)
    info = site / "named_metrics-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: named-metrics\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[inshrink.evaluators]\n"
        "size = named_metrics.language:evaluate\n"
        "gone = named_metrics.nowhere:evaluate\n"
    )
    return site


def python(site: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        cwd=site,
        timeout=240,
        check=False,
    )


_COMPARE = """
import json, sys
from pathlib import Path
import inshrink_core
from inshrink_core.evaluate import Evaluator
from inshrink_core.search.judge import evaluator_digest

run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
archive = Path(sys.argv[1]) / "a.inshrink"
inshrink_core.compress(run, archive, codec="lossless", steps=run.steps[:1])
compared = inshrink_core.compare(archive, run, evaluator="size", metric="loss")
first = evaluator_digest(Evaluator("size"))
source = Path("named_metrics/language.py")
source.write_text(source.read_text() + "# changed\\n")
print(json.dumps([compared.metric, compared.max_drop,
                  first != evaluator_digest(Evaluator("size"))]))
"""


def test_an_installed_evaluator_is_found_by_its_name(site, tmp_path):
    done = python(site, _COMPARE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    metric, drop, is_another_when_changed = json.loads(done.stdout)
    assert (metric, drop) == ("loss", 0.0)
    assert is_another_when_changed


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("unheard-of", "installed are: auto, gone, size"),
        ("gone", "the module 'named_metrics.nowhere' of an installed evaluator is gone"),
        ("size:evaluate", "there is no such evaluator file"),
    ],
)
def test_a_name_that_means_nothing_is_told(site, name, told):
    done = python(site, f"from inshrink_core.evaluate import Evaluator; Evaluator({name!r})")
    assert done.returncode == 1
    assert told in done.stderr


def test_a_run_cannot_name_an_installed_evaluator(site, tmp_path):
    (tmp_path / "inshrink.toml").write_text('[evaluator]\nfile = "size"\n')
    script = (
        "import pathlib, sys; from types import SimpleNamespace\n"
        "from inshrink_core.evaluate import EvaluatorRequest\n"
        "from inshrink_core.formats.logs.log import RunSettings\n"
        "named = RunSettings(file='size'), pathlib.Path(sys.argv[1])\n"
        "run = SimpleNamespace(settings=named[0], directory=named[1], is_elsewhere=False)\n"
        "EvaluatorRequest(trust_run=True).resolve(run)\n"
    )
    done = python(site, script, str(tmp_path))
    assert done.returncode == 1
    assert "there is no such evaluator file" in done.stderr
