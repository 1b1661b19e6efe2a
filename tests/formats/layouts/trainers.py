"""Trainers: Lightning, Hugging Face and what is built upon them, NeMo, fairseq and their like."""

import json
from argparse import Namespace

import torch

from tests.formats.layouts.builders import (
    CRITIC,
    GPT,
    NET,
    OF_BOTH_ADAM,
    OF_GPT_ADAM,
    OF_NET_ADAM,
    adam,
    average,
    copy,
    critic,
    gpt,
    half,
    net,
    numel,
    random_states,
    save,
    save_sharded,
    save_tensors,
    values,
    write_text,
)
from tests.formats.layouts.layout import ADAM, WEIGHTS, layout

# Lightning


def _lightning(step, epoch, state_dict=None):
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": net(step, prefix="model.") if state_dict is None else state_dict,
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": epoch, "completed": epoch}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [adam(NET, step)],
        "lr_schedulers": [{"last_epoch": epoch, "_last_lr": [1e-3]}],
    }


@layout(
    "Lightning",
    steps=(100, 200),
    duplicates=("lightning_logs/version_0/checkpoints/last.ckpt",),
    **OF_NET_ADAM,
)
def lightning(folder):
    inner = folder / "lightning_logs/version_0/checkpoints"
    for epoch in (0, 1):
        save(inner / f"epoch={epoch}-step={100 * epoch + 100}.ckpt", _lightning(100 * epoch + 100, epoch))
    copy(inner / "epoch=1-step=200.ckpt", inner / "last.ckpt")
    write_text(inner.parent / "hparams.yaml", "lr: 0.001\n")
    write_text(inner.parent / "metrics.csv", "step,loss\n100,0.5\n200,0.4\n")


@layout("Lightning, `{epoch}-{val/loss}`", steps=(100, 200, 300), **OF_NET_ADAM)
def lightning_metric_in_a_folder(folder):
    inner = folder / "lightning_logs/version_0/checkpoints"
    for epoch, name in enumerate(
        ("epoch=0.ckpt", "epoch=1-val/loss=0.50.ckpt", "epoch=2-val/loss=0.40.ckpt")
    ):
        save(inner / name, _lightning(100 * epoch + 100, epoch))


@layout("Lightning, resumed", steps=(100, 200, 300), **OF_NET_ADAM)
def lightning_versions(folder):
    for n in range(3):
        name = f"version_{n}/checkpoints/epoch={n}-step={100 * n + 100}.ckpt"
        save(folder / name, _lightning(100 * n + 100, n))


@layout(
    "Lightning, begun again",
    order=(
        "version_0/checkpoints/epoch=0-step=100.ckpt",
        "version_0/checkpoints/epoch=1-step=200.ckpt",
        "version_1/checkpoints/epoch=0-step=100.ckpt",
    ),
    **OF_NET_ADAM,
)
def lightning_begun_again(folder):
    for version, epoch in ((0, 0), (0, 1), (1, 0)):
        step = 100 * epoch + 100
        state = _lightning(step, epoch, net(step + version, prefix="model."))
        save(folder / f"version_{version}/checkpoints/epoch={epoch}-step={step}.ckpt", state)


@layout(
    "Lightning, `save_last` twice", steps=(100, 200), duplicates=("last.ckpt", "last-v1.ckpt"), **OF_NET_ADAM
)
def lightning_last_v1(folder):
    for epoch, last in ((0, "last.ckpt"), (1, "last-v1.ckpt")):
        path = folder / f"epoch={epoch}-step={100 * epoch + 100}.ckpt"
        save(path, _lightning(100 * epoch + 100, epoch))
        copy(path, folder / last)


@layout("latent diffusion", steps=(999, 1500), **OF_NET_ADAM, branches={"last": ("checkpoints/last.ckpt",)})
def latent_diffusion(folder):
    def state(step, epoch):
        # Names of the average have no dots, and buffers of the network have no average.
        counts = {"model_ema.decay": torch.tensor(0.9999), "model_ema.num_updates": torch.tensor(step)}
        model = net(step, prefix="model.")
        moving = average(values(NET, step))
        ema = {f"model_ema.{name.replace('.', '')}": value for name, value in moving.items()}
        return _lightning(step, epoch, model | counts | ema)

    inner = folder / "checkpoints"
    save(inner / "trainstep_checkpoints/epoch=000000-step=000000999.ckpt", state(999, 0))
    save(inner / "epoch=000001.ckpt", state(1500, 1))
    save(inner / "last.ckpt", state(1700, 1))


