# The SuperLink of a deployment, in a folder of `modicum flower init`; runs are started with `modicum flower start`.
set -eu
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p flower
exec flower-superlink --host 0.0.0.0 --port "${PORT:-8000}" --ssl-ca-certfile keys/ca.crt \
    --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key --enable-supernode-auth \
    --database flower/link.db --disable-runtime-dependency-installation
