#!/usr/bin/env bash
# One rank of a training, started by srun or a pod: begins the run, or goes on with it if it has a checkpoint.
#
#   RANK=0 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 begin_or_resume.sh STORE RUN [options of gsplit train]
#
# Safe to start again at any time: a run that is finished says so and ends with 0, one that was told to stop (SIGTERM)
# has saved and ends with 75. STORE and RUN must be seen under the same name by all hosts.
set -euo pipefail

store=$1 run=$2
shift 2
if compgen -G "$run/*/checkpoints/step-*.safetensors" >/dev/null; then
    exec python -m gsplit train "$store" --resume "$run" "$@"
fi
exec python -m gsplit train "$store" --out "$run" "$@"
