"""Tasks of other kinds: each is restored without a trace, and has the layers it is there for."""

from __future__ import annotations

import pytest
import torch

import inshrink_core
from inshrink_core.checkpoint import LayerType, classify_layer
from inshrink_core.training.tasks import digits, find_task
from inshrink_core.training.tasks.digits import distorted, held_out_views, split_digits
from inshrink_core.training.tasks.digits_resnet import ResidualBlock

KINDS = ("char-rnn", "digits-resnet", "digits-vit", "denoise")


@pytest.mark.parametrize("name", KINDS)
def test_restored_without_loss_it_ends_where_the_uninterrupted_one_does(name, tmp_path):
    result = inshrink_core.rehearse(name, tmp_path, codec="lossless", steps=4, saves=4, restores=2, seeds=1)
    (before,), (after,) = result.uninterrupted, result.restored
    assert before.metrics == after.metrics
    assert before.train_losses == after.train_losses


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_is_the_same_training_again_and_another_is_another(name, tmp_path):
    options = {"codec": "lossless", "steps": 3, "saves": 3, "restores": 0}
    one = inshrink_core.rehearse(name, tmp_path / "one", seeds=2, **options).uninterrupted
    same = inshrink_core.rehearse(name, tmp_path / "same", seeds=1, **options).uninterrupted
    assert one[0].metrics == same[0].metrics
    assert one[0].metrics != one[1].metrics


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("char-rnn", {LayerType.EMBEDDING, LayerType.LINEAR, LayerType.VECTOR}),
        ("digits-resnet", {LayerType.CONVOLUTION, LayerType.LINEAR, LayerType.VECTOR}),
        ("digits-vit", {LayerType.EMBEDDING, LayerType.ATTENTION, LayerType.LINEAR, LayerType.VECTOR}),
        ("denoise", {LayerType.CONVOLUTION, LayerType.LINEAR, LayerType.VECTOR}),
    ],
)
def test_a_task_has_the_layers_it_is_there_for(name, expected):
    task, _ = find_task(name)
    parameters = task.build().named_parameters()
    assert {classify_layer(name, tuple(parameter.shape)) for name, parameter in parameters} == expected


def test_a_distortion_moves_every_image_by_its_own_little():
    images, _, _, _ = split_digits()
    same = images[:1].repeat(50, 1, 1, 1)
    seen = distorted(same, torch.Generator().manual_seed(0))
    assert seen.shape == same.shape
    assert len({view.numpy().tobytes() for view in seen}) == 50
    assert 0.02 < (seen - same).square().mean() < (same - same.mean()).square().mean()
    assert torch.equal(seen, distorted(same, torch.Generator().manual_seed(0)))


def test_a_distortion_of_nothing_is_the_image_itself(monkeypatch):
    for name in ("_MAX_ANGLE", "_MAX_STRETCH", "_MAX_SHIFT"):
        monkeypatch.setattr(digits, name, 0.0)
    images, _, _, _ = split_digits()
    torch.testing.assert_close(distorted(images[:9], torch.Generator()), images[:9])


def test_held_out_views_are_of_digits_that_are_never_trained_on():
    images, _, held, labels = split_digits()
    views, of = held_out_views()
    assert len(views) == len(of) == 4 * len(held)
    assert torch.equal(of[: len(held)], labels)
    trained = {image.numpy().tobytes() for image in images}
    # A few digits of the set are there twice.
    assert sum(image.numpy().tobytes() in trained for image in held) < 3


def test_a_residual_block_without_its_convolutions_is_its_input():
    block = ResidualBlock(4, 4)
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), x)
    assert ResidualBlock(4, 8)(x).shape == (2, 8, 4, 4)


def test_a_vision_transformer_sees_every_patch_from_every_other():
    task, _ = find_task("digits-vit")
    model = task.build()
    images = torch.zeros(2, 1, 8, 8)
    images[1, 0, 7, 7] = 1.0
    first = model.blocks[0](model.patch_embed(patches(images)) + model.pos_embed)
    assert not torch.equal(first[0, 0], first[1, 0])


def patches(images):
    return torch.nn.functional.unfold(images, 2, stride=2).transpose(1, 2)


def test_a_denoiser_that_finds_nothing_is_at_one_and_training_takes_it_below():
    task, _ = find_task("denoise")
    torch.manual_seed(0)
    model = task.build()
    optimizer = task.optimizer(model)
    with torch.no_grad():
        model.conv_out.weight.zero_()
        model.conv_out.bias.zero_()
    assert task.evaluate(model) == pytest.approx(1.0, abs=0.02)
    for step in range(1, 21):
        loss = task.loss(model, task.batch(step, torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task.evaluate(model) < 0.8
