"""One rank of a trainer: does what the first rank is told by the process that drives the run.

The first rank holds the connection to the driver and broadcasts each call to the others, so that all make it together. An
error is written to a file before anything else, because the other ranks may wait for this one in a collective forever.
"""

from __future__ import annotations

from rar_lib.child import end_with_parent

if __name__ == "__main__":
    end_with_parent()

import datetime
import gc
import json
import os
import pickle
import tempfile
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from rar_lib.engines.base import Trainer
from rar_lib.engines.trainers import build_trainer
from rar_lib.errors import EngineError

FOLDER, KEY = "RAR_RANKS_FOLDER", "RAR_RANKS_KEY"
PATIENCE = datetime.timedelta(days=30)  # between two calls the driver may sample for as long as it likes


def perform(
    trainer: Trainer | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Trainer | None, Any]:
    """The trainer afterwards, and what the call returned.

    Args:
        trainer: of this rank; None before the first `build`.
        name, args, kwargs: `build`, or a method of Trainer, and what it is given.

    Raises:
        EngineError: for a method before any `build`; else what the call raises.
    """
    if name == "build":
        return build_trainer(*args, **kwargs), None
    if trainer is None:
        raise EngineError(f"{name}: no trainer was built")
    result = getattr(trainer, name)(*args, **kwargs)
    return trainer, list(result) if name == "weights" else result


def main() -> None:
    """Serve until told to close, or until the driver is gone."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = torch.distributed.get_rank()
    calls = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    # On other machines than the first there is no driver, and errors are read from the logs.
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="rar-rank-"))
    driver = None
    if rank == 0:
        driver = Client(str(folder / "socket"), authkey=bytes.fromhex(os.environ[KEY]))
    trainer: Trainer | None = None
    while True:
        message: list[Any] = [None]
        if driver is not None:
            try:
                message = [pickle.loads(driver.recv_bytes())]
            except EOFError:
                message = [("close", (), {})]
        torch.distributed.broadcast_object_list(message, src=0, group=calls)
        name, args, kwargs = message[0]
        if name == "close":
            break
        error, result = None, None
        if name == "build":  # the new one's process groups take the place of the old one's
            trainer = None
            gc.collect()  # Megatron's objects refer to each other, and to groups
        try:
            trainer, result = perform(trainer, name, args, kwargs)
        except Exception as caught:
            traceback.print_exc()
            error = {"rank": rank, "type": type(caught).__name__, "message": str(caught)}
            partial = folder / f"error-{rank}.partial"
            partial.write_text(json.dumps(error))
            os.replace(partial, folder / f"error-{rank}.json")
        errors: list[Any] | None = [None] * torch.distributed.get_world_size() if rank == 0 else None
        torch.distributed.gather_object(error, errors, dst=0, group=calls)
        if driver is not None:
            driver.send_bytes(pickle.dumps((result, [e for e in errors or [] if e is not None])))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
