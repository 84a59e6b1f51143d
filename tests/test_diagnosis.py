"""One command for someone with a dump: verdicts, mismatch, certificate, a suggestion; without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rar_lib.diagnosis import diagnose, dump_mismatch
from rar_lib.errors import TraceError
from rar_lib.metrics.mismatch import mismatch
from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.wire import read_dump
from tests.traces import writers
from tests.traces.writers import Batch, make_batch

DATA = Path(__file__).resolve().parent.parent / "data"
TINY = DATA / "checkpoints" / "tiny-moe"
BATCH = make_batch(64, 4, 5, (1, 2, 3, 4), [(6, 40)] * 8)


def other_side(batch: Batch, flips: float, **header: Any) -> RouteTrace:
    """The trainer's record: sets differ in a share of the cells."""
    a = batch.trace()
    rng = np.random.default_rng(0)
    ids = a.ids()
    ids = np.where(
        (rng.random(ids.shape[:2]) < flips)[..., None], np.argsort(rng.random((*ids.shape[:2], 64)), -1)[..., :4], ids
    )
    head = a.header.model_copy(update={"source": "old", "producer": "hf", **header})
    logp = np.concatenate([np.r_[np.full(len(i.prompt), np.nan), i.trained] for i in batch.items]).astype(np.float32)
    return RouteTrace.from_packed(head, ids, a.lengths, a.status, token_ids=a.token_ids, logprobs=logp)


def path_of(tmp_path: Path) -> Path:
    return writers.write_slime(BATCH, tmp_path / "0.pt")


@pytest.mark.parametrize("write", [writers.write_nemo_log, writers.write_slime_train, writers.write_prime_export])
def test_mismatch_of_dumps_that_carry_both_log_probs(write: Any, tmp_path: Path) -> None:
    mu = np.concatenate([i.logprobs for i in BATCH.items]).astype(np.float64)
    old = np.concatenate([i.trained for i in BATCH.items]).astype(np.float64)
    found = dump_mismatch(read_dump(write(BATCH, tmp_path / "f.jsonl")))
    pair = "rollout_new" if write is writers.write_prime_export else "rollout_old"
    expected = mismatch(old, mu, np.ones(len(mu), bool), prefix=f"mismatch/{pair}/")
    assert found == pytest.approx(expected)
    assert found[f"mismatch/{pair}/tokens"] == 320
    assert found[f"mismatch/{pair}/k3"] == pytest.approx(np.expm1(-0.01) + 0.01, rel=1e-3)
    told = str(diagnose(tmp_path / "f.jsonl"))
    assert f"mismatch/{pair}/k3" in told


def test_a_dump_with_one_log_prob_gives_none(tmp_path: Path) -> None:
    assert dump_mismatch(read_dump(path_of(tmp_path), model=BATCH.model)) == {}
    found = read_dump(writers.write_nemo_log(BATCH, tmp_path / "l.jsonl"))
    bad = replace(
        found.samples[0], logprobs={**found.samples[0].logprobs, "old": found.samples[0].logprobs["old"] * np.nan}
    )
    with pytest.raises(TraceError, match="40 sampled tokens lack a finite log-prob"):
        dump_mismatch(replace(found, samples=(bad, *found.samples[1:])))


def test_the_whole_answer(tmp_path: Path) -> None:
    found = diagnose(path_of(tmp_path), model=BATCH.model, against=other_side(BATCH, 0.05), asserting=("weights",))
    assert found.exit_status == 0
    assert found.comparison is not None
    rate = found.comparison.scalars()["router_flip"]
    assert rate is not None
    assert 0.03 < rate < 0.07
    assert found.mismatch["mismatch/rollout_old/tokens"] == 320
    plain = json.loads(found.to_json())
    assert plain["certificate"]["valid"]
    assert [row["layer"] for row in plain["layers"]] == [1, 2, 3, 4]
    assert plain["suggestion"]["router_replay"]["policy"] == "disagree"
    assert str(found) == str(
        diagnose(path_of(tmp_path), model=BATCH.model, against=other_side(BATCH, 0.05), asserting=("weights",))
    )