@layout(
    "NeMo",
    steps=(1000, 2000),
    duplicates=("gpt--val_loss=2.11-step=2000-consumed_samples=128000.0-last.ckpt",),
    **OF_NET_ADAM,
)
def nemo(folder):
    names = [
        f"gpt--val_loss={v}-step={s}-consumed_samples={64 * s}.0" for v, s in ((2.31, 1000), (2.11, 2000))
    ]
    for epoch, name in enumerate(names):
        save(folder / f"{name}.ckpt", _lightning(1000 * epoch + 1000, epoch))
    copy(folder / f"{names[1]}.ckpt", folder / f"{names[1]}-last.ckpt")


@layout("MLflow with Lightning", steps=(100, 200), **OF_NET_ADAM)
def mlflow(folder):
    for epoch in (0, 1):
        name = f"epoch={epoch}-step={100 * epoch + 100}"
        inner = folder / "mlruns/0/3f2a/artifacts/model/checkpoints" / name
        save(inner / f"{name}.ckpt", _lightning(100 * epoch + 100, epoch))
        write_text(inner / "metadata.yaml", "score: 0.5\n")


# Hugging Face


def _trainer(folder, step):
    """Write what transformers' trainer has beside the weights."""
    save(folder / "scheduler.pt", {"last_epoch": step, "_last_lr": [1e-3]})
    save(folder / "rng_state.pth", random_states(step))
    save(folder / "training_args.bin", Namespace(learning_rate=1e-3, output_dir="out"))
    history = [{"step": step, "loss": 1 / step, "epoch": step / 100}]
    state = {"global_step": step, "epoch": step / 100, "log_history": history}
    write_text(folder / "trainer_state.json", json.dumps(state))
    write_text(folder / "config.json", json.dumps({"model_type": "none"}))


@layout("transformers", steps=(500, 1000), duplicates=("model.safetensors",), **OF_GPT_ADAM)
def transformers(folder):
    for step in (500, 1000):
        inner = folder / f"checkpoint-{step}"
        save_tensors(inner / "model.safetensors", gpt(step))
        save(inner / "optimizer.pt", adam(GPT, step))
        _trainer(inner, step)
    copy(inner / "model.safetensors", folder / "model.safetensors")
    write_text(folder / "config.json", json.dumps({"model_type": "none"}))


@layout("transformers, sharded", steps=(500, 1000), **OF_GPT_ADAM)
def transformers_sharded(folder, step):
    inner = folder / f"checkpoint-{step}"
    save_sharded(inner, gpt(step))
    save(inner / "optimizer.pt", adam(GPT, step))
    _trainer(inner, step)


@layout("transformers before safetensors", steps=(500, 1000), **OF_GPT_ADAM)
def transformers_bin(folder, step):
    inner = folder / f"checkpoint-{step}"
    save(inner / "pytorch_model.bin", gpt(step))
    save(inner / "optimizer.pt", adam(GPT, step))
    _trainer(inner, step)


_ADAPTER = {
    f"base_model.model.h.0.attn.c_attn.lora_{half}.weight": shape
    for half, shape in (("A", (2, 4)), ("B", (12, 2)))
}


@layout(
    "PEFT",
    steps=(500, 1000),
    parameters=numel(_ADAPTER),
    roles=WEIGHTS | ADAM,
    other_models=("base/model.safetensors",),
)
def peft(folder):
    for step in (500, 1000):
        inner = folder / f"checkpoint-{step}"
        save_tensors(inner / "adapter_model.safetensors", values(_ADAPTER, step))
        settings = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 2}
        write_text(inner / "adapter_config.json", json.dumps(settings))
        save(inner / "optimizer.pt", adam(_ADAPTER, step))
        _trainer(inner, step)
    save_tensors(folder / "base/model.safetensors", gpt(0))
    write_text(folder / "base/config.json")


@layout("accelerate, two models", steps=(0, 1), **OF_BOTH_ADAM, models=("model_1",))
def accelerate(folder, step):
    inner = folder / f"checkpoints/checkpoint_{step}"
    save_tensors(inner / "model.safetensors", gpt(step))
    save_tensors(inner / "model_1.safetensors", critic(step))
    save(inner / "optimizer.bin", adam(GPT, step))
    save(inner / "optimizer_1.bin", adam(CRITIC, step))
    save(inner / "scheduler.bin", {"last_epoch": step})
    save(inner / "random_states_0.pkl", random_states(step))


