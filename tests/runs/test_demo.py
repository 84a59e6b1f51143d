"""What `rar demo` says while its notebook runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rar_lib.runs import demo
from rar_lib.runs.registry import RunEntry


def test_a_run_that_moves_is_told_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / "R3-seed0-0"
    entries = [
        RunEntry(name, "running"),
        *[RunEntry(name, "running", done=1, steps=2)] * 2,
        RunEntry(name, "complete", done=2, steps=2),
    ]
    all_seen = threading.Event()

    def find(folder: Path) -> list[RunEntry]:
        if len(entries) == 1:
            all_seen.set()
            return entries
        return [entries.pop(0)]

    monkeypatch.setattr(demo, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(demo, "find", find)
    with demo.watched(tmp_path):
        assert all_seen.wait(10)
    assert capsys.readouterr().err.splitlines() == ["R3-seed0-0 starts", "R3-seed0-0 step 1/2"]
