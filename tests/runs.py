"""A tiny real training, saved as plain torch files: what the chain and session tests run on."""

import torch
from torch import nn

from inshrink_core.chain import Archive


def model():
    """Return a small convolutional network with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )


def adam(network):
    """Return an optimizer with two moments."""
    return torch.optim.AdamW(network.parameters(), lr=1e-3)


def sgd(network):
    """Return an optimizer with one."""
    return torch.optim.SGD(network.parameters(), lr=1e-2, momentum=0.9)


def batch(step):
    """Return the inputs and targets of a step; the same ones whenever asked."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 1, 6, 6, generator=generator)
    return inputs, (inputs.mean(dim=(1, 2, 3)) * 20).long().clamp(0, 9)


def train(network, optimizer, steps):
    """Train and return the loss of every step."""
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def write_run(directory, n_steps=4, every=5):
    """Train and save every few steps; the last steps are `n_steps * every`."""
    directory.mkdir(parents=True, exist_ok=True)
    network = model()
    optimizer = adam(network)
    for save in range(1, n_steps + 1):
        train(network, optimizer, range((save - 1) * every, save * every))
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": save * every}
        torch.save(state, directory / f"step_{save * every}.pt")
    return directory


def load(path):
    """Load a checkpoint file the way a user's training script would."""
    state = torch.load(path, weights_only=True)
    network = model()
    network.load_state_dict(state["model"])
    optimizer = adam(network)
    optimizer.load_state_dict(state["optimizer"])
    return network, optimizer


def payloads_of(path):
    """Return every block payload of an archive, in order."""
    archive = Archive.open(path)
    readers = [archive.frame(info) for info in archive.reader.frames]
    return [bytes(frame.read(entry)) for frame in readers for entry in frame.entries]
