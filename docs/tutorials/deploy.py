# %% [markdown]
# # Three silos, audited
#
# Three hospitals train together and give nothing away but noised messages. Each keeps its records, its grant, its ledger and
# its noise in a process of its own; a server proposes. Here all of them run on one machine, over real TLS and with real
# keys; [on three machines](../deploy.md) the same files go to three places.
# %% [markdown]
# **One file that everybody agrees on.** Noise is cryptographic: no `simulation = true`.
# %% [bash]
# cat > study.toml <<'END'
# [data]
# name = "breast-cancer"
# clients = 3
# [privacy]
# budgets = [2.0, 2.0, 4.0]
# [method]
# name = "dp-sgd"
# lr = 2.0
# [run]
# rounds = 5
# END
# modicum flower up study.toml --out study 2>&1 | grep -v "^run="
# %% [markdown]
# **What lies where.** The server's folder has the model and what it asked for; each silo's has its own ledger and certificate.
# %% [bash]
# ls study study/server study/silos/state-client-00
# %% [markdown]
# **Each silo logged what was asked, charged and is left**:
# %% [bash]
# grep -ho "round .*" study/logs/silo-client-02.log
# %% [markdown]
# **The auditor's desk.** An auditor gets a folder, recomputes every ε with two accountants, and compares with the
# certificate. Exit code 0 means that it matches.
# %% [bash]
# modicum verify study/silos/state-client-02
# %% [bash]
# modicum verify study/server | tail -1
# %% [markdown]
# **And if somebody lies?** A certificate that states a smaller ε than the ledger gives is found out.
# %%
import json
import shutil
from pathlib import Path

shutil.copytree("study/silos/state-client-02", "forged")
path = Path("forged/certificate.json")
said = json.loads(path.read_text())
for client in said["clients"].values():
    client["epsilon"] = 0.1
path.chmod(0o600)
path.write_text(json.dumps(said))
said["clients"]["client-02"]["epsilon"]
# %% [bash]
# modicum verify forged && echo "this line is never reached" || echo "exit code $?"
# %% [markdown]
# What no audit can show is listed on [threats](../threats.md): a silo's certificate speaks for what left through its gate.
