#!/bin/sh
# Starts Dynamo's indexer, and tells it of engines with examples/fleet/node-local.json:
#   sh dynamo-indexer.sh MODEL TOKENS_PER_BLOCK HOST...
# (--workers has no place for a replay endpoint, so the engines are registered over HTTP.)
set -eu
model=$1 block=$2
shift 2
url=http://127.0.0.1:${PORT:=8090}
python -m dynamo.indexer --port "$PORT" &
trap 'kill $!' EXIT INT TERM
until curl -fs "$url/health"; do kill -0 $!; sleep 1; done

number=0
for host; do
    curl -fsS "$url/register" -H 'Content-Type: application/json' -d '{
        "instance_id": '$((number += 1))', "model_name": "'"$model"'", "block_size": '"$block"',
        "endpoint": "tcp://'"$host"':5557", "replay_endpoint": "tcp://'"$host"':5558"}'
done
wait
