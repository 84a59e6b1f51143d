"""JobConfig: the one description of a run.

A config comes from YAML, JSON, `--set a.b=value` or the flat scalars of a notebook's parameters cell, and ends as the
same frozen object; unknown fields and values out of range are refused by name. verl's spellings of the replay switch
are accepted as they are (`router_replay: {enabled, mode}` and the two launch keys), so that a recipe carries over; short names and
launch keys are turned into fields by config_keys.py.

What a run computes is decided by this object alone: its resolved form is hashed into the run's id. Where things are
written (`runs_dir`) and how progress is shown are arguments of `run_job`, not part of the experiment.

One file: whoever sets up a run finds every field, its unit and the rules between fields here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rar_lib import config_keys
from rar_lib.errors import ConfigError

DType = Literal["float32", "bfloat16"]


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Imported here, so that configs in JSON need no YAML package.

    Raises:
        ValueError: if it is not YAML.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def read_values(path: Path, what: str) -> Any:
    """What a file holds: JSON by its suffix, else YAML.

    Raises:
        ConfigError: for a file that cannot be read; `what` names its kind.
    """
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"{what} file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what} file {path}: {error}") from None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Part):
    """Which checkpoint to start from."""

    path: str = Field("tiny-moe", description="folder of a Hugging Face MoE, or the name of a shipped checkpoint")


class TaskConfig(_Part):
    """What to solve. A prompt is reproducible from its index alone."""

    name: str = Field(
        "chain_sum", description="a reasoning-gym task with an `expression`, or 'file' for one's own prompts"
    )
    options: dict[str, Any] = Field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
        description="parameters of the reasoning-gym task",
    )
    reverse_digits: bool = Field(
        True, description="answers are written last character first, which suits sums; off by default for 'file'"
    )
    prompts_file: str | None = Field(None, description="JSON lines with `prompt` and `answer`, for name 'file'")
    held_out_file: str | None = Field(None, description="the same for evaluation; without it, on the training prompts")
    reward: str = Field(
        "exact_match", description="'exact_match' or 'path/to/file.py:function' (answer, entry) -> float"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_text_is_not_reversed(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == "file":
            return {"reverse_digits": False, **values}
        return values

    @model_validator(mode="after")
    def _file_needs_a_path(self) -> TaskConfig:
        if (self.name == "file") != (self.prompts_file is not None):
            raise ValueError("task 'file' and prompts_file go together: give both or neither")
        if self.held_out_file is not None and self.name != "file":
            raise ValueError(
                "held_out_file goes with task 'file'; reasoning-gym tasks have held-out items of their own"
            )
        return self


class SamplingConfig(_Part):
    """How tokens are drawn."""

    temperature: float = Field(1.0, gt=0, description="divides the logits; log-probs are of what was sampled from")
    max_new_tokens: int = Field(6, gt=0, description="response tokens at most, the end token included")


Kernels = Literal["eager", "fused"]
KERNELS: Any = Field(
    "eager",
    description="of a Transformers model (hf only): eager attention and a loop over experts, or fused: PyTorch's attention and "
    "grouped matrix products, which are faster and round otherwise",
)


def _require_hf_kernels(kernels: Kernels, engine: str) -> None:
    if kernels != "eager" and engine not in ("hf", "auto"):
        raise ValueError(
            f"kernels '{kernels}' are those of a Transformers model; engine is '{engine}', which has its own"
        )


class RolloutConfig(_Part):
    """The engine that samples."""

    engine: Literal["vllm", "hf", "vllm_server", "sglang_server", "auto"] = "vllm"
    url: str | None = Field(
        None, description="of the server, such as http://127.0.0.1:8000; vllm_server: without it one is started"
    )
    dtype: DType = Field("bfloat16", description="arithmetic of the engine")
    precision: Literal["native", "fp8_weights"] = Field(
        "fp8_weights",
        description="fp8_weights: linear weights are rounded to e4m3 with a scale per output row before they are pushed",
    )
    router_noise: float = Field(0.0, ge=0, description="standard deviation of noise on the router logits (hf only)")
    zero_mismatch: bool = Field(False, description="re-score the sample with the trainer's own forward (hf only)")
    kernels: Kernels = KERNELS
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _knobs_of_hf(self) -> RolloutConfig:
        if self.engine in ("vllm", "vllm_server") and self.sampling.temperature < 0.01:
            raise ValueError(f"vLLM samples no cooler than 0.01; sampling.temperature is {self.sampling.temperature}")
        if self.engine not in ("hf", "auto") and (self.router_noise or self.zero_mismatch):
            raise ValueError(f"router_noise and zero_mismatch are knobs of the hf rollout; engine is '{self.engine}'")
        _require_hf_kernels(self.kernels, self.engine)
        served = self.engine in ("vllm_server", "sglang_server")
        if self.url is not None and not (served and self.url.startswith(("http://", "https://"))):
            raise ValueError(
                f"url is the http address of engine vllm_server or sglang_server; found {self.url!r} with engine '{self.engine}'"
            )
        if self.engine == "sglang_server" and self.url is None:
            raise ValueError("engine 'sglang_server' needs the url of a running server; found none")
        if self.zero_mismatch and (self.dtype, self.precision, self.router_noise) != ("float32", "native", 0.0):
            raise ValueError(
                "zero_mismatch means the trainer's arithmetic: dtype float32, precision native, router_noise 0"
            )
        return self


class TrainerConfig(_Part):
    """The engine that learns."""

    engine: Literal["megatron", "hf", "auto"] = "megatron"
    dtype: DType = "float32"
    kernels: Kernels = KERNELS
    micro_batch_size: int = Field(64, gt=0, description="sequences a forward")
    processes: int = Field(
        1, ge=1, description="of the trainer: Megatron's ranks, or FSDP2's where the engine is hf; 1: in this process"
    )
    tensor_parallel: int = Field(1, ge=1, description="Megatron: with sequence parallel")
    pipeline_parallel: int = Field(1, ge=1, description="Megatron: stages of equally many layers, 1F1B")
    virtual_pipeline: int = Field(1, ge=1, description="Megatron: chunks of layers a stage, interleaved")
    expert_parallel: int = Field(1, ge=1, description="Megatron: inside the data-parallel ranks")
    expert_tensor_parallel: int = Field(1, ge=1, description="Megatron: processes that share an expert")
    dispatcher: Literal["allgather", "alltoall"] = Field(
        "allgather", description="Megatron: how tokens travel to experts"
    )
    recompute: bool = Field(False, description="recompute activations in the backward pass")
    recompute_granularity: Literal["full", "selective"] = Field(
        "full", description="Megatron: whole layers, or attention cores and MoE layers"
    )

    @property
    def data_parallel(self) -> int:
        """Processes that hold different sequences."""
        return self.processes // (self.tensor_parallel * self.pipeline_parallel)

    @model_validator(mode="after")
    def _processes_divide(self) -> TrainerConfig:
        _require_hf_kernels(self.kernels, self.engine)
        tensor, pipeline = self.tensor_parallel, self.pipeline_parallel
        expert = self.expert_parallel * self.expert_tensor_parallel
        if self.engine == "hf" and (tensor, pipeline, expert, self.virtual_pipeline) != (1, 1, 1, 1):
            raise ValueError(
                f"trainer.engine hf shards with FSDP2 over processes alone; found tensor_parallel {tensor}, pipeline_parallel "
                f"{pipeline}, virtual_pipeline {self.virtual_pipeline}, expert_parallel {self.expert_parallel}, "
                f"expert_tensor_parallel {self.expert_tensor_parallel}"
            )
        if self.processes % (tensor * pipeline):
            raise ValueError(
                f"processes {self.processes} must be a multiple of tensor_parallel {tensor} x pipeline_parallel {pipeline}"
            )
        if (self.processes // pipeline) % expert:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} x expert_tensor_parallel {self.expert_tensor_parallel} must divide the "
                f"{self.processes // pipeline} processes of a pipeline stage (processes {self.processes} / pipeline_parallel {pipeline})"
            )
        if self.virtual_pipeline > 1 and pipeline == 1:
            raise ValueError(f"virtual_pipeline {self.virtual_pipeline} needs pipeline_parallel above 1")
        return self


class TIS(_Part):
    """Truncated importance sampling (rl/corrections/tis.py)."""

    name: Literal["tis"]
    cap: float = Field(2.0, gt=0, description="largest weight of a token")


class IcePop(_Part):
    """Double-sided masking of tokens (rl/corrections/icepop.py)."""

    name: Literal["icepop"]
    low: float = Field(0.5, gt=0, lt=1, description="ratios old/rollout below it lose their token")
    high: float = Field(5.0, gt=1, description="and those above it")


class SeqMIS(_Part):
    """Masked importance sampling of whole sequences (rl/corrections/seq_mis.py)."""

    name: Literal["seq_mis"]
    cap: float = Field(2.0, gt=0, description="largest ratio of a sequence; beyond it the sequence is dropped")


class GeoRS(_Part):
    """Rejection of sequences by the geometric mean of their ratios (rl/corrections/geo_rs.py)."""

    name: Literal["geo_rs"]
    low: float = Field(0.99, gt=0, lt=1, description="smallest mean ratio of a kept sequence; verl's preset: 0.999")
    high: float = Field(1.01, gt=1, description="largest; verl's preset: 1.001")


class OPSM(_Part):
    """Off-policy sequence masking (rl/corrections/opsm.py)."""

    name: Literal["opsm"]
    delta: float = Field(
        0.01, ge=0, description="nats a token: answers with A < 0 that moved further are dropped; slime: 1e-4, TRL: 0.5"
    )


class RSPO(_Part):
    """Router-shift weights (rl/corrections/rspo.py)."""

    name: Literal["rspo"]
    floor: float = Field(0.8, gt=0, le=1, description="smallest weight of a token")


Correction = Annotated[TIS | IcePop | SeqMIS | GeoRS | OPSM | RSPO, Field(discriminator="name")]
CORRECTIONS: dict[str, type[_Part]] = {
    "tis": TIS, "icepop": IcePop, "seq_mis": SeqMIS, "geo_rs": GeoRS, "opsm": OPSM, "rspo": RSPO,
}  # fmt: skip
WEIGHTS = ("tis", "icepop", "seq_mis")  # importance weights old/rollout
CLIP = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4)}


class AlgorithmConfig(_Part):
    """The objective, what corrects it, and its batch."""

    objective: Literal["grpo", "gspo", "gmpo"] = Field("grpo", description="how ratios are formed and clipped")
    anchor: Literal["old", "rollout"] = Field(
        "old", description="what the ratio is taken against: the trainer's old pass, or the log-probs of the rollout"
    )
    corrections: tuple[Correction, ...] = Field(
        (), description="of the mismatch between old and rollout; names joined by + for their defaults"
    )
    freeze_router: bool = Field(False, description="a baseline without replay: router weights do not learn")
    prompts_per_step: int = Field(64, gt=0)
    group_size: int = Field(8, ge=2, description="samples a prompt")
    updates_per_batch: int = Field(
        4, ge=1, description="optimizer steps a rollout batch, each on its own share of the prompts"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="by objective: grpo 0.2, gspo 3e-4, gmpo 0.4 (of the log)")
    clip_high: float = Field(0.2, gt=0, description="by objective: grpo 0.2, gspo 4e-4, gmpo 0.4 (of the log)")
    lr: float = Field(1e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _clips_of_the_objective(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("objective"), str) and values["objective"] in CLIP:
            low, high = CLIP[values["objective"]]
            return {"clip_low": low, "clip_high": high, **values}
        return values

    @field_validator("corrections", mode="before")
    @classmethod
    def _bare_names(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [name.strip() for name in value.split("+")] if value not in ("", "none") else []
        if isinstance(value, (list, tuple)):
            named = [{"name": one} if isinstance(one, str) else one for one in value]
            return sorted(
                named, key=lambda one: str(one.get("name") if isinstance(one, dict) else getattr(one, "name", ""))
            )
        return value

    @model_validator(mode="after")
    def _corrections_that_go_together(self) -> AlgorithmConfig:
        names = [one.name for one in self.corrections]
        if len(set(names)) < len(names):
            raise ValueError(f"corrections: expected each once, found {'+'.join(names)}")
        weights = [name for name in names if name in WEIGHTS]
        if len(weights) > 1:
            raise ValueError(f"corrections: {' and '.join(weights)} are both weights old/rollout; choose one")
        if weights and self.anchor == "rollout":
            raise ValueError(
                f"corrections: {weights[0]} weighs by old/rollout, which the ratio already contains with anchor 'rollout'"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> AlgorithmConfig:
        if self.prompts_per_step % self.updates_per_batch:
            raise ValueError(
                f"prompts_per_step {self.prompts_per_step} must be a multiple of updates_per_batch "
                f"{self.updates_per_batch}, so that every update sees whole groups and equal shares"
            )
        return self


class ScoreConfig(_Part):
    """How the score of an expert is made, for policies that rank it (replay/scores.py)."""

    estimator: Literal["gate", "param", "param_exact", "swap"] = Field(
        "gate",
        description="what is squared: gradients of router logits, of expert weights, or the price of an exchange",
    )
    aggregation: Literal["per_route", "mass", "shrunk", "gate_free"] = Field(
        "per_route", description="from routes to a cell: mean, sum, mean shrunk to the layer's, or mean of q/g^2"
    )
    labels: Literal["rollout", "resampled"] = Field(
        "rollout", description="likelihood of the sampled tokens, or of tokens drawn again by the trainer"
    )
    shrinkage: float = Field(32.0, ge=0, description="of aggregation shrunk, in routes")
    ema: float = Field(0.0, ge=0, lt=1, description="weight of the batches before; 0: each batch alone")


class RouterReplayConfig(_Part):
    """verl's switch, and beside it which routes are forced."""

    enabled: bool = True
    mode: Literal["disabled", "R2", "R3"] = Field(
        "R3", description="where the record comes from: R2 the old-log-prob pass, R3 the rollout"
    )
    policy: str = Field("full", description="which recorded routes are forced")
    unit: Literal["token_layer", "slot", "bias"] = Field(
        "token_layer", description="what is counted and forced: sets, single experts, or a bonus on recorded experts"
    )
    budget: str | None = Field(
        None, description="share of the recorded units, such as 0.25 or 1/4; none for policies full and threshold"
    )
    score: ScoreConfig = Field(
        ScoreConfig(), description="for policies that rank experts; a bare name is its estimator"
    )
    ratio: float | None = Field(None, gt=0, description="of policy threshold: share of the weakest live score")
    gates: Literal["live", "recorded"] = Field(
        "live",
        description="recorded: replay the rollout's gate weights too, a diagnostic upper bound (hf engines only)",
    )
    seed: int = Field(0, ge=0, description="of the keys that decide choices and ties")

    @field_validator("budget", mode="before")
    @classmethod
    def _exact_share(cls, value: Any) -> Any:
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @field_validator("score", mode="before")
    @classmethod
    def _bare_estimator(cls, value: Any) -> Any:
        return {"estimator": value} if isinstance(value, str) else value

    @field_validator("mode", "policy", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(
                f"found the boolean {value}: YAML reads a bare off, no, on or yes as one; write it in quotes, "
                "or switch replay off with enabled: false"
            )
        return value

    @property
    def arm(self) -> str:
        """Key of the mode registry: 'none', 'R2' or 'R3'."""
        return "none" if not self.enabled or self.mode == "disabled" else self.mode


class EvaluationConfig(_Part):
    """Held-out prompts, always without replay."""

    every: int = Field(
        0, ge=0, description="steps between evaluations; 0: only before the first and after the last step"
    )
    prompts: int = Field(128, ge=0, description="held-out prompts, one sample each; 0: no evaluation")


class DiagnosticsConfig(_Part):
    """What is measured beside the run. None of it changes the run."""

    enabled: bool = Field(
        True, description="false: only what the run itself computes; no paired pass, noise floor or traces"
    )
    noise_floor_every: int = Field(10, ge=1, description="steps between two measurements of the engines' own noise")
    save_traces_every: int = Field(
        0, ge=0, description="steps between two stored route traces; 0: the first and last step"
    )
    probe_sequences: int = Field(
        64,
        ge=0,
        description="answers of the first step that are scored again after every step, for routing drift; 0: none",
    )


class JobConfig(_Part):
    """One run."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    steps: int = Field(20, gt=0)
    seed: int = Field(0, ge=0, lt=2**31)
    checkpoint_every: int = Field(10, ge=0, description="steps between two checkpoints; the last step is always kept")

    @model_validator(mode="after")
    def _routers_in_one_process(self) -> JobConfig:
        split = (self.trainer.tensor_parallel, self.trainer.pipeline_parallel)
        if any(one.name == "rspo" for one in self.algorithm.corrections) and split != (1, 1):
            raise ValueError(
                "algorithm.corrections rspo looks at the router scores of all layers and tokens, which tensor_parallel "
                f"{split[0]} and pipeline_parallel {split[1]} spread over processes; use data or expert parallel"
            )
        return self

    @model_validator(mode="after")
    def _recorded_gates(self) -> JobConfig:
        engines = (self.rollout.engine, self.trainer.engine)
        if self.router_replay.gates == "recorded" and self.router_replay.unit != "token_layer":
            raise ValueError(
                f"router_replay.gates 'recorded' replays whole sets; expected unit token_layer, found {self.router_replay.unit}"
            )
        if self.router_replay.gates == "recorded" and (engines != ("hf", "hf") or self.router_replay.arm != "R3"):
            raise ValueError(
                "router_replay.gates 'recorded' needs mode R3 with rollout.engine hf and trainer.engine hf, since vLLM records no gate "
                f"weights; found {self.router_replay.arm} with {engines[0]} and {engines[1]}"
            )
        return self

    # ---------------------------------------------------------------- building

    @classmethod
    def build(cls, values: Mapping[str, Any], overrides: Iterable[str] = ()) -> JobConfig:
        """Validate nested values, verl's spellings included, after applying `a.b=value` overrides.

        Raises:
            ConfigError: one line a fault: the field, what is allowed, what was found.
        """
        tree = json.loads(json.dumps(dict(values)))
        for item in overrides:
            key, sign, text = item.partition("=")
            if not sign or not key.strip():
                raise ConfigError(f"--set {item!r}: expected a.b=value")
            try:
                value = parse_yaml(text)
            except ValueError as error:
                raise ConfigError(f"--set {item!r}: {error}") from None
            config_keys.put(tree, key.strip(), value)
        config_keys.adopt_verl_keys(tree)
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from None

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = ()) -> JobConfig:
        """Read YAML or JSON (by suffix); no content is all defaults.

        Raises:
            ConfigError: for a file that cannot be read or holds no mapping, and as `build`.
        """
        path = Path(path)
        values = read_values(path, "config")
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"config file {path}: expected a mapping, found {type(values).__name__}")
        return cls.build(values or {}, overrides)

    @classmethod
    def from_flat(cls, **parameters: Any) -> JobConfig:
        """From the flat scalars of a notebook: each name is one of config_keys.FLAT_NAMES.

        `policy` is an arm: 'none', 'R2' or 'R3'; `routes` says which of its routes are forced. `engine` sets both engines: 'auto',
        'hf', or 'real' (vLLM and Megatron-Core).

        Raises:
            ConfigError: one line a fault: a name that is none of them, and as `build`.
        """
        tree, faults = config_keys.from_flat(parameters)
        try:
            found = cls.build(tree)
        except ConfigError as error:
            faults.append(str(error))
        if faults:
            raise ConfigError("\n".join(faults))
        return found

    def resolved(self) -> dict[str, Any]:
        """Every value, defaults included, as plain JSON types."""
        return self.model_dump(mode="json")


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line a fault of a value that a model refused: the field, what is allowed, what was found."""
    lines = []
    for fault in error.errors(include_url=False):
        name = ".".join(str(part) for part in fault["loc"]) or "config"
        if fault["type"] == "extra_forbidden":
            lines.append(f"{name}: no such field; allowed here: {', '.join(_fields_at(fault['loc'][:-1], model))}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            told = "found" in message or isinstance(fault["input"], (dict, list, tuple))
            lines.append(f"{name}: {message}" + ("" if told else f"; found {fault['input']!r}"))
    return "\n".join(lines)


def _fields_at(path: tuple[int | str, ...], model: Any) -> list[str]:
    for name in path:
        if isinstance(name, int):  # a place in a list; the name of its kind comes next
            continue
        if name in CORRECTIONS:
            model = CORRECTIONS[name]
        elif name in model.model_fields:
            model = model.model_fields[name].annotation
    return list(getattr(model, "model_fields", {}))
