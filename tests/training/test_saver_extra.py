"""What is saved beside the model: `extra` bit for bit, whatever it looks like; `also` as the model itself."""

import collections
import copy
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.checkpoint import TensorRole
from inshrink_core.errors import InputError
from inshrink_core.training.saver import Saver
from tests.runs import adam, model, sgd, train

MODES = [None, "exact", "compact", "drop"]


class Net(nn.Module):
    """Two layers around a normalisation, with a buffer that nothing but the model can tell from a weight."""

    def __init__(self, width=48):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        self.register_buffer("centre", torch.zeros(width, 8))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x - self.centre.mean(0)))))


def step(network, *optimizers, seed=0):
    """Train a step; every tensor moves."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    for optimizer in optimizers:
        optimizer.zero_grad()
    functional.cross_entropy(network(inputs), torch.arange(16) % 4).backward()
    for optimizer in optimizers:
        optimizer.step()
    network.centre += 0.01


def average_of(network, average=None):
    """Return an exponential average of a model, and of its normalisation."""
    if average is None:
        return copy.deepcopy(network)
    with torch.no_grad():
        for mine, other in zip(average.state_dict().values(), network.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(other, 0.1)
    return average


def bits(value):
    """Return what two values have in common that are the same, bit for bit and type for type."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            dense = value.dequantize() if value.is_quantized else value.to_dense()
            return type(value), value.layout, value.is_quantized, bits(dense)
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return type(value), value.dtype, tuple(value.shape), value.requires_grad, flat.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), value


def same(one, other):
    return bits(one) == bits(other)


# What `extra` was taken for


def test_large_tensors_of_extra_are_stored_as_differences(tmp_path):
    network, average = nn.Linear(4, 4), torch.randn(400, 400)
    with Saver(tmp_path / "a", network) as saver:
        for at in (1, 2):
            average[:5] += 1e-3
            saver.save(at, {"ema": {"w": average}})
        saver.restore()
        assert torch.equal(saver.extra["ema"]["w"], average)
    archive = Archive.open(tmp_path / "a")
    first, second = (archive.frame(info).entry("extra.ema.w@extra").nbytes for info in archive.frames)
    assert second < first / 10
    assert archive[2].spec("extra.ema.w@extra").role is TensorRole.EXTRA
    assert "extra.ema.w" not in archive[2].state_dict()


# Random states, schedulers, scalers


def test_random_states_of_python_and_numpy_can_be_set_again(tmp_path):
    bits_of = (np.random.PCG64(3), np.random.Philox(5), np.random.MT19937(6))
    extra = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "generators": [one.state for one in bits_of],
        "best": np.float64(0.25),
        "seen": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
    }
    with Saver(tmp_path / "a", nn.Linear(2, 2)) as saver:
        saver.save(1, extra)
        saver.restore()
    assert same(saver.extra, extra)
    random.setstate(saver.extra["python"])
    np.random.set_state(saver.extra["numpy"])
    (file,) = inshrink_core.restore(tmp_path / "a", tmp_path / "out", steps=[1]).paths
    assert torch.load(file, weights_only=True)["extra"]["numpy"][1].dtype is torch.uint32


def test_states_of_schedulers_and_of_a_scaler_can_be_loaded_again(tmp_path):
    network = model()
    optimizer = adam(network)
    lr = torch.optim.lr_scheduler
    parts = [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)]
    schedulers = {
        "multi": lr.MultiStepLR(optimizer, [2, 3, 3]),
        "lambda": lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "plateau": lr.ReduceLROnPlateau(optimizer),
        "sequence": lr.SequentialLR(optimizer, parts, milestones=[2]),
    }
    scaler = torch.amp.GradScaler("cpu")
    with Saver(tmp_path / "a", network, optimizer) as saver:
        train(network, optimizer, range(2))
        for one in schedulers.values():
            one.step(*([0.5] if isinstance(one, lr.ReduceLROnPlateau) else []))
        states = {name: one.state_dict() for name, one in schedulers.items()}
        saver.save(2, {"schedulers": states, "scaler": scaler.state_dict()})
        saver.restore()
        assert saver.extra == {"schedulers": states, "scaler": scaler.state_dict()}
        assert type(saver.extra["schedulers"]["multi"]["milestones"]) is collections.Counter


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: np.array(["a", "b"]), "ndarray"),
        (lambda: np.array([object()]), "ndarray"),
        (lambda: {np.float64(1): 2}, "float64"),
        (lambda: {1, torch.ones(2)}, "Tensor"),
        (lambda: 1 << 4000, "int"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "Tensor"),
        (lambda: ["x" * (20 << 20)] * 10, "MB of numbers and texts"),
        (lambda: collections.defaultdict(list), "defaultdict"),
        (lambda: Path("x"), "PosixPath"),
        (lambda: {"list": [object()]}, "object"),
    ],
)
def test_what_could_not_be_restored_is_refused_by_the_save(tmp_path, value, message):
    with Saver(tmp_path / "a", nn.Linear(2, 2)) as saver:
        with pytest.raises(InputError, match=message):
            saver.save(1, {"value": value()})
        with pytest.raises(InputError, match="the key 3"):
            saver.save(1, {3: 1})
        saver.save(1)
        assert saver.restore() == 1


