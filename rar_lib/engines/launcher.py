"""Starts the ranks of a trainer on this machine with torchrun's agent: `python -m rar_lib.engines.launcher FOLDER PROCESSES`.

The agent watches the ranks, ends all when one fails and knows which failed first; that is written to `failure.json` in the
folder, beside the ranks' output. On several machines RAR_NODES says how many, RAR_ENDPOINT where the first listens (host:port) and
RAR_NODE which this is: the first is the one where the run is driven from, on each of the others this module is started by hand.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rar_lib.child import PARENT, end_with_parent

if __name__ == "__main__" and PARENT in os.environ:  # started by the process that drives the run
    end_with_parent()

NODES, NODE, ENDPOINT = "RAR_NODES", "RAR_NODE", "RAR_ENDPOINT"


def rendezvous() -> dict[str, Any]:
    """How the agents of all machines find each other, as torch's LaunchConfig takes it."""
    nodes = int(os.environ.get(NODES, "1"))
    if nodes == 1:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    place = {"rdzv_backend": "static", "rdzv_endpoint": os.environ[ENDPOINT]}
    return {**place, "rdzv_configs": {"rank": int(os.environ.get(NODE, "0")), "timeout": 900}}


def main(folder: Path, processes: int) -> int:
    """Start this machine's share of the processes.

    Args:
        folder: for the ranks' output and `failure.json`.
        processes: of all machines together.

    Returns:
        Exit status: 0 if every rank ended by itself, 1 if one failed, 2 if the machines cannot be shared out like this.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    nodes = int(os.environ.get(NODES, "1"))
    if processes % nodes:
        print(f"{processes} processes do not divide by {nodes} machines ({NODES})", file=sys.stderr)
        return 2
    if nodes > 1 and ENDPOINT not in os.environ:
        print(f"{NODES}={nodes}: expected {ENDPOINT}=host:port of the first machine, found none", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[PARENT] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes // nodes,
        run_id="rar" if nodes > 1 else folder.name,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
        **rendezvous(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "rar_lib.engines.rank")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told = {"rank": rank, "exitcode": failure.exitcode, "pid": failure.pid}
        partial = folder / "failure.partial"
        partial.write_text(json.dumps(told))
        os.replace(partial, folder / "failure.json")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
