"""Long curves are reduced to what shows."""

from __future__ import annotations

from inshrink_app import services
from inshrink_app.widgets import figures

from tests.app.builders import write_run


def test_of_very_many_values_those_that_show_are_drawn(root):
    lines = [f"{step},{'9' if step == 7_777 else step / 1e6}" for step in range(20_000)]
    run = write_run(root / "run")
    (run / "metrics.csv").write_text("\n".join(["step,acc", *lines]))
    shown = services.load_subject(str(run))
    (drawn,) = figures.log_figure(shown.log, {"all": list(shown.log)}).data
    assert len(drawn.x) < 3 * figures.CURVE_PARTS
    assert max(drawn.y) == 9