def test_many_values_that_share_containers_are_restored(tmp_path):
    shared = [list(range(3000)) for _ in range(3)]
    extra = {str(i): [shared] * 50 for i in range(100)}
    with Saver(tmp_path / "a", nn.Linear(2, 2)) as saver:
        saver.save(1, extra)
        saver.restore()
        assert saver.extra == extra


# What is named: `also`


def gan():
    torch.manual_seed(1)
    network, critic = Net(), Net(64)
    return network, critic, average_of(network)


def test_further_models_and_optimizers_are_stored_as_the_first(tmp_path):
    network, critic, average = gan()
    optimizer, other = adam(network), sgd(critic)
    loose = torch.optim.SGD([network.first.bias], lr=1e-3, momentum=0.5)
    also = {"ema": average, "D": (critic, other), "bias": loose}
    with Saver(tmp_path / "a", network, optimizer, also=also) as saver:
        for at in (1, 2, 3):
            step(network, optimizer, loose, seed=at)
            step(critic, other, seed=at)
            saver.save(at)
        saved = copy.deepcopy((average.state_dict(), critic.state_dict(), other.state_dict()))
        step(critic, other, seed=4)
        assert saver.restore() == 3
    roles = {spec.key: spec.role for spec in Archive.open(tmp_path / "a")[3].specs}
    for name in ("", "ema.", "D."):
        assert roles[f"{name}first.weight"] is roles[f"{name}first.bias"] is TensorRole.WEIGHT
        assert roles[f"{name}centre"] is roles[f"{name}norm.running_mean"] is TensorRole.BUFFER
    # The second optimizer of the bias finds its name taken, and keeps its own.
    assert {f"D.{name}@momentum" for name, _ in critic.named_parameters()} <= roles.keys()
    assert {f"{name}@exp_avg" for name, _ in network.named_parameters()} <= roles.keys()
    momenta = [states["state"][0]["momentum_buffer"] for states in (saved[2], other.state_dict())]
    assert not torch.equal(*momenta)
    assert functional.cosine_similarity(*(one.flatten() for one in momenta), dim=0) > 0.8
    for before, after in zip(saved, (average.state_dict(), critic.state_dict()), strict=False):
        assert torch.equal(after["norm.num_batches_tracked"], before["norm.num_batches_tracked"])
        assert not torch.equal(after["first.weight"], before["first.weight"])
        torch.testing.assert_close(after["first.weight"], before["first.weight"], atol=0.05, rtol=0.1)


def test_eight_bit_state_as_bitsandbytes_keeps_it_is_exact_by_default(tmp_path):
    network = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for parameter in network.parameters():
        codes = torch.randint(0, 256, parameter.shape, dtype=torch.uint8)
        eight_bit = {"state1": codes, "qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.rand(16)}
        stored = {"state1": torch.randn(parameter.shape)}  # small tensors are not quantized
        optimizer.state[parameter] = {"step": 3, **(eight_bit if parameter.dim() > 1 else stored)}
    saved = copy.deepcopy(optimizer.state_dict())
    with Saver(tmp_path / "a", network, optimizer) as saver:
        saver.save(1)
        assert same(saver.read(1)["optimizer"]["state"], saved["state"])


@pytest.mark.parametrize(
    ("make", "moments"), [(adam, ("exp_avg", "exp_avg_sq")), (sgd, ("momentum_buffer",))]
)
def test_lost_tensors_come_back_with_their_moments_and_the_others_stay(tmp_path, make, moments):
    network, critic, average = gan()
    optimizer, other = adam(network), make(critic)
    also = {"ema": average, "D": (critic, other)}
    with Saver(tmp_path / "a", network, optimizer, codec="lossless", also=also) as saver:
        step(network, optimizer)
        step(critic, other)
        saver.save(1)
        lost, kept = critic.first.weight, critic.last.weight
        saved = [lost.detach().clone(), *(other.state[lost][moment].clone() for moment in moments)]
        step(critic, other, seed=1)
        live = [kept.detach().clone(), *(other.state[kept][moment].clone() for moment in moments)]
        with torch.no_grad():
            lost.fill_(torch.nan)
        for names, message in ((["E.first.weight"], r"no tensor 'E\.first"), ([], "no tensor")):
            with pytest.raises(InputError, match=message):
                saver.restore(partial=names)
        assert saver.restore(partial=["D.first.weight"]) == 1
    assert same(saved, [lost.detach(), *(other.state[lost][moment] for moment in moments)])
    assert same(live, [kept.detach(), *(other.state[kept][moment] for moment in moments)])


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ({"scheduler": object()}, "neither a model nor an optimizer"),
        ({"": nn.Linear(2, 2)}, "not a valid"),
        ({"a/b": nn.Linear(2, 2)}, "not a valid"),
        ({"extra": nn.Linear(2, 2)}, "not a valid"),
        ({"D": (nn.Linear(2, 2), None)}, "neither a model nor an optimizer"),
        ({"first": nn.Linear(2, 2)}, "called 'first.weight', as another model's"),
    ],
)
def test_what_is_no_model_is_refused_when_the_saver_is_made(tmp_path, also, message):
    with pytest.raises(InputError, match=message):
        Saver(tmp_path / "a", Net(), also=also)
    with pytest.raises(InputError, match="also="):
        Saver(tmp_path / "a", Net(), {"a": adam(Net())})
    assert not (tmp_path / "a").exists()


