"""The order of checkpoints: names as frameworks write them, keys inside, and what is left in doubt."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inshrink_core.formats.names import is_numbered, read_name, step_in_name
from inshrink_core.formats.order import Evidence, order_checkpoints

SECOND = 10**9


STEP, BESIDE = True, False


def _order(*rows):
    """Order evidence that is a path, or a path with the keys in it and its time."""
    return order_checkpoints([Evidence(row) if isinstance(row, str) else Evidence(*row) for row in rows])


def _places(*rows):
    return [tuple(one) for one in _order(*rows)[0]]


def _origin(*rows):
    return _order(*rows)[1]


def _steps(*rows):
    """Return the steps of checkpoints that are all on the main line."""
    placements, _ = _order(*rows)
    assert all(one.is_main for one in placements)
    return [one.step for one in placements]


def _keys(path, **keys):
    return path, tuple(keys.items())


LAYOUTS = {
    "kohya by step": ["lora-step00000500.safetensors", "lora-step00001000.safetensors"],
    "OLMo with tokens": ["stage1-step1000-tokens5B", "stage1-step11000-tokens46B"],
    "Pythia": ["step1", "step512", "step1000", "step143000"],
    "lit-gpt": ["step-00000500/lit_model.pth", "step-00001000/lit_model.pth"],
    "mmengine by iteration": ["iter_900.pth", "iter_1000.pth"],
    "StyleGAN with kimg": ["00000-stylegan2-ffhq256-kimg900.pt", "00000-stylegan2-ffhq256-kimg1000.pt"],
    "EDM": ["training-state-005017.pt", "training-state-010035.pt"],
    "Ray Tune": ["trial_0/checkpoint_000009", "trial_0/checkpoint_000010"],
    "wandb": ["run-20240512_134550-3k5j2h9x/model_9.pt", "run-20240512_134550-3k5j2h9x/model_10.pt"],
    "TensorFlow": ["model.ckpt-900.pt", "model.ckpt-1000.pt"],
    "words behind": ["net_9_epochs.pt", "net_10_epochs.pt"],
    "of so many": ["epoch_9_of_100.pt", "epoch_10_of_100.pt"],
    "an architecture with a number": ["resnet50_epoch3.pt", "resnet50_epoch12.pt"],
    "a size": ["gpt2-125M-step900.pt", "gpt2-125M-step1000.pt"],
    "an accuracy": ["model_ep09_acc93.pt", "model_ep10_acc91.pt"],
    "an accuracy without a word": ["ckpt_900_93.pt", "ckpt_1000_91.pt", "ckpt_1100_92.pt"],
    "a negative metric": ["model_9_elbo-0.51.pt", "model_10_elbo-0.47.pt"],
    "F1": ["f1_0.91_epoch9.pt", "f1_0.87_epoch10.pt"],
    "hyperparameters": ["lr1e-4_bs32_step900.pt", "lr1e-4_bs32_step1000.pt"],
    "digests": ["model-e9-ff00ee11.pt", "model-e10-00aa11bb.pt"],
    "capitals": ["myModelEpoch9.pt", "myModelEpoch10.pt"],
    "folders": ["epoch_1/iter_100.pt", "epoch_1/iter_900.pt", "epoch_2/iter_1000.pt"],
}


@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)
def test_names_of_a_layout_give_the_order_of_training(names):
    shuffled = random.Random(1).sample(names, len(names))
    steps = dict(zip(shuffled, _steps(*shuffled), strict=True))
    assert sorted(names, key=steps.__getitem__) == names
    assert len(set(steps.values())) == len(names)
    assert ";" not in _origin(*names)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step120", 120),
        ("epoch=1-step=9-v1.ckpt", 9),
        ("500ksteps.pt", 500_000),
        ("rl_model_5000_steps.pt", 5000),
        ("gpt2-125M-step1000.pt", 1000),
        ("step_20240512.pt", 20240512),
        ("model_acc91.pt", None),
        ("model-a1b2c3d4.pt", None),
        ("Feb01_00-10-00", None),
        ("model_1715521550.pt", None),
        ("model_20240512.pt", None),
        ("best.pt", None),
        ("last-v1.ckpt", None),
        ("9" * 400 + ".5.pt", None),
        ("1e99.pt", None),
    ],
)
def test_a_name_alone_tells_its_step(name, step):
    assert step_in_name(name) == step


@pytest.mark.parametrize(
    "names",
    [
        ["2024-05-12_13-45-50", "2024-05-12_13-46-10", "2024-05-12_13-47-05", "2024-05-13_01-00-00"],
        ["m_20240512T134550.pt", "m_20240512T134610.pt", "m_20241201T000000.pt"],
        ["20240512134550.pt", "20240512134610.pt"],
        ["Feb01_00-10-00", "Feb01_13-00-00", "Mar01_00-00-00"],
        ["Nov30_00-10-00", "Dec31_23-59-59", "Jan01_00-10-00"],
        ["model_12May2024.pt", "model_01Jun2024.pt"],
        ["28.02.2024_10-20.pt", "01.03.2024_09-00.pt"],
        ["02-28-2024_10-20.pt", "03-01-2024_09-00.pt"],
        ["model_1715521550.pt", "model_1715521951.25.pt"],
        ["2024-05-12 13:45:50", "2024-05-12 14:00:00"],
    ],
)
def test_dates_and_times_are_numbered_in_their_order(names):
    assert all(map(is_numbered, names))
    assert _steps(*names) == list(range(len(names)))
    assert _steps(*reversed(names)) == list(reversed(range(len(names))))
    assert "dates and times" in _origin(*names)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        (["ep1_it100", "ep1_it200", "ep2_it100", "ep10_it100"], [100, 200, 300, 400]),
        (["epoch9_256.pt", "epoch10_256.pt"], [256, 512]),
        (["e1_b0.pt", "e1_b1.pt", "e2_b0.pt", "e2_b1.pt"], [0, 1, 2, 3]),
        (["version_0/epoch=1.ckpt", "version_0/epoch=2.ckpt", "version_1/epoch=1.ckpt"], [1, 2, 3]),
        (["version_0/epoch=0.ckpt", "version_0/epoch=1.ckpt", "version_1/epoch=2.ckpt"], [0, 1, 2]),
        (["2024-05-12/10-00-00/step_100.pt", "2024-05-13/09-00-00/step_100.pt"], [100, 200]),
        (["run9/ckpt_100.pt", "run9/ckpt_200.pt", "run10/ckpt_50.pt"], [100, 200, 250]),
        ([_keys(f"{name}.pt", step=100, epoch=at) for at, name in enumerate("bca")], [100, 200, 300]),
        (
            [_keys(f"version_{v}/last-{s}.ckpt", global_step=s) for v, s in ((0, 10), (0, 20), (1, 10))],
            [10, 20, 30],
        ),
    ],
)
def test_counters_that_restart_go_on_where_the_last_ones_ended(rows, steps):
    assert _steps(*rows) == steps
    restarts = steps != [0, 1, 2]
    assert ("restart" in _origin(*rows), ";" in _origin(*rows)) == (restarts, restarts)


def test_keys_inside_come_before_names_where_both_tell():
    rows = [_keys("epoch=1.ckpt", epoch=1, global_step=70), _keys("epoch=2.ckpt", epoch=2, global_step=140)]
    assert _steps(*rows) == [70, 140]
    assert _origin(*rows) == "steps come from the key 'global_step'"
    assert _steps(_keys("a-x.pt", epoch=10), _keys("b-x.pt", epoch=11)) == [10, 11]
    assert _steps(_keys("epoch_1.pt", epoch=0), _keys("epoch_2.pt", epoch=1)) == [0, 1]
    assert _steps(_keys("model_900.pt", epoch=0), _keys("model_1000.pt", epoch=0)) == [900, 1000]
    assert _steps(_keys("model_900.pt", epoch=1), _keys("model_1800.pt", epoch=2)) == [900, 1800]
    assert _steps(_keys("a.pt", step=5), "model_9.pt") == [5, 9]
    assert _steps(_keys("a.pt", step=5), _keys("b.pt", iteration=9)) == [5, 9]


def test_the_order_that_most_evidence_agrees_with_is_taken_and_the_doubt_is_said():
    against = [_keys(f"model_{n}.pt", step=400 - 100 * n) for n in (1, 2, 3)]
    assert _steps(*against) == [300, 200, 100]
    assert _origin(*against) == "steps come from the key 'step'; names would order them otherwise"
    restarted_epochs = [_keys(f"m_{n}.pt", step=n, epoch=e) for n, e in ((100, 0), (200, 1), (300, 0))]
    assert _steps(*restarted_epochs) == [100, 200, 300]
    within_epochs = [_keys(f"e{e}_{n}.pt", step=n, epoch=e) for e, n in ((0, 480), (1, 479), (2, 481))]
    assert sorted(_steps(*within_epochs)) == _steps(*within_epochs)


def test_what_has_no_number_takes_a_free_step_by_its_keys_else_it_is_a_branch():
    run = [_keys(f"epoch={n}.ckpt", global_step=100 * n) for n in (1, 2)]
    assert _places(*run, _keys("last.ckpt", global_step=250))[2] == (250, STEP)
    assert _places(*run, _keys("last.ckpt", global_step=200))[2] == (200, BESIDE)
    assert _places(*run, "last.ckpt", "best.ckpt", "model_final.ckpt")[2:] == [(None, BESIDE)] * 3
    assert _places(*run, _keys("ema.ckpt", global_step=250))[2] == (250, BESIDE)
    assert _places("step_1.pt", "step_2.pt", _keys("last.pt", step=3))[2] == (3, STEP)
    assert _places("step_1.pt", "step_2.pt", _keys("last.pt", epoch=3))[2] == (None, BESIDE)
    assert _places("model_1.pt", "model_2.pt", _keys("best.pt", step=700, epoch=1))[2] == (None, BESIDE)
    assert _places("checkpoint_10000.pth", "best_model_9500.pth") == [(10000, STEP), (9500, STEP)]
    assert _places("checkpoint_10000.pth", "best_model_10000.pth") == [(10000, STEP), (10000, BESIDE)]
    assert _places("best_model_9500.pth", "best_model_9900.pth") == [(9500, STEP), (9900, STEP)]
    assert _places("epoch_1.pth", "model.pth", "optimal.pth") == [(1, STEP), (None, BESIDE), (None, BESIDE)]
    assert _places(_keys("best.pt", step=300), _keys("last.pt", step=500)) == [(300, STEP), (500, STEP)]
    assert _places("model.pt", "best.pt") == [(0, STEP), (None, BESIDE)]
    assert _places("last.pt") == [(0, STEP)]


def test_two_files_never_have_one_step():
    assert _places("epoch=1-step=5.ckpt", "epoch=1-step=5-v1.ckpt") == [(5, STEP), (5, BESIDE)]
    assert _places("ep1_acc0.91.pt", "ep1_acc0.93.pt") == [(1, STEP), (1, BESIDE)]
    assert _places("step_1.pt", "backup/step_1.pt") == [(1, STEP), (1, BESIDE)]
    assert _places("model_1.pt", "model_ema_1.pt") == [(1, STEP), (1, BESIDE)]
    assert _places(_keys("a.pt", step=5), _keys("b.pt", step=5)) == [(5, STEP), (5, BESIDE)]
    assert _places("a1.pt", "a2.pt", "c1.pt", "c2.pt") == [(1, STEP), (2, STEP), (1, BESIDE), (2, BESIDE)]
    assert _places("G_5.pth", "D_5.pth") == [(5, BESIDE), (5, STEP)]
    epochs_and_updates = _places("checkpoint1.pt", "checkpoint_1_500.pt", "checkpoint_2_900.pt")
    assert epochs_and_updates == [(1, BESIDE), (500, STEP), (900, STEP)]


def test_times_of_files_order_them_where_nothing_else_does_and_files_are_seconds_apart():
    names = ["late.pt", "early.pt"]
    assert _steps(*names) == [1, 0]
    apart = [(name, (), at * 60 * SECOND) for at, name in enumerate(names, 1)]
    assert _steps(*apart) == [0, 1]
    assert "times of the files" in _origin(*apart)
    copied = [(name, (), at + SECOND) for at, name in enumerate(names)]
    assert _steps(*copied) == [1, 0]
    assert "no number" in _origin(*copied)
    numbered = [(f"step_{9 - at}.pt", (), at * 60 * SECOND) for at in range(3)]
    assert _steps(*numbered) == [9, 8, 7]
    assert "no number" in _origin(*names)


SCHEMES = (
    "epoch={e}-step={s}.ckpt",
    "checkpoint_{e}_{s}.pt",
    "ep{e}it{s}.pt",
    "version_{v}/checkpoints/epoch={e}-step={s}.ckpt",
    "model_{s}_loss{m:.3f}.pt",
    "step{s}/rank{r}.pt",
    "{e}epoch_{s}.pt",
    "unet256_{s}_{m:.2f}.pt",
    "run{v}/{s}/model.pt",
    "2024-05-{d:02d}_10-00-{e:02d}.pt",
    "{h}.pt",
)


@st.composite
def trainings(draw):
    """Return evidence in the order of a training: one scheme of names, and keys that all or none have."""
    scheme = draw(st.sampled_from(SCHEMES))
    inside = draw(st.sampled_from([(), ("global_step",), ("step", "epoch"), ("epoch",)]))
    if scheme == "{h}.pt":
        inside = ("global_step",)
    restarts = "{v}" in scheme or ("{e}" in scheme and "global_step" not in inside)
    restarts = restarts and "step" not in inside and draw(st.booleans())
    every, an_epoch = draw(st.integers(1, 500)), draw(st.integers(2, 4))
    rows = []
    for at in range(draw(st.integers(1, 14))):
        epoch, within = divmod(at, an_epoch)
        step = every * ((within if restarts else at) + 1)
        digest = draw(st.integers(0, (1 << 48) - 1))
        name = scheme.format(
            e=epoch, s=step, v=epoch, d=at + 1, m=draw(st.floats(0, 9)), r=0, h=f"a{digest:012x}{at:03x}b"
        )
        keys = {"global_step": every * (at + 1), "step": every * (at + 1), "epoch": epoch}
        if inside == ("epoch",) and "{s}" not in scheme:
            keys["epoch"] = at
        rows.append(Evidence(name, tuple((key, keys[key]) for key in inside)))
    return rows


LABELLED = st.lists(
    st.builds(
        Evidence,
        st.sampled_from(["best.pt", "last.ckpt", "final_model.pt", "ema.pt", "best_model_ema.pt"]),
        st.sampled_from([(), (("global_step", 700),), (("epoch", 3),), (("step", 5), ("epoch", 1))]),
        st.none(),
    ),
    max_size=3,
    unique_by=lambda one: one.path,
)


def _check_places(evidence, placements):
    """Check that every checkpoint has a place, and none of a rank has the step of another of it."""
    assert len(placements) == len(evidence)
    assert all(one.step is not None for one in placements if one.is_main)
    assert all(one.step is None or 0 <= one.step < 1 << 62 for one in placements)
    rows = zip(placements, evidence, strict=True)
    steps = [(place.step, read_name(one.path).part) for place, one in rows if place.is_main]
    assert len(set(steps)) == len(steps)


@given(trainings(), LABELLED, st.randoms(use_true_random=False))
def test_a_training_keeps_its_order_whatever_its_names(training, labelled, rng):
    evidence = [*training, *labelled]
    placements, origin = order_checkpoints(evidence)
    _check_places(evidence, placements)
    line = placements[: len(training)]
    steps = [one.step for one in line]
    assert all(one.is_main for one in line)
    assert steps == sorted(set(steps))
    turned = rng.sample(range(len(evidence)), len(evidence))
    assert order_checkpoints([evidence[at] for at in turned]) == ([placements[at] for at in turned], origin)


@given(trainings(), LABELLED)
def test_a_later_checkpoint_keeps_the_earlier_steps(training, labelled):
    for n in range(1, len(training)):
        before = order_checkpoints([*training[:n], *labelled])[0][:n]
        after = order_checkpoints([*training[: n + 1], *labelled])[0][:n]
        assert before == after


WORDS = ["epoch", "step", "it", "best", "ema", "acc", "model", "rank", "version"]
WORDS += ["2024-05-12", "Feb01", "a1b2c3d"]
SCRAPS = st.one_of(
    st.sampled_from([*WORDS, *"-_=./vkM", "e5", "of", "-v1", ".pt", "0.91", "10-20-30", "1715521550"]),
    st.integers(0, 10**6).map(str),
    st.text(max_size=4),
)
KEYS = st.lists(
    st.tuples(st.sampled_from(["global_step", "step", "epoch", "other"]), st.integers(0, (1 << 62) - 1)),
    max_size=3,
    unique_by=lambda one: one[0],
)


@given(
    st.lists(
        st.builds(
            Evidence,
            st.lists(SCRAPS, min_size=1, max_size=8).map("".join),
            KEYS.map(tuple),
            st.one_of(st.none(), st.integers(0, 1 << 62)),
        ),
        max_size=12,
        unique_by=lambda one: one.path,
    ),
    st.randoms(use_true_random=False),
)
def test_whatever_names_and_keys_hold_every_checkpoint_has_a_place_of_its_own(evidence, rng):
    placements, origin = order_checkpoints(evidence)
    _check_places(evidence, placements)
    turned = rng.sample(range(len(evidence)), len(evidence))
    assert order_checkpoints([evidence[at] for at in turned]) == ([placements[at] for at in turned], origin)
