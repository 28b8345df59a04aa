# %% [markdown]
# # Simulate
#
# Twenty clients share the handwritten digits among them, unevenly, and each grants its own ε. We train the same model with
# and without privacy, look at what it costs, and verify what was promised. Everything runs in this process, with
# noise from a seed: a simulation shows what a deployment would reach, and protects nobody.
# %%
import modicum as mo

fed = mo.Federation.from_dataset(
    "digits", clients=20, partition=mo.Dirichlet(0.5), budgets=[1.0, 3.0, 8.0], test=0.2, proxy=0.05
)
fed.data.sizes, fed.budgets[:3]
# %% [markdown]
# **DP-SGD**: every client clips its records' gradients, adds the noise that *its own* budget asks for, and sends the
# result; the server weighs noisier messages less. All local steps of all rounds are charged.
# %%
private = mo.train(fed, method=mo.methods.DpSgd(lr=4.0), rounds=20, folder="runs/dp-sgd")
private
# %%
for group in private.summary.groups:
    print(f"ε = {group.budget:g}: {group.clients} clients, certified {group.epsilon.max:.4g}")
# %% [markdown]
# **Without privacy**, for comparison: the same steps in the clear. Its certificate says ε = ∞.
# %%
clear = mo.train(fed, method=mo.methods.FedAvg(lr=4.0), rounds=20, folder="runs/fedavg")
f"{clear.accuracy:.1%} without privacy, {private.accuracy:.1%} with it"
# %% [markdown]
# **How it went.** Accuracy on test records is simulated ground truth. What a real server could have seen are the columns
# `public_…` (on the 5% of records that are public) and `released_…` (metrics that clients pay for; none were declared).
# %%
private.plot()
# %%
[(record.round + 1, round(record.public["loss"], 3)) for record in private.records[::5]]
# %% [markdown]
# **Verify.** The ledger holds everything that was reserved. Two accountants, ours and Google's, recompute every ε
# from it, and compare with the certificate.
# %%
outcome = mo.verify("runs/dp-sgd")
outcome.matches, len(outcome.clients)
# %% [markdown]
# **Other seeds, other methods**: one draw says little. `modicum compare` gives means, spreads and paired differences.
# %% [bash]
# cat > digits.toml <<'END'
# [data]
# name = "digits"
# clients = 10
# [privacy]
# budgets = [1.0, 8.0]
# [method]
# name = "dp-sgd"
# lr = 4.0
# [run]
# rounds = 10
# END
# modicum compare digits.toml --methods dp-sgd,aqc,fedavg --set aqc:method.lr=4 --set fedavg:method.lr=4 --seeds 3
