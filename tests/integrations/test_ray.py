"""Parts as tasks of the real Ray, and as processes: the same archive, whoever dies, and nobody is left."""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import inshrink_core
from inshrink_core.chain import Archive
from tests.processes import descendants, is_at_work, until
from tests.runs import payloads_of, write_run

N_STEPS = 150
"""So many that a command is at work for seconds after its first frame: it is interrupted then."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of many small checkpoints."""
    return write_run(tmp_path_factory.mktemp("engines") / "run", n_steps=N_STEPS, every=1)


@pytest.fixture(scope="module")
def expected(run):
    """The archive as one process writes it."""
    inshrink_core.compress(run, run.parent / "whole", codec="lattice", part="1/1")
    return run.parent / "whole"


def command(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {"args": [sys.executable, "-P", "-m", "inshrink_core", *map(str, words)], "env": environment}


def ended(asked):
    return subprocess.run(**asked, capture_output=True, text=True, timeout=200, check=False)


def compressing(run, target, *options):
    return command("compress", run, "-o", target, "--codec", "lattice", *options)


WORKERS = {"processes": "inshrink_core.execution.worker", "ray": "ray::_work"}


@pytest.mark.integration
@pytest.mark.parametrize("engine", WORKERS)
def test_a_worker_that_is_killed_is_replaced_and_the_archive_is_the_same(tmp_path, run, expected, engine):
    with subprocess.Popen(
        **compressing(run, tmp_path / "x", "--engine", engine, "--workers", "2"),
        stdout=subprocess.DEVNULL,
    ) as started:
        until(lambda: [*tmp_path.glob("x/frames/*.frame")] or started.poll() is not None)
        workers = [pid for pid, line in descendants(started.pid).items() if WORKERS[engine] in line]
        assert workers
        os.kill(workers[0], signal.SIGKILL)
        started.wait(200)
    assert started.returncode == 0
    assert payloads_of(tmp_path / "x") == payloads_of(expected)
    assert {frame.n_parts for frame in Archive.open(tmp_path / "x").frames} == {2}


@pytest.mark.integration
@pytest.mark.parametrize("engine", WORKERS)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left_when_a_command_ends_and_the_same_one_goes_on(tmp_path, run, expected, engine, sent):
    options = ["--engine", engine, "--workers", "2"]
    for _ in range(5):  # on a busy machine a command may end before the signal comes
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        asked = compressing(run, tmp_path / "x", *options)
        with subprocess.Popen(**asked, start_new_session=True, stderr=subprocess.DEVNULL) as started:
            until(lambda: [*tmp_path.glob("x/frames/*.frame")])
            all_of_them = descendants(started.pid)
            os.kill(started.pid, sent)
            started.wait(60)
        if started.returncode != 0:
            break
    assert started.returncode == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    until(lambda: not [pid for pid, line in all_of_them.items() if is_at_work(pid, line)])
    asked = compressing(run, tmp_path / "x", "--engine", "processes", *options[2:])
    done = ended(asked)
    assert done.returncode == 0, done.stderr
    assert payloads_of(tmp_path / "x") == payloads_of(expected)


@pytest.mark.integration
def test_ray_restores_and_verifies_and_an_error_comes_back_as_it_was(tmp_path, expected):
    done = ended(command("restore", expected, "--all", "-o", tmp_path / "out", "--engine", "ray"))
    assert done.returncode == 0, done.stderr
    inshrink_core.restore(expected, tmp_path / "one", every=True)
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names != []
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "one" / n).read_bytes() for n in names)

    done = ended(command("verify", expected, "--deep", "--engine", "ray", "--workers", "2"))
    assert f"sound: {N_STEPS} frames" in done.stdout

    (tmp_path / "out" / names[0]).write_bytes(b"mine")
    done = ended(command("restore", expected, "--all", "-o", tmp_path / "out", "--engine", "processes"))
    assert done.returncode == 2
    assert "--force" in done.stderr


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one machine with one processor, to which others can be added."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(inshrink_core.__file__).parents[1]))
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    yield started
    ray.shutdown()
    started.shutdown()


def workers_on(node):
    """Return the processes that work on parts on a machine of a cluster."""
    raylet = node.all_processes["raylet"][0].process.pid
    return [pid for pid, line in descendants(raylet).items() if WORKERS["ray"] in line]


def in_parts_on_ray(run, target):
    return inshrink_core.compress(run, target, codec="lattice", engine="ray", workers=2)


@pytest.mark.integration
def test_a_machine_that_joins_gets_work_and_one_that_dies_is_done_without(tmp_path, run, expected, cluster):
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(in_parts_on_ray, run, tmp_path / "x")
        try:
            [first] = until(lambda: work.done() or workers_on(cluster.head_node))
            os.kill(first, signal.SIGSTOP)  # so that the other part is there still when somebody joins
            node = cluster.add_node(num_cpus=1)
            [second] = until(lambda: workers_on(node))
            until(lambda: [*tmp_path.glob("x/frames/*.00001.frame")])
            os.kill(second, signal.SIGSTOP)
            assert not work.done()
            os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            os.kill(second, signal.SIGKILL)
        finally:
            os.kill(first, signal.SIGCONT)
        work.result(200)
    cluster.remove_node(node, allow_graceful=False)
    assert payloads_of(tmp_path / "x") == payloads_of(expected)


@pytest.mark.integration
def test_a_second_work_on_ray_starts_no_process(tmp_path, run, cluster):
    cluster.add_node(num_cpus=1)
    logs = Path(cluster.head_node.get_logs_dir_path())  # a file for each process that there ever was
    in_parts_on_ray(run, tmp_path / "x")
    before = {file.name for file in logs.glob("worker-*.err")}
    in_parts_on_ray(run, tmp_path / "y")
    assert payloads_of(tmp_path / "y") == payloads_of(tmp_path / "x")
    assert {file.name for file in logs.glob("worker-*.err")} == before != set()
