# Modicum with what a deployment needs, at the versions that were tested. Run where pyproject.toml is.
set -eu
python -m pip install --no-cache-dir --disable-pip-version-check ${PIP_FLAGS:-} -c requirements.lock '.[deploy]'
modicum doctor
