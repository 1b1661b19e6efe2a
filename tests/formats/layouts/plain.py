"""Single files that training scripts write: how names number them, and what else is beside them."""

import torch

from tests.formats.layouts.builders import (
    GPT,
    NET,
    OF_GPT_ADAM,
    OF_NET,
    OF_NET_ADAM,
    OF_NET_SGD,
    OF_TWO_GPT_ADAM,
    adam,
    average,
    copy,
    gpt,
    half,
    net,
    numel,
    random_states,
    save,
    save_tensors,
    sgd,
    write_text,
)
from tests.formats.layouts.layout import layout

_SCRIPT = "a training script"


@layout(_SCRIPT, steps=(5, 20, 100), **OF_NET_ADAM)
def steps_and_state(folder, step):
    state = {"model": net(step), "optimizer": adam(NET, step), "step": step, "rng": random_states(step)}
    save(folder / f"ckpt_{step}.pt", state)


@layout(_SCRIPT, steps=(100, 200, 1000), parameters=numel(GPT))
def zero_padded(folder, step):
    save(folder / f"model_{step:06}.pt", gpt(step))


@layout(_SCRIPT, steps=(1, 2, 10), **OF_NET_SGD)
def epochs(folder, epoch):
    state = {"epoch": epoch, "model_state_dict": net(epoch), "optimizer_state_dict": sgd(NET, epoch)}
    save(folder / f"epoch_{epoch}.pth", state | {"loss": 1 / epoch})


@layout(_SCRIPT, steps=(1, 2, 3), **OF_NET, duplicates=("model.pth",))
def model_beside_epochs(folder):
    for epoch in (1, 2, 3):
        save(folder / f"epoch_{epoch}.pth", net(epoch))
    copy(folder / "epoch_3.pth", folder / "model.pth")


@layout(_SCRIPT, steps=(1, 2, 3), parameters=numel(NET), beside=("optimizer.pth",))
def optimizer_beside_epochs(folder):
    for epoch in (1, 2, 3):
        save(
            folder / f"epoch_{epoch}.pth", {name: value for name, value in net(epoch).items() if name in NET}
        )
    save(folder / "optimizer.pth", adam(NET, 3))
    save(folder / "grad_scaler.pt", {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3})


@layout(_SCRIPT, steps=(1, 2), **OF_NET, branches={"final": ("final.pth",)})
def final_in_half_precision(folder):
    for epoch in (1, 2):
        save(folder / f"epoch_{epoch}.pth", net(epoch))
    save(folder / "final.pth", half(net(2)))


@layout(_SCRIPT, steps=(9,), **OF_NET_ADAM, branches={"optimal": ("optimal.pth",)})
def last_and_optimal(folder):
    save(folder / "checkpoint.pt", {"net": net(9), "optim": adam(NET, 9), "epoch": 9})
    save(folder / "optimal.pth", {"net": net(4), "optim": adam(NET, 4), "epoch": 4})


@layout(_SCRIPT, steps=(100, 200), **OF_GPT_ADAM)
def pairs_of_model_and_optimizer(folder, step):
    save(folder / f"model_{step:06}.pt", gpt(step))
    save(folder / f"optimizer_{step:06}.pt", adam(GPT, step))


@layout(
    _SCRIPT,
    *("model_500k.pt", "model_900k.pt", "model_1M.pt", "model_1.5M.pt"),
    steps=(500_000, 900_000, 1_000_000, 1_500_000),
    **OF_NET,
)
def thousands_and_millions(folder):
    for name, step in (("500k", 500_000), ("900k", 900_000), ("1M", 1_000_000), ("1.5M", 1_500_000)):
        save(folder / f"model_{name}.pt", net(step))


@layout(
    _SCRIPT,
    *("ckpt_2e4.pt", "ckpt_1e5.pt", "ckpt_1.5e6.pt"),
    steps=(20_000, 100_000, 1_500_000),
    parameters=numel(GPT),
)
def scientific_notation(folder):
    for name, step in (("2e4", 20_000), ("1e5", 100_000), ("1.5e6", 1_500_000)):
        save(folder / f"ckpt_{name}.pt", gpt(step))


_TIMES = ("2024-05-12_13-45-50", "2024-05-12_13-46-10", "2024-05-13_09-07-05", "2024-06-01_00-00-00")


@layout(_SCRIPT, order=tuple(f"model_{time}.pt" for time in _TIMES), **OF_NET)
def dates_and_times(folder):
    for n, time in enumerate(_TIMES):
        save(folder / f"model_{time}.pt", net(n))


