# %% [markdown]
# # Your own data and model
#
# Records as a table, as arrays or as PyTorch datasets; a model of your own as an `nn.Module`. Nothing is scaled or counted
# behind your back: what depends on private records would be a release that nobody paid for.
# %% [markdown]
# **A table.** One row is one record; a column says whose it is. Columns are scaled by *public* constants.
# %%
import random

random.seed(1)
with open("loans.csv", "w") as f:
    f.write("bank,income,debt,region,default\n")
    for i in range(900):
        income, debt = random.gammavariate(4, 12), random.expovariate(1 / 30)
        late = debt / income + random.gauss(0, 0.4) > 1.0
        f.write(f"bank-{i % 3},{income:.0f},{debt:.0f},{random.choice('NSW')},{int(late)}\n")
# %%
import modicum as mo
from modicum.data.columns import Column

columns = {
    "income": Column(range=(0, 200)),
    "debt": Column(range=(0, 200)),
    "region": Column(categories=("N", "S", "W")),
}
table = mo.from_csv("loans.csv", client="bank", label="default", classes=2, columns=columns)
banks = mo.federate(table, test=0.25)
banks.names, banks.sizes, banks.input_shape
# %% [markdown]
# `mo.federate` gives records without budgets; say what each bank grants when you train. A name is enough for a method
# with its defaults.
# %%
run = mo.train(banks, budgets=[1.0, 2.0, 4.0], method=mo.methods.DpSgd(lr=2.0), rounds=15, folder="runs/loans")
run
# %%
run.predict([[0.3, 0.05, 1, 0, 0], [0.05, 0.5, 0, 1, 0]])
# %% [markdown]
# **Arrays and PyTorch datasets** work alike: `mo.from_npz_folder("clinics")` reads one `.npz` a client, `mo.from_torch`
# takes one `Dataset` a client.
# %%
import torch
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
phones = []
for _ in range(6):
    x = torch.rand(80, 1, 8, 8, generator=generator)
    phones.append(TensorDataset(x, (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()))
fed = mo.federate(mo.from_torch(phones[:5], test=phones[5]))
# %% [markdown]
# **A network of your own.** Anything whose examples do not touch each other: a batch norm would mix them, so it is refused
# with what to use instead.
# %%
from torch import nn

network = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)
)
own = mo.train(fed, budgets=8.0, method=mo.methods.DpSgd(lr=0.5), model=network, rounds=5, folder="runs/own")
own
# %%
mixing = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
try:
    mo.train(fed, budgets=8.0, method="dp-sgd", model=mixing, rounds=5)
except mo.UserError as refused:
    print(refused)
# %% [markdown]
# **Read it back** on another day, with the module that was trained:
# %%
again = mo.load("runs/own", model=network)
again.certificate.epsilon("client-00"), again.predict(torch.rand(3, 1, 8, 8, generator=generator)).shape
