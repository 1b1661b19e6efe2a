"""How much memory there is: the least of what the system and the groups around the process leave."""

import pytest

from inshrink_core.errors import InputError, TooLargeError
from inshrink_core.execution import resources
from inshrink_core.execution.resources import Limits, memory_available
from inshrink_core.text import parse_size


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system of 8 GB, in a folder."""
    monkeypatch.setattr(resources, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(resources, "_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    return tmp_path


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_groups_it_is_what_the_system_has(system):
    assert memory_available() == 8_000_000 << 10


def test_a_group_of_version_2_and_those_around_it_count(system):
    (system / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    group(system / "cgroup" / "outer" / "inner", memory__max="max", memory__current=100)
    group(
        system / "cgroup" / "outer", memory__max=1000, memory__current=700, memory__stat="inactive_file 200"
    )
    assert memory_available() == 500


def test_a_group_of_version_1_counts(system):
    (system / "proc" / "self" / "cgroup").write_text("4:cpu,memory:/job\n0::/\n")
    names = {"memory__limit_in_bytes": 2000, "memory__usage_in_bytes": 500}
    group(system / "cgroup" / "memory" / "job", **names, memory__stat="total_inactive_file 10")
    assert memory_available() == 1510


@pytest.mark.parametrize(
    ("text", "nbytes"), [("12", 12), ("4GB", 4 * 10**9), ("2kib", 2048), ("1.5 m", 1500000)]
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "4XB", "9" * 30, "i", "5i"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)


def test_half_of_what_is_available_is_for_a_whole_run(monkeypatch):
    monkeypatch.setattr(resources, "memory_available", lambda: 10**9)
    Limits().require_memory(9 * 10**8, "it", "here")
    with pytest.raises(TooLargeError, match=r"900\.0 MB of memory.*at most 500\.0 MB"):
        Limits(share=0.5).require_memory(9 * 10**8, "it", "here")
    Limits(share=0.5, max_memory=10**9).require_memory(9 * 10**8, "it", "here")
