"""Starts the ranks of a trainer with torchrun's agent: `python -m rar_lib.engines.launcher FOLDER PROCESSES`.

The agent watches the ranks, ends all when one fails and knows which failed first; that is written to `failure.json` in the
folder, beside the ranks' output. On several machines torchrun itself starts `rar_lib.engines.rank` (not run there).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(folder: Path, processes: int) -> int:
    """Exit status: 0 if every rank ended by itself."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
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
    from rar_lib.child import end_with_parent

    end_with_parent()
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
