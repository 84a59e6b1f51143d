"""The recipe and the light core beneath it, in an environment that holds six distributions and what these require, and no other.

The environment is a real one: an interpreter of its own, whose site-packages are links to those distributions. What it lacks is
not blocked but absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rar_lib.integrations.policy_file import load_policy

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipe" / "routing_aware_replay"
HAS = ("torch", "numpy", "pandas", "pydantic", "safetensors", "pytest")
# of the packages that rar_lib uses elsewhere
LACKS = (
    "IPython", "matplotlib", "megatron", "msgspec", "pyarrow", "ray", "reasoning_gym", "scipy", "seaborn", "tokenizers", "tqdm",
    "transformers", "tyro", "vllm", "yaml",
)  # fmt: skip


def with_requirements(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found[name] = metadata.distribution(name)
            wanted = map(Requirement, found[name].requires or ())
            waiting += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its interpreter."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in with_requirements(HAS).values():
        assert distribution.files is not None
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def run(light: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    return subprocess.run(
        [light, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=given | {"PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )


def test_the_environment_lacks_everything_else(light: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {(*LACKS, *HAS)!r} if u.find_spec(n)])"
    done = run(light, "-c", code)
    assert done.stdout.strip() == str(list(HAS)), done.stderr


def test_the_recipes_tests_pass_there(light: Path) -> None:
    done = run(light, "-m", "pytest", "-rs", RECIPE / "tests")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "SKIPPED" not in done.stdout


def test_the_demonstration_runs_there(light: Path) -> None:
    done = run(light, RECIPE / "examples" / "synthetic_router_replay_demo.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[:4] == ["arm", "asked", "realised", "units"]
    assert len(done.stdout.splitlines()) == 7


def test_traces_metrics_and_replay_import_there(light: Path) -> None:
    """All modules of the light layers; what single functions need beside it (scipy, msgspec) is imported where it is used."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for layer in ("traces", "metrics", "replay")
        for path in sorted((ROOT / "rar_lib" / layer).rglob("*.py"))
        if path.stem != "__init__"
    ]
    done = run(light, "-c", f"import importlib\nfor n in {names!r}: importlib.import_module(n)")
    assert done.returncode == 0, done.stderr[-1000:]


def test_scores_of_a_real_model_make_the_fisher_arm_complete(tmp_path: Path) -> None:
    """From a dump in verl's layout to a policy file that the trainer's loader accepts."""
    dump, model = ROOT / "data" / "traces" / "verl" / "tq_batch.pt", ROOT / "data" / "checkpoints" / "tiny-moe"
    out = tmp_path / "scores.safetensors"
    command = [sys.executable, RECIPE / "examples" / "expert_scores.py", model, dump, out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{out}\ngate/per_route/rollout: ")
    (tmp_path / "policy.json").write_text((RECIPE / "policies" / "fisher.json").read_text())
    policy = load_policy(tmp_path / "policy.json")
    assert policy.stored is not None
    score = policy.stored.score
    assert policy.stored.moe_layers == (0, 1, 2, 3)
    # answers alone are scored, but a route of a prompt moves them too
    assert score.count.sum() == 4 * 2 * score.tokens == 4 * 2 * (82 - 8)
    assert np.isfinite(score.values[score.count > 0]).all()
    assert (score.values[score.count > 0] > 0).any()


def test_a_wrong_model_or_dump_is_named_in_one_line(tmp_path: Path) -> None:
    model = ROOT / "data" / "checkpoints" / "tiny-moe"
    for given, expected in (
        ((tmp_path / "model", "dump.pt"), "expected a Hugging Face folder with config.json"),
        ((model, tmp_path / "dump.pt"), "dump.pt: cannot be read"),
    ):
        command = [sys.executable, RECIPE / "examples" / "expert_scores.py", *given, tmp_path / "out.safetensors"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert expected in line
