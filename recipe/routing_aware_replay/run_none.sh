#!/usr/bin/env bash
# verl as it is: no replay, no policy. Not run on a GPU.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_common.sh" none disabled "$@"
