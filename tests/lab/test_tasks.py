"""Shipped tasks keep the promises of the protocol; a user's task is checked as a whole."""

import builtins

import pytest
import torch

from inshrink_core import plugins
from inshrink_core.errors import InputError, MissingExtraError, NotFoundError
from inshrink_core.metrics import Direction
from inshrink_lab.tasks import digits, digits_cnn
from inshrink_lab.tasks.task import Task, find_task, task_names


def first(batch):
    return batch[0] if isinstance(batch, tuple) else batch


@pytest.mark.parametrize("name", task_names())
def test_a_shipped_task_is_small_repeatable_and_trains(name):
    task, identity = find_task(name)
    assert isinstance(task, Task)
    assert task.name == name
    assert identity == f"{name}/{task.version}"
    assert Direction(task.direction) is Direction.LOWER
    assert (task.n_saves, task.n_restores) == (20, 9)
    torch.manual_seed(0)
    network = task.build()
    assert sum(parameter.numel() for parameter in network.parameters()) <= 1_000_000
    entry, same, other = (task.batch(step, torch.Generator().manual_seed(step)) for step in (1, 1, 2))
    assert torch.equal(first(entry), first(same))
    assert not torch.equal(first(entry), first(other))
    optimizer = task.optimizer(network)
    before = task.loss(network, entry).item()
    peak = optimizer.param_groups[0]["lr"]
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = peak * task.learning_rate_factor(step, task.n_steps)
        loss = task.loss(network, entry)
        optimizer.zero_grad()
        loss.backward()
        if task.max_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), task.max_gradient_norm)
        optimizer.step()
    assert task.loss(network, entry).item() < before


@pytest.mark.parametrize("name", ["digits-cnn", "digits-resnet", "denoise"])
def test_evaluation_leaves_the_model_as_it_was_and_repeats_itself(name):
    task, _ = find_task(name)
    network = task.build()
    buffers = [buffer.clone() for buffer in network.buffers()]
    assert task.evaluate(network) == task.evaluate(network)
    assert network.training
    assert all(torch.equal(entry, other) for entry, other in zip(buffers, network.buffers(), strict=True))


def test_the_data_of_a_task_are_on_the_cpu_whichever_device_is_the_default():
    from inshrink_lab.tasks.characters import encode_corpus

    encode_corpus.cache_clear()
    with torch.device("meta"):
        training, *_ = encode_corpus()
    assert training.device.type == "cpu"


def test_the_char_gpt_is_judged_on_text_it_never_trains_on():
    from inshrink_lab.tasks.characters import corpus, encode_corpus

    training, validation, n_characters = encode_corpus()
    assert len(training) + len(validation) == len(corpus())
    assert len(validation) == pytest.approx(len(corpus()) / 10, abs=1)
    assert int(training.max()) < n_characters


@pytest.mark.parametrize("name", ["char-gpt", "char-moe"])
def test_a_character_model_does_not_see_what_it_is_to_predict(name):
    task, _ = find_task(name)
    torch.manual_seed(0)
    network = task.build()
    tokens, _ = task.batch(1, torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 50
    with torch.no_grad():
        before, after = network(tokens), network(changed)
    # An expert is sent other places, and other products of matrices have other last bits.
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])


@pytest.mark.parametrize("name", ["digits-cnn", "digits-resnet", "digits-vit", "denoise"])
def test_without_scikit_learn_the_digits_name_the_extra(name, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    digits.split_digits.cache_clear()
    task, _ = find_task(name)
    with pytest.raises(MissingExtraError, match=r"inshrink\[dev\]"):
        task.batch(1, torch.Generator())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x = 1", NotFoundError, "no class 'Mine'"),
        ("class Mine: pass", InputError, r"lacks name, .*build\(\), "),
        ("class Mine:\n def __init__(self): raise ValueError('no data')", InputError, "no data"),
        ("1 / 0", InputError, "ZeroDivisionError"),
        ("def (", InputError, "SyntaxError"),
    ],
)
def test_a_task_of_a_user_that_is_none_is_refused_with_what_is_missing(tmp_path, text, error, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(error, match=message):
        find_task(f"{path}:Mine")


@pytest.mark.parametrize("name", ["no-such-task", "missing.py:Mine", "mine.txt:Mine", ":", ""])
def test_an_unknown_task_is_refused_with_what_there_is(name):
    with pytest.raises(NotFoundError):
        find_task(name)


class Added(digits_cnn.DigitsCNNTask):
    name = "added"


@pytest.fixture
def installed(monkeypatch):
    """Install a distribution that registers tasks."""

    def install(*points):
        from importlib.metadata import EntryPoint

        group = "inshrink.tasks"
        found = [EntryPoint(name=name, value=value, group=group) for name, value in points]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        plugins.plugins.cache_clear()

    yield install
    plugins.plugins.cache_clear()


def test_a_task_of_another_distribution_is_found_by_its_entry_point(installed, monkeypatch):
    monkeypatch.setattr(digits_cnn, "Added", Added, raising=False)
    module = "inshrink_lab.tasks.digits_cnn"
    installed(("added", f"{module}:Added"), ("digits-cnn", f"{module}:Added"))
    assert task_names()[-1] == "added"
    assert task_names().count("digits-cnn") == 1
    assert find_task("added")[1] == "added/1"
    assert find_task("digits-cnn")[0].name == "digits-cnn"


def test_an_entry_point_that_is_no_task_is_told_what_it_lacks(installed):
    installed(("half", "fractions:Fraction"))
    with pytest.raises(InputError, match=r"it lacks .*build\(\)"):
        find_task("half")
