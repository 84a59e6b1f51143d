#!/usr/bin/env bash
# A quarter of the rollout's routes, the same share of every layer and expert. Not run on a GPU.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_common.sh" uniform R3 "$@"
