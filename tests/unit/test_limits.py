"""The memory that the container may still use, as the kernel tells it."""

import pytest

from modelswap_engine.limits import Memory, MemoryProbe, machine_memory

GIB = 1 << 30
MACHINE = Memory(limit=64 * GIB, available=32 * GIB)


def probe(tmp_path, membership, machine=MACHINE):
    (tmp_path / "self").write_text(membership)
    return MemoryProbe(cgroups=tmp_path / "fs", membership=tmp_path / "self", machine=lambda: machine)


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_2_counts_usage_without_the_cache_that_can_be_dropped(tmp_path):
    group(
        tmp_path / "fs",
        memory__max=f"{4 * GIB}\n",
        memory__current=f"{3 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB}\n",
    )
    assert probe(tmp_path, "0::/\n").read() == Memory(limit=4 * GIB, available=2 * GIB)


def test_version_2_takes_the_tightest_group_on_the_way_up(tmp_path):
    group(tmp_path / "fs/pod/container", memory__max="max\n", memory__current="0\n")
    group(tmp_path / "fs/pod", memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n", memory__stat="")
    group(tmp_path / "fs", memory__max=f"{8 * GIB}\n", memory__current=f"{GIB}\n")
    assert probe(tmp_path, "0::/pod/container\n").read() == Memory(limit=2 * GIB, available=GIB)


def test_in_a_container_the_path_of_the_host_is_not_there(tmp_path):
    group(tmp_path / "fs", memory__max=f"{2 * GIB}\n", memory__current="0\n")
    assert probe(tmp_path, "0::/kubepods/pod1/abc\n").read().limit == 2 * GIB


def test_version_1_says_the_same_in_other_files(tmp_path):
    group(
        tmp_path / "fs/memory/box",
        memory__limit_in_bytes=f"{2 * GIB}\n",
        memory__usage_in_bytes=f"{GIB}\n",
        memory__stat="total_inactive_file 1048576\n",
    )
    read = probe(tmp_path, "3:cpu,cpuacct:/\n5:memory:/box\n").read()
    assert read == Memory(limit=2 * GIB, available=GIB + 1048576)


def test_version_1_without_a_limit_is_the_machine(tmp_path):
    group(tmp_path / "fs/memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes=f"{GIB}\n")
    assert probe(tmp_path, "5:memory:/\n").read() == MACHINE


def test_a_machine_that_is_fuller_than_the_group_decides(tmp_path):
    group(tmp_path / "fs", memory__max=f"{4 * GIB}\n", memory__current="0\n")
    read = probe(tmp_path, "0::/\n", machine=Memory(limit=64 * GIB, available=GIB)).read()
    assert read == Memory(limit=4 * GIB, available=GIB)


def test_usage_above_the_limit_leaves_nothing(tmp_path):
    group(tmp_path / "fs", memory__max=f"{GIB}\n", memory__current=f"{2 * GIB}\n")
    assert probe(tmp_path, "0::/\n").read().available == 0


@pytest.mark.parametrize("membership", ["", "nonsense", "0::/\n"])
def test_without_readable_groups_only_the_machine_bounds(tmp_path, membership):
    assert probe(tmp_path, membership).read() == MACHINE
    assert probe(tmp_path, membership, machine=Memory()).read() == Memory()


def test_a_kernel_that_does_not_tell_bounds_nothing(tmp_path):
    assert machine_memory(tmp_path / "meminfo") == Memory()
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable:   4 kB\nHugePages_Total: 0\n")
    assert machine_memory(tmp_path / "meminfo") == Memory(limit=8192, available=4096)


def test_this_machine_has_memory():
    memory = machine_memory()
    assert 0 < memory.available <= memory.limit
