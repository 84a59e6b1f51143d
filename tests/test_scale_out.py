"""Layouts of one job, and sizes of routes that a person can compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rar_lib import figures
from rar_lib.errors import ConfigError
from rar_lib.job import run_job
from rar_lib.scale_out import LAYOUTS, MODELS, cost_table, layout_jobs, layout_table

JOB = {"engine": "hf", "steps": 1, "eval_prompts": 0, "prompts_per_step": 8, "group_size": 4, "updates_per_batch": 2}


def test_bytes_of_a_token_by_hand() -> None:
    """48 layers x 8 of Qwen3-30B-A3B are 384 B as uint8 and 1,536 B as int32; DeepSeek-V3 has 58 MoE layers of 61."""
    table = cost_table(1, 32769).set_index(["model", "place"])["bytes a token"]
    qwen, deepseek = table["Qwen3-30B-A3B"], table["DeepSeek-V3"]
    assert qwen["vLLM: all layers, smallest type"] == 384
    assert qwen["SGLang: all layers, int32"] == 1536
    assert deepseek["RouteTrace: MoE layers, smallest type"] == 58 * 8
    assert deepseek["vLLM: all layers, smallest type"] == 61 * 8
    assert deepseek["SGLang over HTTP: base64 of it"] == pytest.approx(61 * 8 * 4 * 4 / 3)
    assert deepseek["Megatron targets: MoE layers, int64"] == 58 * 8 * 8
    assert qwen["plan of token_layer: a bit a cell"] == 6
    assert qwen["plan of slots: a bit a route"] == 48
    batch = cost_table(2, 32769).set_index(["model", "place"])["GB"]  # the last token has no route
    assert batch["Qwen3-30B-A3B", "SGLang: all layers, int32"] == pytest.approx(2 * 32768 * 1536 / 1e9)
    assert [size.itemsize for size in MODELS.values()] == [1, 1]  # 256 experts still fit a byte


def test_the_figure_says_that_it_is_computed() -> None:
    figure = figures.route_costs(cost_table(4, 1024), "4 sequences")
    assert "computed" in figures.alt_text(figure)
    (axes,) = figure.axes
    assert len(axes.collections) == 7 * 2
    assert "computed" in [text.get_text() for text in axes.texts]


def test_every_layout_is_a_job_and_unknown_ones_are_refused() -> None:
    jobs = layout_jobs(list(LAYOUTS), **JOB | {"engine": "real"})
    assert {name: job.trainer.processes for name, job in jobs.items() if job.trainer.processes == 1} == {
        "1 process": 1,
        "vLLM server": 1,
    }
    assert jobs["FSDP 2"].trainer.engine == "hf"
    with pytest.raises(ConfigError, match=r"layouts: expected some of 1 process, .* found EP 3"):
        layout_jobs(["EP 3"], **JOB)


def test_a_layout_that_differs_shows(tmp_path: Path) -> None:
    """Other arithmetic moves log-probs, other tokens cannot be compared; the same job again is equal to the last bit."""
    one, low, other = (
        run_job(layout_jobs(["1 process"], **JOB, **more)["1 process"], runs_dir=tmp_path, show="off")
        for more in ({}, {"trainer_dtype": "bfloat16"}, {"seed": 1})
    )
    table = layout_table({"a": one, "again": one, "bf16": low, "other": other}).set_index("layout")
    gaps = table["largest |Δ log-prob|"].astype(float)
    assert gaps["a"] == gaps["again"] == 0
    assert gaps["bf16"] > 1e-3
    assert float(table.loc["bf16", "routes differ"]) > 0
    assert np.isnan(gaps["other"])
