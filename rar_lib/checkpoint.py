"""The small base model: a Qwen3-MoE of half a million parameters in Hugging Face layout, warm-started to be worth an RL run.

At random weights no reward is ever seen, and at full skill nothing is left to learn: `warm_start` takes supervised
steps on the task until the model solves it in 35-50 % of its samples. The result ships in data/checkpoints/tiny-moe and
`rar base` makes it again, bit for bit on the same build of torch. Any local Hugging Face MoE works in its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rar_lib.config import TaskConfig
from rar_lib.errors import ConfigError, EngineError
from rar_lib.replay.record import describe_routers
from rar_lib.seeding import derive_seed
from rar_lib.tasks import Problem, Task
from rar_lib.traces.trace import TraceHeader

DATA_DIR = Path(__file__).resolve().parent.parent / "data"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<bos>")
CHARACTERS = (*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n")
Log = Callable[..., None] | None

TINY_MOE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention refuses 16
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.1,  # balanced experts with small margins, as large models have
    "attention_bias": False,
}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with a seeded global generator and leave the caller's as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def resolve_checkpoint(name: str) -> Path:
    """The folder of a checkpoint given by path or by the name of a shipped one.

    Raises:
        ConfigError: if no folder with a `config.json` is found; names both places.
    """
    places = [Path(name), DATA_DIR / "checkpoints" / name]
    for place in places:
        if (place / "config.json").is_file():
            return place.resolve()
    hint = (
        ""
        if DATA_DIR.is_dir()
        else "; shipped checkpoints lie in data/checkpoints of the repository, not in the package"
    )
    raise ConfigError(
        f"model.path {name!r}: expected a Hugging Face folder with config.json at {' or '.join(map(str, places))}{hint}"
    )


def digest_checkpoint(path: Path) -> str:
    """SHA-256 over every file of a checkpoint folder (hidden ones apart), by name and content."""
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            sha.update(str(file.relative_to(path)).encode())
            with file.open("rb") as stream:
                sha.update(hashlib.file_digest(stream, "sha256").digest())
    return sha.hexdigest()


def build_tokenizer() -> Any:
    """A character tokenizer as a Transformers fast tokenizer: 96 characters and four special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        ConfigError: if there is none, it has more tokens than the model, or it lacks an end token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path}: no tokenizer could be loaded: {error}") from None
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # Transformers makes an empty one where there are no files
        raise ConfigError(f"model.path {path}: expected a tokenizer, found none (no tokenizer.json or its like)")
    vocabulary = load_model_config(path).get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ConfigError(f"model.path {path}: the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary}")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path {path}: the tokenizer has no end token, which a response needs")
    return tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that an engine must know: those that end a response, and the one that fills a batch."""

    end: tuple[int, ...]
    pad: int


def special_tokens(path: Path, tokenizer: Any) -> SpecialTokens:
    """The end tokens of tokenizer, config.json and generation_config.json together; padding falls back to an end token."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        file = path / name
        named = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found |= set(named) if isinstance(named, list) else {named}
    end = tuple(sorted(token for token in found if token is not None))
    pad = tokenizer.pad_token_id
    return SpecialTokens(end, tokenizer.eos_token_id if pad is None else pad)


def load_model_config(path: Path) -> Any:
    """The Transformers config of a checkpoint folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def router_header(path: Path) -> TraceHeader:
    """E, K and MoE layer numbers of a checkpoint, from the routers of its model built without memory.

    Raises:
        ReplayError: if the model has no routers, or some that cannot be replayed; names them.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return describe_routers(AutoModelForCausalLM.from_config(load_model_config(path)))


KERNELS = {"eager": ("eager", "eager"), "fused": ("sdpa", "grouped_mm")}


def load_model(path: Path, dtype: torch.dtype = torch.float32, kernels: str = "eager") -> Any:
    """A Transformers causal language model in evaluation mode, on the CPU.

    Args:
        path: checkpoint folder.
        dtype: of its parameters.
        kernels: `eager`, attention by its formula and a loop over experts: what every committed number was computed with; or
            `fused`, PyTorch's attention and grouped matrix products.

    Raises:
        ConfigError: if the folder holds no weights.
        EngineError: if Transformers has no such kernels for the model's class.
    """
    attention, experts = KERNELS[kernels]
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attention, experts_implementation=experts
            )
        except OSError as error:
            raise ConfigError(f"model.path {path}: the weights cannot be loaded: {error}") from None
        except (ValueError, ImportError) as error:
            if kernels == "eager":
                raise
            raise EngineError(f"kernels '{kernels}' ({attention}, {experts}): {error}") from None
    return model.eval()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of Transformers: a small model is loaded many times in a notebook."""
    from transformers.utils import logging as their_logging

    before = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            their_logging.enable_progress_bar()


def build_model(tokenizer: Any, seed: int) -> Any:
    """A random tiny Qwen3-MoE in fp32 for a tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **TINY_MOE,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "grouped_mm"  # faster for one-off training; runs load with eager loops
    with seeded(seed):
        return Qwen3MoeForCausalLM(config)


