"""Trains with Ray Train as the page tells: once through, and once with a worker that dies."""

import importlib.util
import os
import sys
from pathlib import Path

import ray


def main(page, folder):
    spec = importlib.util.spec_from_file_location("page", page)
    training = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(training)
    paths = os.pathsep.join(path for path in sys.path if path)
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    for name in ("whole", "broken"):
        assert training.fit(folder / name, folder / "ray", steps=6, every=2).metrics["step"] == 6
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
