"""How much memory and how many cores a process may take."""

import torch

from atlas_wm.parallel import devices, launch

CPU = torch.device("cpu")


def test_free_memory_is_what_the_machine_or_the_container_has_left_shared_by_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert devices.free_memory(CPU) == devices.machine_memory() // 2  # no Linux: a guess
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  8000 kB\n")
    assert devices.free_memory(CPU) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.free_memory(CPU) == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert (devices.machine_memory(), devices.free_memory(CPU)) == (5_000_000, 4_000_000)
    for name, value in {"WORLD_SIZE": 4, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert devices.free_memory(CPU) == 2_000_000


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda process: {3, 5})
    assert launch.own_cores() == 2
    monkeypatch.setattr(launch, "process_info", lambda: launch.ProcessInfo(0, 4, 0, 4))
    assert launch.own_cores() == 2  # SLURM gives each of its processes cores of its own
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda process: set(range(16)))
    assert launch.own_cores() == 4
    monkeypatch.delattr(launch.os, "sched_getaffinity")
    assert launch.own_cores() == 4  # macOS
