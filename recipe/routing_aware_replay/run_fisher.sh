#!/usr/bin/env bash
# A quarter of the rollout's routes, those of the experts with the highest Fisher scores (SCORES). Not run on a GPU.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_common.sh" fisher R3 "$@"
