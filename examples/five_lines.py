"""The same script on any number of ranks, with exact data order and resume: five changed lines."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import CheckpointStore, Loader, World, train_step

torch.manual_seed(0)
inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
world = World.enter()  # 1: which rank am I, which device is mine
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
model = world.replicate(model)  # 2: on the device, gradients averaged over ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = Loader(dataset, world, batch_size=32, epochs=5)  # 3: each sample once, on one rank
store = CheckpointStore("run")
store.load_into(model=model, optimizer=optimizer, loader=loader)  # 4: resume where it stopped


def loss(model, batch, context):
    x, y = batch
    return functional.mse_loss(model(x), y)


for batch in loader:
    train_step(loss, model, optimizer, batch, world)  # 5: backward, reduce over ranks, update
    if loader.at_epoch_end:
        store.save_from(world, loader.step, model=model, optimizer=optimizer, loader=loader)

world.leave()