@layout(
    "Hydra", order=("2024-05-12/23-45-50/model.pt", "2024-05-13/08-01-00/model.pt"), parameters=numel(GPT)
)
def folders_of_dates(folder):
    for n, name in enumerate(("2024-05-12/23-45-50", "2024-05-13/08-01-00")):
        save(folder / name / "model.pt", gpt(n))
        write_text(folder / name / ".hydra/config.yaml", "lr: 0.1\n")


@layout(
    "TensorBoard's names", order=("Feb01_00-10-00/model.pt", "Feb01_09-58-30/model.pt"), parameters=numel(GPT)
)
def folders_of_times(folder):
    for n, name in enumerate(("Feb01_00-10-00", "Feb01_09-58-30")):
        save(folder / name / "model.pt", gpt(n))


@layout(_SCRIPT, steps=(7, 8, 10), **OF_NET)
def metric_in_the_name(folder):
    for epoch, accuracy in ((7, "0.91"), (8, "0.90"), (10, "0.93")):
        save(folder / f"model_ep{epoch:02}_acc{accuracy}.pt", net(epoch))


@layout("Keras' names", steps=(3, 10, 20), **OF_NET)
def metric_without_a_word(folder):
    for epoch, loss in ((3, "0.52"), (10, "0.31"), (20, "0.07")):
        save(folder / f"weights.{epoch:02}-{loss}.pt", net(epoch))


_RESTARTED = ("e0_s500", "e0_s1000", "e1_s500", "e1_s1000")


@layout(_SCRIPT, order=tuple(f"ckpt_{name}.pt" for name in _RESTARTED), parameters=numel(GPT))
def counter_that_restarts(folder):
    for n, name in enumerate(_RESTARTED):
        save(folder / f"ckpt_{name}.pt", gpt(n))


@layout(_SCRIPT, steps=(100, 200), **OF_TWO_GPT_ADAM)
def ranks(folder, step):
    for rank in (0, 1):
        state = {"model": gpt(step, rank), "optimizer": adam(GPT, step), "step": step}
        save(folder / f"ckpt_{step}_rank{rank}.pt", state)


@layout(
    _SCRIPT,
    order=("seed_0/epoch_1.pt", "seed_0/epoch_2.pt", "seed_1/epoch_1.pt", "seed_1/epoch_2.pt"),
    **OF_NET,
)
def seeds(folder):
    for seed in (0, 1):
        for epoch in (1, 2):
            save(folder / f"seed_{seed}/epoch_{epoch}.pt", net(epoch, seed))


@layout(_SCRIPT, steps=(1, 2), **OF_NET, other_models=("pretrained/backbone.pth",))
def pretrained_beside(folder):
    for epoch in (1, 2):
        save(folder / f"epoch_{epoch}.pth", net(epoch))
    save(folder / "pretrained/backbone.pth", gpt(0, prefix="backbone."))


@layout("a training that was killed while it saved", steps=(1, 2), **OF_NET, left_out=("epoch_3.pth",))
def cut_off(folder):
    for epoch in (1, 2, 3):
        save(folder / f"epoch_{epoch}.pth", net(epoch))
    written = (folder / "epoch_3.pth").read_bytes()
    (folder / "epoch_3.pth").write_bytes(written[: len(written) // 2])


@layout("safetensors", steps=(100, 200), parameters=numel(GPT))
def safetensors_files(folder, step):
    save_tensors(folder / f"step_{step}.safetensors", gpt(step))


@layout("nanoGPT", steps=(5000,), **OF_GPT_ADAM)
def nanogpt(folder):
    state = {"model": gpt(5000, prefix="_orig_mod."), "optimizer": adam(GPT, 5000), "iter_num": 5000}
    arguments = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 8, "bias": False, "vocab_size": 7}
    save(folder / "ckpt.pt", state | {"model_args": arguments, "best_val_loss": 1.5, "config": {"lr": 6e-4}})


@layout("torch.optim.swa_utils", steps=(1, 2), **OF_NET_SGD, models=("averaged_model",))
def averaged_model(folder, epoch):
    averaged = {"n_averaged": torch.tensor(epoch)}
    averaged |= {f"module.{name}": value for name, value in average(net(epoch)).items()}
    state = {"model": net(epoch), "averaged_model": averaged, "optimizer": sgd(NET, epoch)}
    save(folder / f"swa_{epoch}.pt", state | {"epoch": epoch})


@layout("PyTorch's ImageNet example", steps=(9,), **OF_NET_SGD, branches={"best": ("model_best.pth.tar",)})
def imagenet_example(folder):
    for name, epoch in (("checkpoint", 9), ("model_best", 6)):
        state = {"epoch": epoch, "arch": "resnet18", "state_dict": net(epoch, prefix="module.")}
        save(folder / f"{name}.pth.tar", state | {"best_acc1": 71.2, "optimizer": sgd(NET, epoch)})
