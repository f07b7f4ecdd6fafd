"""A GAN in a loop of its own: two networks, two optimizers, two train_steps for each batch."""

import torch
from torch import nn
from torch.nn.functional import softplus

from lockstep import BatchConfig, CheckpointStore, Loader, World, plan_for, train_step

torch.manual_seed(0)
dataset = list(torch.randn(128, 2) * 0.5 + 2)
world = World.enter()
g_net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(world.device)
d_net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).to(world.device)
G, D = world.replicate(g_net), world.replicate(d_net)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3)
plan = plan_for(dataset, BatchConfig(batch_size=16, global_batch_size=32), world.size)
loader = Loader(dataset, world, plan=plan, epochs=3)
store = CheckpointStore("run")
parts = {"G": G, "D": D, "opt_g": opt_g, "opt_d": opt_d, "loader": loader}
store.load_into(**parts)


def loss_d(model, real, context):
    with torch.no_grad():
        fake = g_net(torch.randn(len(real), 4, device=real.device))
    both = model(torch.cat([real, fake]))  # one call: DDP counts one backward pass for each
    return (softplus(-both[: len(real)]) + softplus(both[len(real) :])).mean()


def loss_g(
    model, real, context
):  # the other network unwrapped, or DDP would exchange its gradients
    return softplus(-d_net(model(torch.randn(len(real), 4, device=real.device)))).mean()


for batch in loader:
    train_step(loss_d, D, opt_d, batch, world, seed=0)
    report = train_step(loss_g, G, opt_g, batch, world, seed=1)  # another seed: other noise
    if loader.at_epoch_end:
        store.save_from(world, loader.step, **parts)  # collective: on every rank
        if world.is_first:
            print(f"step {loader.step}: generator loss {report.loss:.3f}")  # noqa: T201

world.leave()
