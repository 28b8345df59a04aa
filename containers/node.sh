# A hospital's node: carries proposals to the silo's socket, and answers back. It runs no code of the server's; Flower's
# own `flower-supernode` in its place would, which is remote code execution for whoever holds the server.
set -eu
: "${SUPERLINK:?set SUPERLINK to the server's address, e.g. study.example.org:8000}"
: "${NAME:?set NAME to the name of the silo, as in keys/NAME}"
exec modicum flower node "$SUPERLINK" --ca keys/ca.crt --key "keys/$NAME" --silo "${SOCKET:-/silo/silo.sock}"
