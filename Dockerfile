# One file, three images; docs/containers.md says how they are run.
#   docker build --target silo -t modicum-silo .
#   docker build --target node -t modicum-node .
#   docker build --target server -t modicum-server .
FROM python:3.11-slim AS installed
WORKDIR /opt/modicum
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src src
COPY containers containers
RUN sh containers/install.sh
# The silo and the node share a group, by which the node reaches the silo's socket and nothing else.
RUN groupadd --gid 1500 silo && useradd --uid 1500 --gid silo silo && useradd --uid 1501 --groups silo flower

FROM installed AS silo
USER silo
WORKDIR /silo
ENTRYPOINT ["modicum", "silo"]
CMD ["serve", "silo.toml"]

FROM installed AS node
USER flower
WORKDIR /node
ENTRYPOINT ["sh", "/opt/modicum/containers/node.sh"]

FROM installed AS server
USER flower
WORKDIR /server
EXPOSE 8000
ENTRYPOINT ["sh", "/opt/modicum/containers/server.sh"]
