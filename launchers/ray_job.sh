#!/bin/bash
# A run as a job of a Ray cluster that you started.
#
#     export RAY_API_SERVER_ADDRESS=http://10.0.0.1:8265
#     launchers/ray_job.sh recipes/moe_30b_a3b/gspo.yaml [key=value ...]
#
# Start it in a folder that all nodes mount at the same path. docs/launching.md describes it.
set -euo pipefail

config=${1:?usage: launchers/ray_job.sh CONFIG [key=value ...]}
shift
: "${RAY_API_SERVER_ADDRESS:?set it to the address of the dashboard, for example http://10.0.0.1:8265}"
exec ray job submit --metadata-json "{\"config\": \"$config\"}" -- \
  env --chdir="$PWD" roll-core run "$config" resume_from_checkpoint=auto "$@"