def _accelerate(folder, step):
    """Write what accelerate has beside the weights."""
    save(folder / "scheduler.bin", {"last_epoch": step, "_last_lr": [1e-4]})
    save(folder / "scaler.pt", {"scale": 65536.0, "_growth_tracker": step})
    save(folder / "random_states_0.pkl", random_states(step))


_DIFFUSERS = "diffusion_pytorch_model.safetensors"


@layout(
    "diffusers, text to image",
    steps=(500, 1000),
    **OF_GPT_ADAM,
    models=("unet_ema",),
    duplicates=(f"unet/{_DIFFUSERS}",),
)
def diffusers(folder):
    for step in (500, 1000):
        inner = folder / f"checkpoint-{step}"
        save_tensors(inner / "unet" / _DIFFUSERS, gpt(step))
        save_tensors(inner / "unet_ema" / _DIFFUSERS, average(gpt(step)))
        for name in ("unet", "unet_ema"):
            write_text(inner / name / "config.json", json.dumps({"_class_name": "UNet2DConditionModel"}))
        save(inner / "optimizer.bin", adam(GPT, step))
        _accelerate(inner, step)
    save_tensors(folder / "unet" / _DIFFUSERS, average(gpt(1000)))
    write_text(folder / "model_index.json", json.dumps({"_class_name": "StableDiffusionPipeline"}))


@layout("diffusers, ControlNet", steps=(500, 1000), **OF_GPT_ADAM)
def controlnet(folder, step):
    inner = folder / f"checkpoint-{step}"
    save_tensors(inner / "controlnet" / _DIFFUSERS, gpt(step))
    write_text(inner / "controlnet/config.json", json.dumps({"_class_name": "ControlNetModel"}))
    save(inner / "optimizer.bin", adam(GPT, step))
    _accelerate(inner, step)


@layout("diffusers, DreamBooth", steps=(500, 1000), **OF_BOTH_ADAM, models=("unet", "text_encoder"))
def dreambooth(folder, step):
    inner = folder / f"checkpoint-{step}"
    save_tensors(inner / "unet" / _DIFFUSERS, gpt(step))
    save_tensors(inner / "text_encoder/model.safetensors", critic(step))
    for name in ("unet", "text_encoder"):
        write_text(inner / name / "config.json")
    save(inner / "optimizer.bin", adam({**GPT, **CRITIC}, step))
    _accelerate(inner, step)


_LORA = {
    f"unet.down_blocks.0.attn1.to_q.lora.{half}.weight": shape
    for half, shape in (("down", (2, 8)), ("up", (8, 2)))
}


@layout(
    "diffusers, LoRA",
    steps=(500, 1000),
    parameters=numel(_LORA),
    roles=WEIGHTS | ADAM,
    duplicates=("pytorch_lora_weights.safetensors",),
)
def diffusers_lora(folder):
    for step in (500, 1000):
        inner = folder / f"checkpoint-{step}"
        save_tensors(inner / "pytorch_lora_weights.safetensors", values(_LORA, step))
        save(inner / "optimizer.bin", adam(_LORA, step))
        _accelerate(inner, step)
    copy(inner / "pytorch_lora_weights.safetensors", folder / "pytorch_lora_weights.safetensors")


@layout(
    "diffusers, textual inversion",
    steps=(500, 1000),
    parameters=16,
    duplicates=("learned_embeds.safetensors",),
)
def textual_inversion(folder):
    for step in (500, 1000):
        path = folder / f"learned_embeds-steps-{step}.safetensors"
        save_tensors(path, values({"<style>": (2, 8)}, step))
    copy(path, folder / "learned_embeds.safetensors")


@layout(
    "kohya's sd-scripts", steps=(2, 4), parameters=numel(_LORA), branches={"style": ("style.safetensors",)}
)
def kohya(folder):
    for epoch in (2, 4):
        save_tensors(folder / f"style-{epoch:06}.safetensors", half(values(_LORA, epoch)))
    save_tensors(folder / "style.safetensors", half(values(_LORA, 5)))


# Others


def _fairseq(epoch, updates):
    history = {"criterion_name": "CrossEntropy", "optimizer_name": "FairseqAdam", "num_updates": updates}
    return {
        "args": None,
        "cfg": {"model": Namespace(arch="transformer"), "optimization": {"lr": [5e-4], "max_update": 9000}},
        "model": gpt(updates, prefix="decoder."),
        "criterion": None,
        "optimizer_history": [history | {"lr_scheduler_state": {"best": None}}],
        "task_state": {},
        "extra_state": {
            "metrics": [],
            "previous_training_time": 1.5,
            "train_iterator": {
                "version": 2,
                "epoch": epoch,
                "iterations_in_epoch": updates % 700,
                "shuffle": True,
            },
            "val_loss": 4.5,
        },
        "last_optimizer_state": adam(GPT, updates),
    }


