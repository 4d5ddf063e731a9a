"""Memory that a process may still allocate inside of a container."""

from pathlib import Path

import pytest

from outrider.runtime import host_memory
from outrider.runtime.host_memory import available_bytes, left_in_groups

MB = 2**20


def group(folder: Path, limit: int | None, used: int, inactive: int = 0) -> None:
    """A control group of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\ninactive_file {inactive}\n")


def test_every_group_around_the_process_counts(tmp_path: Path) -> None:
    group(tmp_path / "pod", 900 * MB, 400 * MB)
    group(tmp_path / "pod" / "container", 700 * MB, 300 * MB, inactive=50 * MB)
    group(tmp_path / "other", 10 * MB, 0)
    left = list(left_in_groups(tmp_path, "0::/pod/container\n"))
    assert left == [450 * MB, 500 * MB]


def test_groups_without_a_limit_leave_everything(tmp_path: Path) -> None:
    group(tmp_path / "job", None, 300 * MB)
    assert not list(left_in_groups(tmp_path, "0::/job\n"))
    assert not list(left_in_groups(tmp_path / "nothing is mounted", "0::/job\n"))
    assert not list(left_in_groups(tmp_path, ""))


def test_a_container_that_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    """Its path is the host's, which does not exist inside."""
    group(tmp_path, 200 * MB, 50 * MB)
    assert list(left_in_groups(tmp_path, "0::/kubepods/pod1/abc\n")) == [150 * MB]


def test_groups_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "docker"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{500 * MB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{450 * MB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {20 * MB}\n")
    own = "5:cpu,cpuacct:/docker\n4:memory:/docker\n1:name=systemd:/docker\n"
    assert list(left_in_groups(tmp_path, own)) == [70 * MB]


def test_a_group_of_version_1_without_a_limit_leaves_everything(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{(2**63 - 1) // 4096 * 4096}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{450 * MB}\n")
    assert not list(left_in_groups(tmp_path, "4:memory:/\n"))


def test_a_group_above_its_limit_leaves_nothing(tmp_path: Path) -> None:
    group(tmp_path, 100 * MB, 120 * MB)
    assert list(left_in_groups(tmp_path, "0::/\n")) == [0]


def test_free_memory_is_what_a_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(host_memory, "_OWN", own)
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    unlimited = available_bytes()
    group(tmp_path, 3 * MB, MB)
    assert unlimited > available_bytes() == 2 * MB
