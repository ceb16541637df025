#!/usr/bin/env bash
# One rank of a training, started by srun or a pod: starts the run, or resumes it if it has a checkpoint.
#
#   RANK=0 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 begin_or_resume.sh STORE RUN [options of gsplit train]
#
# It can be started again at any time: a finished run exits with 0, a run stopped by SIGTERM has saved its state and
# exits with 75. STORE and RUN must have the same path on all hosts.
set -euo pipefail

store=$1 run=$2
shift 2
if compgen -G "$run/*/checkpoints/step-*.safetensors" >/dev/null; then
    exec python -m gsplit train "$store" --resume "$run" "$@"
fi
exec python -m gsplit train "$store" --out "$run" "$@"
