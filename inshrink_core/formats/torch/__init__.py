"""Read files of `torch.save`: the zip container, and its pickle without executing it."""