def test_what_was_not_saved_of_a_further_model_is_named_and_nothing_is_changed(tmp_path):
    network, critic, _ = gan()
    with Saver(tmp_path / "a", network) as saver:
        saver.save(1)
    before = copy.deepcopy((network.state_dict(), critic.state_dict()))
    with Saver(tmp_path / "a", network, also={"D": critic}) as saver:
        with torch.no_grad():
            network.first.weight.add_(1)
        changed = network.first.weight.detach().clone()
        with pytest.raises(InputError, match="nothing was saved of also"):
            saver.restore()
    assert torch.equal(network.first.weight, changed)
    assert same(critic.state_dict(), before[1])


def test_one_optimizer_of_a_list_is_not_the_list(tmp_path):
    network = Net()
    present = [adam(network.first), sgd(network.last)]
    with Saver(tmp_path / "a", network, present, optimizer_state="exact") as saver:
        step(network, *present)
        saver.save(1)
    with (
        Saver(tmp_path / "a", network, present[0]) as saver,
        pytest.raises(InputError, match="not the one that was saved"),
    ):
        saver.restore()


# Wrappers


class Wrapped(nn.Module):
    """As DistributedDataParallel: the model is its `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(network):
    return torch.compile(network, backend="eager")


@pytest.mark.parametrize("wrap", [Wrapped, compiled, lambda one: Wrapped(compiled(one))])
@pytest.mark.parametrize("is_first", [True, False])
def test_wrappers_may_come_and_go_between_save_and_restore(tmp_path, wrap, is_first):
    network, average = Net(), Net()
    optimizer = adam(network)
    step(network, optimizer)
    saved, other = (wrap, lambda one: one) if is_first else (lambda one: one, wrap)
    also = {"ema": saved(average)}
    with Saver(tmp_path / "a", saved(network), optimizer, codec="lossless", also=also) as saver:
        saver.save(1)
    assert "first.weight" in Archive.open(tmp_path / "a")[1]
    assert "ema.first.weight" in Archive.open(tmp_path / "a")[1]
    fresh, fresh_average = Net(), Net()
    fresh_optimizer = adam(fresh)
    also = {"ema": other(fresh_average)}
    with Saver(tmp_path / "a", other(fresh), fresh_optimizer, also=also) as saver:
        assert saver.restore() == 1
        assert same(fresh_optimizer.state_dict(), optimizer.state_dict())
        name = next(name for name in other(fresh).state_dict() if name.endswith("first.weight"))
        with torch.no_grad():
            fresh.first.weight.zero_()
        saver.restore(partial=[name])
    assert same(fresh.state_dict(), network.state_dict())
    assert same(fresh_average.state_dict(), average.state_dict())


# Every save that returns can be restored

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 2038), max_value=1 << 2038),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])]),
)
dtypes = st.sampled_from(
    ["float64", "float32", "bfloat16", "float16", "complex64", "int64", "uint8", "uint32", "bool"]
).map(lambda name: getattr(torch, name))


@st.composite
def tensors(draw):
    shape = draw(st.sampled_from([(), (0,), (3,), (64, 96), (5, 1000), (2, 3, 4)]))
    dtype, seed = draw(dtypes), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return raw[..., 0] > 127
    value = raw.reshape(-1).view(dtype)[: max(1, int(np.prod(shape)))]
    value = value[: int(np.prod(shape))].reshape(shape)
    how = draw(st.sampled_from(["as it is", "strided", "expanded", "parameter", "grown", "sparse", "conj"]))
    if how == "strided" and value.dim() == 2:
        return value.t()[1:]
    if how == "expanded" and value.dim() == 1 and len(value):
        return value[:1].expand(70_000)
    if how == "parameter" and value.is_floating_point():
        return nn.Parameter(value)
    if how == "grown" and value.is_floating_point():
        value.note = object()  # attributes are no values
        return value
    if how == "sparse" and dtype is torch.float32 and value.dim() == 2:
        return (value > 0).float().to_sparse()
    return value.conj() if how == "conj" and dtype is torch.complex64 else value


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(["f8", "f4", "f2", "u4", "i8", "u2", "?", "c16"]))
    array = np.arange(draw(st.integers(0, 5000)), dtype="i8").astype(dtype)
    return draw(st.sampled_from([array, array[::-2], np.array(3, array.dtype), array.dtype.type(3)]))


keys = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["model", "state", "param_groups", "exp_avg", "ema.fc", "ema", "fc", "@", "optimizer"]),
)
values = st.recursive(
    plain | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys | st.integers() | st.tuples(st.integers(), keys), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, min_size=1, max_size=2).map(lambda items: [items, items])
    ),
    max_leaves=10,
)
PEOPLE = st.sets(st.sampled_from(["ema", "D", "second", "list"]))


def checked(network):
    return functional.cross_entropy(network(torch.linspace(-1, 1, 128).reshape(16, 8)), torch.arange(16) % 4)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # making a counterexample smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    extras=st.lists(st.dictionaries(keys, values, max_size=4), min_size=2, max_size=3),
    codec=st.sampled_from([None, "lossless", "inshrinkerator", "excp"]),
    mode=st.sampled_from(MODES),
    waits=st.booleans(),
    with_check=st.booleans(),
    people=PEOPLE,
)
def test_every_save_that_returns_can_be_restored(
    tmp_path_factory, extras, codec, mode, waits, with_check, people
):
    path = tmp_path_factory.mktemp("run") / "run.inshrink"
    network, critic, average = gan()
    optimizer, other = adam(network), sgd(critic)
    second = torch.optim.RMSprop([network.norm.weight], lr=1e-3)
    named = {"ema": average, "D": (critic, other), "second": second}
    options = {"codec": codec, "optimizer_state": mode}
    if with_check and codec != "lossless":
        options["check"] = checked
    present = [optimizer, second] if "list" in people else optimizer
    also = {name: named[name] for name in sorted(people - {"list"})}
    models = [network, *([average] if "ema" in people else []), *([critic] if "D" in people else [])]
    optimizers = [optimizer, *([other] if "D" in people else []), *([second] if "list" in people else [])]
    originals = {}
    with Saver(path, network, present, also=also, **options) as saver:
        for at, extra in enumerate(extras):
            step(network, optimizer, second, seed=at)
            step(critic, other, seed=at)
            average_of(network, average)
            saved = copy.deepcopy([[one.state_dict() for one in group] for group in (models, optimizers)])
            live = {"best": network.state_dict(), "moments": optimizer.state_dict()}
            live["rows"], live["numpy"] = network.first.weight.detach()[3:], network.centre.numpy()
            full = extra | {"live": live}
            originals[at] = (extra | {"live": copy.deepcopy(live)}, saved)
            saver.save(at, full, wait=waits)
        step(network, optimizer, second, seed=99)
        for at, (extra, (model_states, optimizer_states)) in originals.items():
            assert saver.restore(at) == at
            assert [*saver.extra] == [*extra]
            for key, value in extra.items():
                assert same(saver.extra[key], without_attributes(value)), key
            if codec == "lossless":
                assert same([one.state_dict() for one in models], model_states)
            if mode == "exact" and codec != "excp":  # which stores moments itself
                assert same([one.state_dict() for one in optimizers], optimizer_states)
            assert not (mode == "drop" and any(one.state for one in optimizers))
            out = path.parent / f"out-{at}"
            (file,) = inshrink_core.restore(path, out, steps=[at]).paths
            content = torch.load(file, weights_only=True)
            assert ("optimizer" in content) == (mode != "drop")
            assert {*content} <= {"model", "optimizer", "step", "also", "extra", "inshrink"}
            assert {*content.get("also", {})} >= set(also) - {"second"}
    assert inshrink_core.verify(path, deep=True).ok


def without_attributes(value):
    """Return values as they come back: parameters as tensors, and nothing but values of these."""
    if isinstance(value, dict):
        like = copy.copy(value)
        like.update((key, without_attributes(item)) for key, item in value.items())
        return like
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_attributes, value)) if type(value) in (list, tuple) else value
    return value.detach() if isinstance(value, torch.Tensor) else value