def supervised_batch(tokenizer: Any, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[n, T]` int64, right-padded, and labels `[n, T]` int64: the answer and the end token, -100 elsewhere."""
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
    answers = [[*tokenizer(p.answer)["input_ids"], tokenizer.eos_token_id] for p in problems]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((len(problems), longest), tokenizer.pad_token_id)
    labels = torch.full((len(problems), longest), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


@torch.no_grad()
def expected_reward(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> float:
    """Mean probability of the exact answer: the reward of sampling at temperature 1, without drawing a sample."""
    tokens, labels = supervised_batch(tokenizer, problems)
    logp = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    terms = logp.gather(-1, wanted.clamp_min(0)[..., None])[..., 0]
    return float(torch.where(wanted >= 0, terms, 0).sum(-1).exp().mean())


def warm_start(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    target: float,
    max_steps: int,
    batch_size: int,
    lr: float,
    log: Log = None,
) -> dict[str, float]:
    """Supervised steps on the answers until the model is worth an RL run.

    Args:
        model: a Transformers MoE; trained in place, with its load-balancing loss.
        tokenizer: its tokenizer.
        task: where problems come from (train split, from index 2**29 on, which an RL run does not reach).
        target: stop once the expected reward on 512 held-out problems, looked at every 25 steps, is this high.
        max_steps: give up after so many.
        batch_size, lr: AdamW at a constant rate.
        log: called with (step, loss, expected reward).

    Returns:
        steps, loss of the last batch (nats a token, load-balancing loss included) and expected reward at the end.

    Raises:
        ConfigError: if the target was not reached.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    held_out = [task.problem(i, "held_out") for i in range(512)]
    model.train()
    for step in range(1, max_steps + 1):
        first = 2**29 + step * batch_size
        tokens, labels = supervised_batch(tokenizer, [task.problem(first + i) for i in range(batch_size)])
        mask = (tokens != tokenizer.pad_token_id).long()
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels, output_router_logits=True).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == max_steps:
            reward = expected_reward(model, tokenizer, held_out)
            facts = {"steps": step, "loss": float(loss.detach()), "expected_reward": reward}
            if log is not None:
                log(*facts.values())
            if reward >= target:
                model.eval()
                return facts
    raise ConfigError(f"warm start: expected a reward of {target} within {max_steps} steps, found {reward:.3f}")


def save_checkpoint(model: Any, tokenizer: Any, path: Path) -> None:
    """Write config, weights (Hugging Face names, one tensor an expert) and tokenizer into a folder, readable for all."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    for file in path.iterdir():
        file.chmod(0o644)  # weights are written for their owner only


def make_base(
    path: Path,
    *,
    target: float = 0.42,
    max_steps: int = 4000,
    batch_size: int = 128,
    lr: float = 2e-3,
    seed: int = 0,
    log: Log = None,
) -> None:
    """Build, warm-start and save the base checkpoint; `base.json` in its folder says how it was made.

    Args:
        path: folder to write.
        target, max_steps, batch_size, lr, log: as for `warm_start`.
        seed: of the first weights and of the training.

    Raises:
        ConfigError: if the target was not reached.
    """
    tokenizer, task = build_tokenizer(), Task(TaskConfig())
    model = build_model(tokenizer, seed)
    with seeded(derive_seed(seed, "warm-start")):
        facts = warm_start(
            model, tokenizer, task, target=target, max_steps=max_steps, batch_size=batch_size, lr=lr, log=log
        )
    save_checkpoint(model, tokenizer, path)
    made = {"target": target, "batch_size": batch_size, "lr": lr, "seed": seed, **facts, "torch": torch.__version__}
    made["task"] = task.config.model_dump(mode="json")
    (path / "base.json").write_text(json.dumps(made, indent=2) + "\n")