@layout(
    "fairseq",
    steps=(500, 1000, 1500, 2000),
    duplicates=("checkpoint_best.pt", "checkpoint_last.pt"),
    **OF_GPT_ADAM,
)
def fairseq(folder):
    for epoch, updates in ((1, 500), (1, 1000), (2, 1500), (2, 2000)):
        save(folder / f"checkpoint_{epoch}_{updates}.pt", _fairseq(epoch, updates))
    copy(folder / "checkpoint_2_1500.pt", folder / "checkpoint_best.pt")
    copy(folder / "checkpoint_2_2000.pt", folder / "checkpoint_last.pt")


@layout(
    "fairseq, epochs too",
    order=("checkpoint_1_500.pt", "checkpoint1.pt", "checkpoint_2_1000.pt", "checkpoint2.pt"),
    **OF_GPT_ADAM,
)
def fairseq_epochs(folder):
    for name, epoch, updates in (("_1_500", 1, 500), ("1", 1, 800), ("_2_1000", 2, 1000), ("2", 2, 1600)):
        save(folder / f"checkpoint{name}.pt", _fairseq(epoch, updates))


@layout(
    "OpenNMT-py",
    steps=(1000, 2000),
    parameters=numel(GPT) + 7 * 4 + 7,
    roles=WEIGHTS | ADAM,
    models=("generator",),
)
def opennmt(folder):
    generator = {"0.weight": (7, 4), "0.bias": (7,)}
    for step in (1000, 2000):
        state = {"model": gpt(step), "generator": values(generator, step), "vocab": {"src": ["a", "b"]}}
        shapes = {**GPT, **{f"generator.{name}": shape for name, shape in generator.items()}}
        optim = {"training_step": step + 1, "decay_step": step + 1, "optimizer": adam(shapes, step)}
        save(folder / f"model_step_{step}.pt", state | {"opt": Namespace(layers=1), "optim": optim})


@layout("AllenNLP", steps=(0, 1), duplicates=("best.th",), **OF_GPT_ADAM)
def allennlp(folder):
    for epoch in (0, 1):
        save(folder / f"model_state_epoch_{epoch}.th", gpt(epoch))
        state = {"epochs_completed": epoch + 1, "optimizer": adam(GPT, epoch)}
        state |= {"batches_in_epoch_completed": 0}
        save(folder / f"training_state_epoch_{epoch}.th", state)
    copy(folder / "model_state_epoch_1.th", folder / "best.th")


@layout(
    "PyTorch Ignite", steps=(100, 200), **OF_NET_ADAM, branches={"best": ("best_model_2_accuracy=0.9120.pt",)}
)
def ignite(folder):
    for step in (100, 200):
        trainer = {"epoch_length": 100, "iteration": step, "max_epochs": 5}
        state = {"model": net(step), "optimizer": adam(NET, step), "trainer": trainer}
        save(folder / f"training_checkpoint_{step}.pt", state)
    save(folder / "best_model_2_accuracy=0.9120.pt", net(150))


@layout("Composer", steps=(100, 200), **OF_GPT_ADAM)
def composer(folder):
    for epoch, batch in ((0, 100), (1, 200)):
        optimizer = adam(GPT, batch)
        groups = [{**optimizer["param_groups"][0], "params": list(GPT)}]
        by_name = {"state": dict(zip(GPT, optimizer["state"].values(), strict=True)), "param_groups": groups}
        state = {"model": gpt(batch), "optimizers": {"DecoupledAdamW": by_name}}
        state |= {"timestamp": {"epoch": epoch, "batch": batch, "sample": 8 * batch}, "rank_zero_seed": 17}
        save(folder / f"ep{epoch}-ba{batch}-rank0.pt", {"state": state, "rng": [random_states(batch)]})


@layout("nerfstudio", steps=(2000, 4000), **OF_GPT_ADAM)
def nerfstudio(folder, step):
    state = {"step": step, "pipeline": gpt(step, prefix="_model.")}
    state |= {"optimizers": {"fields": adam(GPT, step)}}
    scalers = {"scale": 65536.0, "_growth_tracker": 0}
    state |= {"schedulers": {"fields": {"last_epoch": step}}, "scalers": scalers}
    save(folder / f"nerfstudio_models/step-{step:09}.ckpt", state)
