"""Is swap good because its gradient is of the sampled tokens? The same policy with labels that the trainer drew again.

    OMP_NUM_THREADS=1 python -m benchmarks.swap_labels [--out FILE]

The price of an exchange is a gradient of the log-likelihood of labels. With the sampled tokens as labels it is large where the
trainer finds a sampled token improbable, which is where mismatch shows. With labels drawn anew at the same contexts it knows
nothing of that. Both, and margin, on the same batches as the frontier: three stages of one job, three batches at each, old
pass only; efficiencies over all prompts with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from rar_lib.arms import Arm, score_arms
from rar_lib.config import JobConfig, ScoreConfig
from rar_lib.engines.session import EngineSession
from rar_lib.metrics.contrasts import efficiencies
from rar_lib.runs.store import RUNS_DIR, describe_environment
from rar_lib.stages import stages

BUDGETS = ("0.02", "0.05", "0.1", "0.25")
ARMS = {
    "swap, sampled labels": lambda b: Arm("swap", "token_layer", b),
    "swap, labels drawn anew": lambda b: Arm("swap", "token_layer", b, score=ScoreConfig(labels="resampled")),
    "margin": lambda b: Arm("margin", "token_layer", b),
}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    job = JobConfig.from_flat(policy="none", engine="real", steps=20, checkpoint_every=10)
    names = {make(b).name: f"{name}, {b}" for name, make in ARMS.items() for b in BUDGETS}
    arms = [make(b) for make in ARMS.values() for b in BUDGETS]
    prompts: list[pd.DataFrame] = []
    binding: list[pd.DataFrame] = []
    with EngineSession() as session:
        for stage in stages(job, session, RUNS_DIR, "none"):
            flips = stage.flips()
            for i in range(3):
                sample, batch, _ = stage.sample(1 + i)
                scores = score_arms(stage.trainer, batch, sample, arms, flips=flips, batch_number=len(prompts))
                prompts.append(scores.by_prompt.assign(checkpoint=stage.name))
                binding.append(scores.table)
    found = efficiencies(pd.concat(prompts, ignore_index=True))
    shares = pd.concat(binding).groupby("arm")["binding"].mean()
    table = found.table().set_index("arm")
    new, old = (f"swap {{}} token_layer{tail}" for tail in (" gate/per_route/resampled", ""))
    result = {
        "arms": {
            label: {"efficiency": round(float(table.loc[arm, "efficiency"]), 3),  # type: ignore[arg-type]
                    "interval": [round(float(table.loc[arm, end]), 3) for end in ("low", "high")],  # type: ignore[arg-type]
                    "binding": round(float(shares[arm]), 5)}
            for arm, label in names.items()
        },
        "full replay binds": round(float(shares["full"]), 5),
        "drawn anew - margin": {
            b: {k: round(v, 3) for k, v in found.difference(new.format(b), f"margin {b} token_layer").items()} for b in BUDGETS
        },
        "sampled - drawn anew": {
            b: {k: round(v, 3) for k, v in found.difference(old.format(b), new.format(b)).items()} for b in BUDGETS
        },
        "environment": describe_environment(0),
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
