"""Research code: vision, generative models, speech, scenes and reinforcement learning."""

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.formats.layouts.builders import (
    CRITIC,
    GPT,
    NET,
    OF_GPT_ADAM,
    OF_NET,
    OF_NET_ADAM,
    OF_NET_SGD,
    OF_TWO_GPT_ADAM,
    Net,
    adam,
    average,
    copy,
    critic,
    gpt,
    half,
    net,
    numel,
    save,
    save_stream,
    sgd,
    values,
    write_text,
)
from tests.formats.layouts.layout import ADAM, BUFFERS, WEIGHTS, layout

_PAIR_ADAM = {"parameters": numel(NET, CRITIC), "roles": WEIGHTS | BUFFERS | ADAM}

# Vision


@layout(
    "timm", steps=(2, 3), models=("ema",), duplicates=("model_best.pth.tar", "last.pth.tar"), **OF_NET_SGD
)
def timm(folder):
    for epoch in (2, 3):
        state = {"epoch": epoch, "arch": "resnet50", "state_dict": net(epoch), "optimizer": sgd(NET, epoch)}
        state |= {"version": 2, "args": Namespace(lr=0.1), "state_dict_ema": average(net(epoch))}
        state |= {"metric": 70.5}
        save(folder / f"checkpoint-{epoch}.pth.tar", state)
    copy(folder / "checkpoint-2.pth.tar", folder / "model_best.pth.tar")
    copy(folder / "checkpoint-3.pth.tar", folder / "last.pth.tar")


@layout("torchvision's references", steps=(0, 1), models=("ema",), beside=("checkpoint.pth",), **OF_NET_SGD)
def torchvision(folder):
    for epoch in (0, 1):
        moving = {"n_averaged": torch.tensor(epoch + 1)}
        moving |= {f"module.{name}": value for name, value in average(net(epoch)).items()}
        state = {"model": net(epoch), "optimizer": sgd(NET, epoch), "lr_scheduler": {"last_epoch": epoch}}
        state |= {"epoch": epoch, "args": Namespace(lr=0.1), "model_ema": moving}
        save(folder / f"model_{epoch}.pth", state)
    save(folder / "checkpoint.pth", state)


@layout("detectron2", steps=(4999, 9999), branches={"final": ("model_final.pth",)}, **OF_NET_SGD)
def detectron2(folder):
    for name, iteration in (("0004999", 4999), ("0009999", 9999), ("final", 11999)):
        state = {"model": net(iteration), "optimizer": sgd(NET, iteration), "iteration": iteration}
        save(folder / f"model_{name}.pth", state | {"scheduler": {"last_epoch": iteration}})
    write_text(folder / "last_checkpoint", "model_final.pth")


@layout("MMEngine", steps=(11, 12), duplicates=("best_coco_bbox_mAP_epoch_11.pth",), **OF_NET_SGD)
def mmengine(folder):
    for epoch in (11, 12):
        meta = {"epoch": epoch, "iter": 500 * epoch, "experiment_name": "faster-rcnn", "seed": 1}
        state = {"meta": meta, "state_dict": net(epoch)}
        state |= {"message_hub": {"runtime_info": {"iter": 500 * epoch}}}
        state |= {"optimizer": sgd(NET, epoch), "param_schedulers": [{"last_step": epoch}]}
        best = [folder / "best_coco_bbox_mAP_epoch_11.pth"] if epoch == 11 else []
        save_stream(state, folder / f"epoch_{epoch}.pth", *best)
    write_text(folder / "last_checkpoint", "epoch_12.pth")


@layout("Ultralytics", steps=(0, 10), **OF_NET_SGD, duplicates=("weights/best.pt", "weights/last.pt"))
def ultralytics(folder):
    for epoch, beside in ((0, ()), (10, ("best", "last"))):
        state = {"epoch": epoch, "best_fitness": 0.4, "model": None, "ema": Net(epoch).half()}
        state |= {"updates": 9 * epoch}
        state |= {"optimizer": sgd(NET, epoch), "train_args": {"lr0": 0.01}, "date": "2024-05-12"}
        state |= {"version": "8"}
        save_stream(state, *(folder / f"weights/{name}.pt" for name in (f"epoch{epoch}", *beside)))
    write_text(folder / "results.csv", "epoch, train/loss\n0, 1.5\n10, 0.5\n")


