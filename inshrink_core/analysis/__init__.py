"""Looking into runs: sensitivities over training, the inside of a tensor, its course, restore gain."""
