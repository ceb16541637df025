#!/usr/bin/env bash
# Starts the ranks of one of several hosts. Run it on every host, with the number of the host. Only ssh is needed.
#
#   HOST=0 HOSTS=2 MASTER_ADDR=10.0.0.1 torchrun_hosts.sh 4 STORE RUN --replicas 2 --save-every 500   # on 10.0.0.1
#   HOST=1 HOSTS=2 MASTER_ADDR=10.0.0.1 torchrun_hosts.sh 4 STORE RUN --replicas 2 --save-every 500   # on the other
#
# The first argument is the number of ranks on this host. If a rank fails, the others fail too, and torchrun restarts those
# of its host, at most MAX_RESTARTS times; they continue from the latest checkpoint. The static rendezvous does not unpickle anything
# (docs/security.md). Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface of the private network.
set -euo pipefail

ranks=$1 store=$2 run=$3
shift 3
training=(--out "$run")
if compgen -G "$run/*/checkpoints/step-*.safetensors" >/dev/null; then
    training=(--resume "$run")
fi
exec python -m torch.distributed.run \
    --nnodes "${HOSTS:?number of hosts}" --node-rank "${HOST:?number of this host, from 0}" \
    --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-backend static --master-addr "${MASTER_ADDR:?address of host 0}" --master-port "${MASTER_PORT:-29500}" \
    -m gsplit train "$store" "${training[@]}" "$@"
