"""Tasks of other kinds: each is restored without a trace, and has the layers it is there for."""

import pytest
import torch

import inshrink_lab
from inshrink_core.errors import NotFoundError
from inshrink_lab.tasks import char_finetune
from inshrink_lab.tasks.char_finetune import PretrainingTask, encode_sources, pretrained
from inshrink_lab.tasks.characters import encode_corpus
from inshrink_lab.tasks.digits import held_out_views, split_digits
from inshrink_lab.tasks.task import find_task

KINDS = (
    *("digits-cnn", "digits-resnet", "digits-vit", "denoise"),
    *("char-finetune", "char-lora", "char-moe", "regression"),
)


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_is_the_same_training_again_when_it_is_restored_without_loss(name, tmp_path, monkeypatch):
    task, _ = find_task(name)
    if hasattr(task, "n_validation_windows"):
        monkeypatch.setattr(type(task), "n_validation_windows", 8)
    result = inshrink_lab.rehearse(name, tmp_path, codec="lossless", steps=2, saves=2, restores=1, seeds=1)
    (before,), (after,) = result.uninterrupted, result.restored
    assert before.metrics == after.metrics
    assert before.train_losses == after.train_losses


def test_held_out_views_are_of_digits_that_are_never_trained_on():
    images, _, present, labels = split_digits()
    views, of = held_out_views()
    assert len(views) == len(of) == 4 * len(present)
    assert torch.equal(of[: len(present)], labels)
    trained = {image.numpy().tobytes() for image in images}
    # A few digits of the set are there twice.
    assert sum(image.numpy().tobytes() in trained for image in present) < 3


def test_pretraining_draws_no_random_numbers_of_the_caller_and_is_the_same_on_any_number_of_threads():
    def built_and_drawn(build):
        torch.manual_seed(0)
        return build(), torch.rand(3)

    threads = torch.get_num_threads()
    char_finetune._pretrained_state.cache_clear()
    entry, drawn = built_and_drawn(lambda: pretrained(2))
    _, of_a_model_alone = built_and_drawn(PretrainingTask().build)
    _, the_second_time = built_and_drawn(lambda: pretrained(2))
    assert torch.equal(drawn, of_a_model_alone)
    assert torch.equal(drawn, the_second_time)
    assert torch.get_num_threads() == threads
    char_finetune._pretrained_state.cache_clear()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        other = pretrained(2)
    finally:
        torch.set_num_threads(threads)
    for first, second in zip(entry.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)


def test_the_sources_are_other_text_in_the_same_alphabet_a_tenth_of_it_held_out():
    training, validation = encode_sources()
    _, _, n_characters = encode_corpus()
    assert 0 <= int(training.min()) <= int(training.max()) < n_characters
    assert len(validation) == pytest.approx((len(training) + len(validation)) / 10, rel=0.01)


def test_without_the_sources_of_the_library_the_error_says_so(monkeypatch):
    encode_sources.cache_clear()
    monkeypatch.setattr(char_finetune, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match="'_pydecimal' is not installed"):
        find_task("char-finetune")[0].batch(1, torch.Generator())


def test_only_adapters_are_trained_and_saved_and_at_first_they_change_nothing():
    task, _ = find_task("char-lora")
    model = task.build()
    names = {name for name, _ in model.named_parameters()}
    assert set(model.state_dict()) == names
    assert len(names) == 2 * 4 * 3
    assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b"}
    tokens, _ = task.batch(1, torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), pretrained(3)(tokens))