def test_a_trace_file_as_the_second_record(tmp_path: Path) -> None:
    against = other_side(BATCH, 0.05).save(tmp_path / "own.safetensors")
    found = diagnose(path_of(tmp_path), model=BATCH.model, against=against, asserting=("weights",))
    assert found.comparison is not None
    assert found.comparison.certificate.valid
    swapped = diagnose(against, against=path_of(tmp_path), model=BATCH.model, asserting=("weights",))
    assert swapped.comparison is not None
    assert swapped.comparison.scalars() == found.comparison.scalars()
    absent = diagnose(against, against=tmp_path / "absent")
    assert (absent.exit_status, absent.report.codes) == (2, ("UNREADABLE",))
    assert absent.report.verdicts[0].where.startswith("second record")


def keys_of(found: Any) -> Mapping[str, Any] | None:
    return found.suggestion.router_replay


def test_suggestions_by_rule(tmp_path: Path) -> None:
    path = path_of(tmp_path)

    def against(flips: float, kind: Any = "mismatch", **header: Any) -> Any:
        return diagnose(
            path, model=BATCH.model, against=other_side(BATCH, flips, **header), kind=kind, asserting=("weights",)
        )

    assert keys_of(against(0.0)) == {"enabled": False}
    few = keys_of(against(0.05))
    assert few is not None
    assert (few["mode"], few["policy"], few["unit"]) == ("R3", "disagree", "token_layer")
    assert 0.05 <= float(few["budget"]) <= 0.09
    assert keys_of(against(0.4)) == {"mode": "R3", "policy": "full"}
    later = other_side(BATCH, 0.05, producer="slime", source="new")
    drifted = diagnose(path, model=BATCH.model, against=later, kind="drift", asserting=("weights", "engines"))
    assert keys_of(drifted) == {"mode": "R2", "policy": "full"}
    alone = diagnose(path, model=BATCH.model)
    assert keys_of(alone) is None
    assert "rar record" in alone.suggestion.reason if alone.suggestion else False
    unsure = diagnose(path, model=BATCH.model, against=other_side(BATCH, 0.05))
    assert (keys_of(unsure), unsure.exit_status, unsure.report.codes) == (None, 1, ("NOT_COMPARABLE",))
    broken = diagnose(path, model=replace(BATCH.model, num_experts=8), against=other_side(BATCH, 0.0))
    assert (keys_of(broken), broken.exit_status) == (None, 2)
    assert "ID_OUT_OF_RANGE" in broken.suggestion.reason if broken.suggestion else False


LIGHT = {"vllm", "megatron", "transformers", "reasoning_gym", "tokenizers", "jupyterlab", "ipywidgets", "papermill", "nbval", "nbformat", "nbclient",
         "IPython", "ipykernel", "ray"}  # fmt: skip
