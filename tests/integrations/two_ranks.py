"""Calls a function of a module on a process of torchrun, and says when nothing is left to do."""

import importlib
import sys
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # behind the installed package
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(*sys.argv[2:])
    if dist.is_initialized():  # else threads of gloo may outlive the interpreter, which aborts
        dist.barrier()
        dist.destroy_process_group()
    print("nothing is left to do", flush=True)
