# The SuperLink of a deployment, in a folder of `modicum flower init`; runs are started with `modicum flower start`.
# Port 8000 passes the calls of registered nodes and nothing else. Flower's own `flower-superlink` in its place would
# offer remote code execution to everybody who reaches that port.
set -eu
exec modicum flower superlink app --listen "0.0.0.0:${PORT:-8000}"
