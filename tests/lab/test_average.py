"""An average of steps is a step that loads like the run's own."""

import json
import textwrap

import pytest
import torch

import inshrink_core
from inshrink_core.errors import ExistsError, InputError, NotFoundError, TooLargeError
from inshrink_core.formats import open_run
from inshrink_core.verbs import average
from inshrink_lab.average import evolve, exponential, uniform

STEPS = (10, 20, 30, 40)


def values(step):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in STEPS:
        model = {
            "fc.weight": values(step),
            "half": values(step + 1).bfloat16(),
            "tied.weight": None,
            "bn.running_mean": torch.full((3,), float(step)),
            "bn.num_batches_tracked": torch.tensor(step),
        }
        model["tied.weight"] = model["fc.weight"]
        torch.save({"model": model, "step": step}, folder / f"step_{step}.pt")
    return folder


@pytest.fixture(scope="module")
def archive(run_path, tmp_path_factory):
    target = tmp_path_factory.mktemp("archive") / "a.inshrink"
    inshrink_core.compress(run_path, target, codec="lattice")
    return target


def judge_file(folder, target):
    """Write an evaluator that compares a weight with a target."""
    torch.save(target, folder / "target.pt")
    source = f"""
        import torch
        target = torch.load({str(folder / "target.pt")!r})
        def evaluate(state):
            return {{"loss": float((state["fc.weight"] - target).square().mean())}}
    """
    (folder / "judge.py").write_text(textwrap.dedent(source))
    return f"{folder}/judge.py:evaluate"


def loaded(folder):
    return torch.load(folder / "step_40.pt")["model"]


def test_weights_are_averages_and_everything_else_is_the_last_steps(run_path, tmp_path):
    report = average(run_path, tmp_path / "out")
    made = loaded(tmp_path / "out")
    wanted = sum(values(step).double() for step in STEPS) / 4
    assert torch.equal(made["fc.weight"], wanted.float())
    assert made["tied.weight"].data_ptr() == made["fc.weight"].data_ptr()
    halves = [values(step + 1).bfloat16().double() for step in STEPS]
    assert torch.equal(made["half"], (sum(halves) / 4).bfloat16())
    assert made["bn.running_mean"].tolist() == [40.0] * 3
    assert made["bn.num_batches_tracked"] == 40
    assert report.from_last == {"buffer": 2}
    assert json.loads((tmp_path / "out" / "average.json").read_text()) == json.loads(
        json.dumps(report.to_json())
    )
    assert open_run(tmp_path / "out").steps == (40,)


def test_an_archives_average_is_that_of_its_restores(archive, tmp_path):
    report = average(archive, tmp_path / "out", steps=[20, 30, 40], weights="ema", decay=0.5)
    assert report.coefficients == (0.25, 0.25, 0.5)
    opened = inshrink_core.open(archive)
    restored = [opened[step]["fc.weight"].double() for step in (20, 30, 40)]
    wanted = 0.25 * restored[0] + 0.25 * restored[1] + 0.5 * restored[2]
    assert torch.equal(loaded(tmp_path / "out")["fc.weight"], wanted.float())


def test_every_block_of_a_weight_is_decoded_once(archive, tmp_path, monkeypatch):
    from inshrink_core.chain import Archive

    decoded = []
    decode = Archive._decode_entry

    def counting(self, frame, entry, *rest, **named):
        decoded.append((frame.reader.info.step, entry.key))
        return decode(self, frame, entry, *rest, **named)

    monkeypatch.setattr(Archive, "_decode_entry", counting)
    average(archive, tmp_path / "out")
    assert sorted(decoded) == sorted(set(decoded))
    assert {step for step, key in decoded if key == "fc.weight"} == set(STEPS)


def test_given_coefficients_are_taken_as_they_are(run_path, tmp_path):
    report = average(run_path, tmp_path / "out", weights=[0, -1, 0, 2], layout="safetensors")
    made = open_run(tmp_path / "out")
    wanted = 2 * values(40).double() - values(20).double()
    assert torch.equal(made[40]["fc.weight"], wanted.float())
    assert report.weights == "given"


def test_a_search_finds_better_coefficients_than_the_baselines(run_path, tmp_path):
    # The target is a combination with a negative coefficient, which no average is.
    target = 1.5 * values(10) + 0.25 * values(20) - 0.75 * values(40)
    seen = []
    report = average(
        run_path,
        tmp_path / "out",
        search=True,
        evaluator=judge_file(tmp_path, target),
        budget=150,
        progress=seen.append,
    )
    worth = {row.name: row.value for row in report.judged}
    assert worth["search"] < 0.3 * min(worth["last"], worth["uniform"], worth["ema"])
    assert abs(sum(report.coefficients) - 1) < 1e-9
    assert min(report.coefficients) < 0
    searching = [item for item in seen if item.stage == "search"]
    assert [item.done for item in searching] == list(range(1, 151))
    assert {item.stage for item in seen} == {"search", "average"}


def test_a_search_that_is_cancelled_writes_nothing(run_path, tmp_path):
    def cancel(now):
        if now.done == 3:
            raise ZeroDivisionError

    judge = judge_file(tmp_path, values(10))
    with pytest.raises(ZeroDivisionError):
        average(run_path, tmp_path / "out", search=True, evaluator=judge, progress=cancel)
    assert not (tmp_path / "out").exists()


def test_an_evolution_is_the_same_for_the_same_seed_and_stands_failures():
    def cost(c):
        return float("nan") if c[0] > 0.9 else (c[0] + 0.5) ** 2 + (c[1] - 1) ** 2

    starts = [uniform(4), exponential(4, 0.9)]
    found = [evolve(cost, starts, budget=400, seed=3) for _ in range(2)]
    assert found[0] == found[1]
    assert abs(sum(found[0]) - 1) < 1e-9
    assert cost(found[0]) < 0.01


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"steps": [40]}, InputError),
        ({"steps": [40, 50]}, NotFoundError),
        ({"weights": "best"}, InputError),
        ({"weights": [0.5, 0.5]}, InputError),
        ({"weights": [0.5, 0.5, float("nan"), 0]}, InputError),
        ({"decay": 1.0}, InputError),
        ({"layout": "onnx"}, InputError),
        ({"weights": "search"}, InputError),
        ({"search": True}, InputError),
        ({"search": True, "weights": "ema"}, InputError),
        ({"budget": 5}, InputError),
        ({"max_memory": 100}, TooLargeError),
    ],
)
def test_what_cannot_be_averaged_is_refused_before_anything_is_written(run_path, tmp_path, options, error):
    with pytest.raises(error):
        average(run_path, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(run_path, tmp_path):
    (tmp_path / "step_40.pt").write_text("mine")
    with pytest.raises(ExistsError):
        average(run_path, tmp_path)
    assert (tmp_path / "step_40.pt").read_text() == "mine"


def test_a_weight_that_changes_its_shape_is_named(tmp_path):
    for step in (1, 2):
        torch.save({"w": torch.ones(3), "v": torch.ones(step)}, tmp_path / f"step_{step}.pt")
    with pytest.raises(InputError, match="'v'"):
        average(tmp_path, tmp_path / "out")