@layout("whole modules", steps=(10, 20), **OF_NET)
def whole_modules(folder, epoch):
    save(folder / f"net_{epoch}.pth", Net(epoch))


@layout("OpenCLIP", steps=(1, 2), branches={"latest": ("checkpoints/epoch_latest.pt",)}, **OF_NET_ADAM)
def open_clip(folder):
    for name, epoch in (("1", 1), ("2", 2), ("latest", 3)):
        state = {"epoch": epoch, "name": "ViT", "state_dict": net(epoch, prefix="module.")}
        save(folder / f"checkpoints/epoch_{name}.pt", state | {"optimizer": adam(NET, epoch)})


@layout(
    "DINO",
    order=("checkpoint0000.pth", "checkpoint0020.pth", "checkpoint.pth"),
    roles=WEIGHTS | BUFFERS | ADAM,
    models=("student", "teacher"),
)
def dino(folder):
    for name, epoch in (("0000", 0), ("0020", 20), ("", 25)):
        state = {"student": net(epoch, prefix="module.backbone."), "optimizer": adam(NET, epoch)}
        state |= {"teacher": {f"backbone.{n}": v for n, v in average(net(epoch)).items()}}
        save(folder / f"checkpoint{name}.pth", state | {"epoch": epoch + 1, "args": Namespace(lr=5e-4)})


@layout("fvcore with ranks", steps=(12499, 24999), **OF_TWO_GPT_ADAM)
def fvcore_ranks(folder):
    for iteration in (12499, 24999):
        for rank in (0, 1):
            state = {"model": gpt(iteration, rank), "optimizer": adam(GPT, iteration), "iteration": iteration}
            save(folder / f"model_{iteration:07}.rank_{rank}.pth", state)
    write_text(folder / "last_checkpoint.rank_0", "model_0024999.rank_0.pth")


# Generative models


@layout(
    "CycleGAN",
    steps=(5, 10),
    parameters=2 * numel(NET, CRITIC),
    roles=WEIGHTS | BUFFERS,
    models=("G_B", "D_B"),
    branches={"latest": tuple(f"latest_net_{net}.pth" for net in ("G_A", "G_B", "D_A", "D_B"))},
)
def cyclegan(folder):
    for name, epoch in (("5", 5), ("10", 10), ("latest", 12)):
        for seed, side in enumerate("AB"):
            save(folder / f"{name}_net_G_{side}.pth", net(epoch, seed))
            save(folder / f"{name}_net_D_{side}.pth", critic(epoch + seed))


@layout("StyleGAN2 in PyTorch", steps=(10_000, 20_000), models=("g", "d", "g_ema"), **_PAIR_ADAM)
def stylegan2(folder, step):
    state = {"g": net(step), "d": critic(step), "g_ema": average(net(step)), "g_optim": adam(NET, step)}
    state |= {"d_optim": adam(CRITIC, step), "args": Namespace(size=256), "ada_aug_p": 0.1}
    save(folder / f"checkpoint/{step:06}.pt", state)


@layout("StyleGAN3", left_out=("network-snapshot-000200.pkl", "network-snapshot-000400.pkl"))
def stylegan3(folder):
    for step in (200, 400):
        folder.mkdir(parents=True, exist_ok=True)
        value = {"G": Net(step), "D": Net(step + 1), "G_ema": Net(step + 2), "training_set_kwargs": {}}
        (folder / f"network-snapshot-{step:06}.pkl").write_bytes(pickle.dumps(value))


@layout("improved diffusion", steps=(10_000, 20_000), **OF_GPT_ADAM, models=("ema",))
def improved_diffusion(folder, step):
    save(folder / f"model{step:06}.pt", gpt(step))
    save(folder / f"ema_0.9999_{step:06}.pt", average(gpt(step)))
    save(folder / f"opt{step:06}.pt", adam(GPT, step))


@layout("DiT", steps=(50_000, 100_000), **OF_GPT_ADAM, models=("ema",))
def dit(folder, step):
    state = {"model": gpt(step), "ema": average(gpt(step)), "opt": adam(GPT, step)}
    state |= {"args": Namespace(lr=1e-4)}
    save(folder / f"000-DiT-XL-2/checkpoints/{step:07}.pt", state)


