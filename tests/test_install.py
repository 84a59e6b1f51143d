"""environment.yml, pyproject.toml and requirements.lock speak of one environment, and of no package host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rar_lib.cli import main

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(file: str = "requirements.lock") -> dict[str, Version]:
    lines = (ROOT / file).read_text().splitlines()
    pins = [line.removeprefix("# ") for line in lines if re.match(r"(# torch==|[A-Za-z0-9])", line)]
    return {canonicalize_name(p.partition("==")[0]): Version(p.partition("==")[2]) for p in pins}


def wanted() -> list[str]:
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    return [*PROJECT["dependencies"], *extras]


@pytest.mark.parametrize("line", wanted())
def test_every_requirement_is_met_by_the_lock(line: str) -> None:
    requirement = Requirement(line)
    peers = locked("benchmarks/requirements.txt")  # of an environment of their own
    version = (locked() | peers).get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is not locked"
    assert version in requirement.specifier


def test_what_breaks_a_cpu_environment_is_not_locked() -> None:
    bad = {"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"}
    assert not bad & set(locked())
    assert not [name for name in locked() if name.startswith(("nvidia-", "cuda-"))]


def test_the_environment_is_the_lock() -> None:
    different = {}
    for name, version in locked().items():
        installed = Version(metadata.version(name))
        if installed.public != version.public:
            different[name] = (str(installed), str(version))
    assert different == {}


def test_environment_yml_brings_python_pip_and_make_only() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"] == ["python=3.11", "pip", "make"]
    assert PROJECT["requires-python"] == ">=3.11,<3.12"
    assert sys.version_info[:2] == (3, 11)


def test_no_file_names_a_package_host() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    host = re.compile(r"index-url\s*=|find-links|https?://[^\s\"]*(pypi|pythonhosted|conda|/simple)", re.I)
    hits = []
    for name in files:
        path = ROOT / name
        if (
            path.suffix in {".safetensors", ".png", ".parquet", ".pt", ".pkl", ".dp", ".bin"}
            or name == "tests/test_install.py"
            or not path.is_file()
        ):
            continue
        hits += [f"{name}: {m.group(0)}" for m in host.finditer(path.read_text())]
    assert hits == []


def test_a_wrong_python_is_said_in_one_line(tmp_path: Path) -> None:
    fake = tmp_path / "python3.12"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "setup", f"PYTHON={fake}", f"VENV={tmp_path}/venv"],
        cwd=ROOT, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0
    assert len(lines) == 1
    assert "needs CPython 3.11" in lines[0]
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("psutil", ["sweep", "grid.yaml", "--dry-run"], "notebooks"),
        ("transformers", ["run", "--estimate"], "hf"),
        ("tokenizers", ["base", "--out", "made"], "hf"),
    ],
)
def test_a_missing_extra_is_named(
    module: str, arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a plain `pip install .`, which is enough for the doctor."""
    for name in [n for n in sys.modules if n == "rar_lib.runs.executors" or n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["rar", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"rar: {module} is not installed; install the extra rar-lib[{extra}]" in capsys.readouterr().err
