#!/usr/bin/env bash
# R3: the rollout's routes, all of them, in the old-log-prob pass and the updates. Not run on a GPU.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_common.sh" r3 R3 "$@"