@layout("k-diffusion", steps=(10_000, 20_000), **OF_GPT_ADAM, models=("ema",))
def k_diffusion(folder, step):
    state = {"config": {"model": {"type": "image_v1"}}, "model": gpt(step)}
    state |= {"model_ema": average(gpt(step))}
    state |= {"opt": adam(GPT, step), "sched": {"last_epoch": step}, "ema_sched": {"last_epoch": step}}
    save(folder / f"demo_{step:08}.pth", state | {"epoch": step // 5000, "step": step, "elapsed": 3.5})


@layout(
    "BasicSR",
    steps=(5000, 10_000),
    models=("net_d", "params_ema"),
    branches={"latest": ("models/net_g_latest.pth", "models/net_d_latest.pth")},
    **_PAIR_ADAM,
)
def basicsr(folder):
    for name, step in (("5000", 5000), ("10000", 10_000), ("latest", 12_000)):
        generator = {"params": net(step), "params_ema": average(net(step))}
        save(folder / f"models/net_g_{name}.pth", generator)
        save(folder / f"models/net_d_{name}.pth", {"params": critic(step)})
        if name != "latest":
            optimizers = [adam(NET, step), adam(CRITIC, step)]
            state = {"epoch": 1, "iter": step, "optimizers": optimizers, "schedulers": [{"last_epoch": step}]}
            save(folder / f"training_states/{name}.state", state)


# Speech


@layout("VITS", steps=(1000, 2000, 3000), models=("D",), **_PAIR_ADAM)
def vits(folder):
    for step, epoch in ((1000, 12), (2000, 24), (3000, 24)):
        # What the files call `iteration` is the epoch.
        rest = {"iteration": epoch, "learning_rate": 2e-4}
        save(folder / f"G_{step}.pth", {"model": net(step), "optimizer": adam(NET, step)} | rest)
        save(folder / f"D_{step}.pth", {"model": critic(step), "optimizer": adam(CRITIC, step)} | rest)


@layout("RVC", steps=(500, 1000), **OF_NET)
def rvc(folder):
    for epoch, step in ((10, 500), (20, 1000)):
        state = {"weight": half(net(step)), "config": [1025, 32], "info": f"{epoch}epoch", "sr": "40k"}
        state |= {"f0": 1}
        save(folder / f"weights/voice_e{epoch}_s{step}.pth", state)


@layout(
    "ESPnet",
    steps=(1, 2, 10),
    branches={"ave": ("exp/asr/valid.acc.ave_2best.pth",)},
    beside=("exp/asr/checkpoint.pth",),
    **OF_NET,
)
def espnet(folder):
    inner = folder / "exp/asr"
    for epoch in (1, 2, 10):
        save(inner / f"{epoch}epoch.pth", net(epoch))
    (inner / "valid.acc.best.pth").symlink_to("2epoch.pth")
    save(inner / "valid.acc.ave_2best.pth", average(net(2)))
    state = {"model": net(10), "reporter": {"epoch": 10}, "optimizers": [adam(NET, 10)], "schedulers": [None]}
    save(inner / "checkpoint.pth", state | {"scaler": None})


@layout("Coqui TTS", steps=(10_000, 20_000), branches={"best": ("best_model.pth",)}, **OF_NET_ADAM)
def coqui(folder):
    for name, step in (("checkpoint_10000", 10_000), ("checkpoint_20000", 20_000), ("best_model", 15_000)):
        state = {"config": {"model": "vits"}, "model": net(step), "optimizer": adam(NET, step)}
        state |= {"scaler": None}
        state |= {"step": step, "epoch": step // 2000, "date": "May 12, 2024", "model_loss": 0.5}
        save(folder / f"{name}.pth", state)
    write_text(folder / "config.json")


@layout("WeNet", steps=(0, 1, 2), branches={"init": ("init.pt",), "avg": ("avg_5.pt",)}, **OF_NET)
def wenet(folder):
    save(folder / "init.pt", net(-1))
    for epoch in (0, 1, 2):
        save(folder / f"epoch_{epoch}.pt", net(epoch))
        write_text(folder / f"epoch_{epoch}.yaml", f"epoch: {epoch}\nlr: 0.001\n")
    save(folder / "avg_5.pt", average(net(2)))


@layout(
    "SpeechBrain",
    order=("save/CKPT+2024-05-12+13-45-50+00", "save/CKPT+2024-05-12+14-02-10+00"),
    **OF_NET_ADAM,
)
def speechbrain(folder):
    for epoch, time in enumerate(("13-45-50", "14-02-10"), 1):
        inner = folder / f"save/CKPT+2024-05-12+{time}+00"
        save(inner / "model.ckpt", net(epoch))
        save(inner / "optimizer.ckpt", adam(NET, epoch))
        write_text(inner / "counter.ckpt", str(epoch))
        write_text(inner / "brain.ckpt", f"avg_train_loss: 0.5\nstep: {500 * epoch}\n")
        write_text(inner / "CKPT.yaml", "end-of-epoch: true\n")


# Scenes

_GAUSSIANS = {"xyz": (5, 3), "f_dc": (5, 1, 3), "f_rest": (5, 15, 3), "opacity": (5, 1)}
_GAUSSIANS |= {"scaling": (5, 3), "rotation": (5, 4)}


@layout("3D Gaussian splatting", steps=(7000, 30_000), roles=WEIGHTS | ADAM)
def gaussian_splatting(folder, iteration):
    held = values(_GAUSSIANS, iteration)
    fields = [
        torch.nn.Parameter(held[n]) for n in ("xyz", "f_dc", "f_rest", "scaling", "rotation", "opacity")
    ]
    counts: Mapping[str, Tensor] = values(
        {"radii": (5,), "gradient": (5, 1), "denominator": (5, 1)}, iteration
    )
    optimizer = adam(_GAUSSIANS, iteration)
    groups = [
        {"lr": lr, "name": name, "betas": (0.9, 0.999), "eps": 1e-15, "params": [i]}
        for i, (name, lr) in enumerate(zip(_GAUSSIANS, (2e-4, 3e-3, 1e-4, 5e-2, 5e-3, 1e-3), strict=True))
    ]
    captured = (3, *fields, *counts.values(), optimizer | {"param_groups": groups}, 4.5)
    save(folder / f"chkpnt{iteration}.pth", (captured, iteration))


@layout("NeRF in PyTorch", steps=(10_000, 20_000), **OF_TWO_GPT_ADAM, models=("network_fine",))
def nerf(folder, step):
    optimizer = adam({f"{n}{name}": shape for n in (0, 1) for name, shape in GPT.items()}, step)
    state = {"global_step": step, "network_fn_state_dict": gpt(step), "optimizer_state_dict": optimizer}
    save(folder / f"logs/fern/{step:06}.tar", state | {"network_fine_state_dict": gpt(step, 1)})


# Reinforcement learning


@layout("Stable-Baselines3", left_out=("rl_model_1000_steps.zip", "rl_model_2000_steps.zip"))
def stable_baselines(folder):
    for step in (1000, 2000):
        parts = folder / "parts"
        save(parts / "policy.pth", critic(step))
        save(parts / "policy.optimizer.pth", adam(CRITIC, step))
        with zipfile.ZipFile(folder / f"rl_model_{step}_steps.zip", "w") as held:
            held.writestr(zipfile.ZipInfo("data"), "{}")
            for part in sorted(parts.iterdir()):
                held.writestr(zipfile.ZipInfo(part.name), part.read_bytes())
                part.unlink()
        parts.rmdir()


@layout("RSL-RL", steps=(0, 50, 100), **OF_NET_ADAM)
def rsl_rl(folder, iteration):
    state = {"model_state_dict": net(iteration), "optimizer_state_dict": adam(NET, iteration)}
    save(folder / f"model_{iteration}.pt", state | {"iter": iteration, "infos": None})


@layout("rl_games", steps=(100, 180, 200), **OF_NET_ADAM)
def rl_games(folder):
    def state(epoch):
        held = {"model": net(epoch), "epoch": epoch, "frame": 4096 * epoch, "optimizer": adam(NET, epoch)}
        return held | {"last_mean_rewards": 521.3, "env_state": None}

    save(folder / "nn/last_Ant_ep_100_rew_521.3.pth", state(100))
    save(folder / "nn/last_Ant_ep_200_rew_1093.7.pth", state(200))
    save(folder / "nn/Ant.pth", state(180))


@layout(
    "skrl",
    steps=(1000, 2000),
    models=("policy", "value"),
    branches={"best": ("checkpoints/best_agent.pt",)},
    **_PAIR_ADAM,
)
def skrl(folder):
    for name, step in (("agent_1000", 1000), ("agent_2000", 2000), ("best_agent", 1500)):
        state = {"policy": net(step), "value": critic(step), "optimizer": adam({**NET, **CRITIC}, step)}
        save(folder / f"checkpoints/{name}.pt", state)
