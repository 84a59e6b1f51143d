#!/usr/bin/env bash
# A quarter of the rollout's routes, by key alone. Not run on a GPU.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_common.sh" random R3 "$@"
