"""One small job on one process and on several, and what routes cost at the size of a model that is not here.

A layout changes where numbers are computed and not which: until weights have moved, all layouts see the same tokens, and what
they say of them differs by float summation. So the first step of runs is compared, token by token. The costs are formulas
(bytes = tokens x layers x K x item size), not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from rar_lib.config import JobConfig
from rar_lib.errors import ConfigError
from rar_lib.runs.result import RunResult
from rar_lib.runs.tables import traces

TWO = {"processes": 2}
# Flat parameters of JobConfig.from_flat that turn a job on one process into the same job elsewhere.
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process": {},
    "EP 2": {**TWO, "expert_parallel": 2},
    "EP 2 alltoall": {**TWO, "expert_parallel": 2, "dispatcher": "alltoall"},
    "TP 2": {**TWO, "tensor_parallel": 2},
    "PP 2": {**TWO, "pipeline_parallel": 2},
    "DP 2": TWO,
    "FSDP 2": {**TWO, "trainer_engine": "hf"},
    "vLLM server": {"rollout_engine": "vllm_server"},
}


def layout_jobs(names: Sequence[str], **parameters: Any) -> dict[str, JobConfig]:
    """The same job under several layouts.

    Args:
        names: of LAYOUTS; the first is what the others are compared with.
        parameters: of JobConfig.from_flat.

    Raises:
        ConfigError: for a name that is not there, or parameters that do not go together.
    """
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown or not names:
        raise ConfigError(f"layouts: expected some of {', '.join(LAYOUTS)}, found {', '.join(unknown) or 'none'}")
    return {name: JobConfig.from_flat(**parameters, **LAYOUTS[name]) for name in names}


def layout_table(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """A row a layout: the first step of its run, and how far its tokens are from those of the first layout.

    Args:
        runs: name -> run, with single tokens and traces of the first step.

    Returns:
        layout, trainer, tokens, reward, k3 rollout/old, k3 old/new, grad norm, planned (units), executed = resolved (share of router
        rows of the updates), and against the first layout `largest |Δ log-prob|` of the native pass in nats and `routes differ`
        (share of native cells), NaN where tokens differ; as text.

    Raises:
        ConfigError: if a run kept no tokens or traces.
    """
    rows, reference = [], None
    for name, run in runs.items():
        tokens = run.tokens()
        if tokens.empty or "logp_none" not in tokens:
            raise ConfigError(f"{run.path.name}: no single tokens were kept (diagnostics.enabled=false)")
        tokens = tokens[tokens["step"] == 0].reset_index(drop=True)
        _, _, native = traces(run, 0)
        reference = reference or (tokens, native)
        same = len(tokens) == len(reference[0]) and bool((tokens["token"] == reference[0]["token"]).all())
        gap = float((tokens["logp_none"] - reference[0]["logp_none"]).abs().max()) if same else np.nan
        differ = float(_sets_differ(native.experts, reference[1].experts, native.recorded)) if same else np.nan
        step = run.metrics.iloc[0]
        rows.append(
            {
                "layout": name,
                "trainer": run.summary["trainer_engine"],
                "tokens": len(tokens),
                "reward": f"{step['reward/mean']:.3f}",
                "k3 rollout/old": f"{step['mismatch/rollout_old/k3']:.3e}",
                "k3 old/new": f"{step['mismatch/old_new/k3']:.2e}",
                "grad norm": f"{step['update/grad_norm']:.4f}",
                "planned": f"{step['replay/budget']:.0f}",
                "executed = resolved": f"{_or_nan(step.get('replay/update/executed_equals_resolved')):.3f}",
                "largest |Δ log-prob|": f"{gap:.1e}",
                "routes differ": f"{differ:.5f}",
            }
        )
    return pd.DataFrame(rows)


def _or_nan(value: Any) -> float:
    return np.nan if value is None else float(value)


def _sets_differ(a: np.ndarray, b: np.ndarray, known: np.ndarray) -> float:
    """Share of recorded cells whose sets of experts are not the same."""
    differ = (np.sort(a, -1) != np.sort(b, -1)).any(-1)
    return differ[known].mean() if known.any() else np.nan


@dataclass(frozen=True)
class ModelSize:
    """What the size of a route depends on; from the model's published config.json.

    Attributes:
        layers: decoder layers, dense ones included.
        moe_layers: of them.
        top_k, num_experts: of a MoE layer.
    """

    layers: int
    moe_layers: int
    top_k: int
    num_experts: int

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest unsigned type that holds an expert id."""
        return np.min_scalar_type(self.num_experts - 1).itemsize


MODELS = {"Qwen3-30B-A3B": ModelSize(48, 48, 8, 128), "DeepSeek-V3": ModelSize(61, 58, 8, 256)}


def cost_table(sequences: int, length: int, models: Mapping[str, ModelSize] = MODELS) -> pd.DataFrame:
    """Computed, not measured: bytes of the routes of one batch in each place where they lie or travel.

    Args:
        sequences, length: of the batch, prompt and response; the last token has no route.
        models: name -> size.

    Returns:
        model, place, bytes a token, GB of the batch (1e9 bytes), computed (always true).
    """
    rows = []
    for name, size in models.items():
        cells, ids = size.moe_layers, size.moe_layers * size.top_k
        every = size.layers * size.top_k
        places = {
            "RouteTrace: MoE layers, smallest type": ids * size.itemsize,
            "vLLM: all layers, smallest type": every * size.itemsize,
            "SGLang: all layers, int32": every * 4,
            "SGLang over HTTP: base64 of it": every * 4 * 4 / 3,
            "Megatron targets: MoE layers, int64": ids * 8,
            "plan of token_layer: a bit a cell": cells / 8,
            "plan of slots: a bit a route": ids / 8,
        }
        for place, each in places.items():
            total = each * sequences * (length - 1) / 1e9
            rows.append({"model": name, "place": place, "bytes a token": each, "GB": total, "computed": True})
    return pd.DataFrame(rows)
