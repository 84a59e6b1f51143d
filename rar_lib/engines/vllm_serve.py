"""Start vLLM's OpenAI-compatible server so that it can be a rollout engine.

    python -m rar_lib.engines.vllm_serve CHECKPOINT [--host 127.0.0.1] [--port 8000] [--dtype bfloat16] [vLLM's own arguments]

It is vLLM's own server with the arguments that the engine in process has (route capture, log-probs of what was sampled
from), a worker extension that loads pushed weights and a scheduler that keeps a wave of prompts together
(vllm_worker.py). Weights are pushed through vLLM's development endpoints, which anyone who reaches the port may call:
leave it on 127.0.0.1, or on a network that you trust.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rar_lib.child import end_with_parent

PARENT = "RAR_SERVER_PARENT"  # process id of the session that started the server and ends with it


def end_with_the_session() -> None:
    """Where a session started this server, end with it."""
    if PARENT in os.environ:
        end_with_parent()


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by vLLM's Python names as its command line takes them."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def main(words: Sequence[str] | None = None) -> None:
    """Run the server in this process until it is told to end.

    Raises:
        ConfigError, EngineError: if there is no such checkpoint, vLLM is missing, or it cannot capture these routes.
    """
    from rar_lib.checkpoint import resolve_checkpoint
    from rar_lib.config import DType
    from rar_lib.engines.vllm_rollout import ENVIRONMENT, engine_arguments, longest_sequence
    from rar_lib.errors import EngineError

    parser = argparse.ArgumentParser(prog="python -m rar_lib.engines.vllm_serve", allow_abbrev=False)
    parser.add_argument("checkpoint", help="folder of a Hugging Face MoE, or the name of a shipped checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
    own, others = parser.parse_known_args(words)
    end_with_the_session()
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit("the process that started this server is gone")
    for name, value in {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    except ImportError as error:
        raise EngineError(f"vLLM is not installed ({error}); install the extra rar-lib[vllm]") from None
    path = resolve_checkpoint(own.checkpoint)
    arguments = engine_arguments(vllm.__version__, path, own.dtype, longest_sequence(path)) | {
        "worker_extension_cls": "rar_lib.engines.vllm_worker.PushedWeights",
        "scheduler_cls": "rar_lib.engines.vllm_worker.WaveScheduler",
    }
    where = {"model": str(path), "host": own.host, "port": own.port}
    sys.argv = ["vllm", *command_line({**where, **arguments}), *others]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
