"""Files that `torch.save` writes: the zip container, and its pickle read without being run."""
