#!/usr/bin/env bash
# R2: the routes of the old-log-prob pass, all of them, in the updates. Not run on a GPU.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_common.sh" r2 R2 "$@"