WITHOUT = f"""
import sys
for name in {sorted(LIGHT)!r}:
    sys.modules[name] = None  # an import of it now fails as if it were not installed
from rar_lib.cli import main
sys.argv = ["rar", *sys.argv[1:]]
try:
    main()
finally:
    assert not [m for m in sys.modules if m.partition(".")[0] in {LIGHT!r} and sys.modules[m] is not None]
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)


def test_the_doctor_runs_without_engines_and_notebooks(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 5, "num_experts": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 1})
    )
    path = str(path_of(tmp_path))
    against = other_side(BATCH, 0.05).save(tmp_path / "own.safetensors")
    clean = run("doctor", path, "--model", str(config))
    assert (clean.returncode, clean.stdout.splitlines()[0]) == (0, f"{path}: clean"), clean.stderr
    warned = run("doctor", path)
    assert warned.returncode == 1
    assert "WARNING LAYER_EMPTY" in warned.stdout
    both = run("doctor", path, "--model", str(config), "--against", str(against), "--asserting", "weights", "--json")
    assert both.returncode == 0, both.stderr
    assert json.loads(both.stdout)["certificate"]["valid"]
    config.write_text(
        json.dumps({"num_hidden_layers": 5, "num_experts": 32, "num_experts_per_tok": 4, "first_k_dense_replace": 1})
    )
    broken = run("doctor", path, "--model", str(config), "--json")
    assert broken.returncode == 2
    assert json.loads(broken.stdout)["verdicts"][0]["code"] == "ID_OUT_OF_RANGE"
    nothing = run("doctor", path, "--model", str(tmp_path / "absent.json"))
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("rar: ")
    assert "absent.json: expected a model's config.json" in nothing.stderr


def test_aliases_on_the_command_line() -> None:
    found = run("aliases", "--name", "training/rollout_probs_diff_mean")
    assert found.returncode == 0, found.stderr
    assert "same: mismatch/rollout_old/probs_diff_mean" in found.stdout
    assert len(run("aliases").stdout.splitlines()) > 60
    unknown = run("aliases", "--framework", "nobody")
    assert unknown.returncode == 2
    assert "nobody" in unknown.stderr
    assert run("aliases", "--name", "no/such/metric").returncode == 2


# ---------------------------------------------------------------- the committed samples

SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "verl/tq_batch.pt": ("verl", {}), "verl_v0/gen_batch.dp": ("verl-v0", {"allow_pickle": True}), "vllm/outputs.pt": ("vllm", {}),
    "vllm_http/answers.jsonl": ("vllm-http", {}), "sglang/answers.jsonl": ("sglang", {}), "nemo_rl/answers.jsonl": ("nemo-rl", {}),
    "nemo_rl/routes.txt": ("nemo-rl", {}), "slime/rollout_data_0.pt": ("slime", {}), "megatron/recorded.pt": ("megatron", {}),
    "megatron_tracer/router_trace_rank0.jsonl": ("megatron-tracer", {"batch_size": 1}), "skyrl/answers.jsonl": ("skyrl-http", {}),
    "skyrl/global_step_1_training_input.pkl": ("skyrl", {"allow_pickle": True}), "prime_rl/answers.jsonl": ("prime-rl-http", {}),
    "prime_rl/rank_0.bin": ("prime-rl", {}), "tensorrt_llm/outputs.pt": ("tensorrt-llm", {}),
    "xtuner/debug_rollout_0.pt": ("xtuner", {"allow_pickle": True}), "lmdeploy/answers.jsonl": ("lmdeploy", {}),
    "roll/step_000001.pkl": ("roll", {"allow_pickle": True}), "rollout.safetensors": ("rar", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_committed_samples(name: str) -> None:
    from rar_lib.traces.doctor import examine
    from rar_lib.traces.wire import read_trace

    form, options = SAMPLES[name]
    path = DATA / "traces" / name
    report = examine(path, model=TINY, **options)
    assert report.facts["format"] == form
    assert set(report.codes) <= {"PROMPT_MISSING"}  # where a start was asked for
    trace = read_trace(path, model=TINY, **options)
    real = RouteTrace.load(DATA / "traces" / "rollout.safetensors")
    if form == "vllm-http":
        assert trace.num_sequences == 256
        return
    known = trace.recorded & real.recorded
    same = np.sort(trace.ids(), -1)[known] == np.sort(real.ids(), -1)[known]
    assert same.mean() > 0.97 if form == "megatron" else same.all()  # the other engine: real flips


@pytest.mark.parametrize(
    "name", ["nemo_rl/train_data_step1.jsonl", "slime/train_data_0.pt", "prime_rl/token_export_rank_0.jsonl"]
)
def test_committed_log_prob_samples(name: str) -> None:
    found = diagnose(DATA / "traces" / name)
    assert found.exit_status == 0
    k3 = next(v for n, v in found.mismatch.items() if n.endswith("k3"))
    assert k3 is not None
    assert 0 < k3 < 1e-2


def test_every_sample_is_listed() -> None:
    logs = {"nemo_rl/train_data_step1.jsonl", "slime/train_data_0.pt", "prime_rl/token_export_rank_0.jsonl"}
    there = {str(p.relative_to(DATA / "traces")) for p in (DATA / "traces").rglob("*") if p.is_file()}
    assert there == SAMPLES.keys() | logs
    assert max(p.stat().st_size for p in (DATA / "traces").rglob("*") if p.is_file()) < 300_000
