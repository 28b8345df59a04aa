# A hospital's Flower node: carries proposals to the silo's socket, and answers back.
set -eu
: "${SUPERLINK:?set SUPERLINK to the server's address, e.g. study.example.org:8000}"
: "${NAME:?set NAME to the name of the silo, as in keys/NAME}"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
exec flower-supernode --superlink "$SUPERLINK" --root-certificates keys/ca.crt \
    --auth-supernode-private-key "keys/$NAME" --trusted-entities keys/trusted.yaml \
    --host 127.0.0.1 --port "${PORT:-8001}" --node-config "silo=\"${SOCKET:-/silo/silo.sock}\""
