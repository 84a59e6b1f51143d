"""Run in verl's environment: hydra composes the arguments of run scripts on verl's own config files.

    python recipe_side.py in.json out.json    # {name: arguments} -> {name: {config, unknown} or {error}}

`unknown` are the keys of the recipe's config file that verl's config has not.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # hydra 1.3 beside omegaconf 2.4

import yaml  # noqa: E402
from hydra import compose, initialize_config_dir, initialize_config_module  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402


def leaves(tree: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, (*prefix, str(name)))
    else:
        yield prefix


def has(tree: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


def judged(arguments: list[str], theirs: Any) -> dict[str, Any]:
    options = dict(a.removeprefix("--").split("=", 1) for a in arguments if a.startswith("--"))
    overrides = [a for a in arguments if not a.startswith("--")]
    with initialize_config_dir(options["config-path"], version_base=None):
        try:
            config = compose(options["config-name"], overrides=overrides)
        except HydraException as error:
            return {"error": str(error)}
    own = yaml.safe_load((Path(options["config-path"]) / f"{options['config-name']}.yaml").read_text())
    paths = leaves({k: v for k, v in own.items() if k not in ("hydra", "defaults")})
    unknown = [".".join(path) for path in paths if not has(theirs, path)]
    return {"config": OmegaConf.to_container(config, resolve=False), "unknown": unknown}


def main(given: str, out: str) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        theirs = OmegaConf.to_container(compose("ppo_megatron_trainer"), resolve=False)
    asked = json.loads(Path(given).read_text())
    Path(out).write_text(json.dumps({name: judged(arguments, theirs) for name, arguments in asked.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
