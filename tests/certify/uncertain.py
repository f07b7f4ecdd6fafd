"""Runs that do not repeat, each by one defect of the kind users write: python uncertain.py DEFECT.

Every class is a task that trains well, and goes wrong only where a certificate looks: after a
resume, or on another number of ranks. `main` runs one of them in a folder it never gets to use.
"""

import os
import sys
import time
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from lockstep import PartialLoss, RunConfig, World, fit, train_step
from lockstep.data.order import Shuffled
from lockstep.dist.ddp import unwrap
from lockstep.run.build import prepare
from lockstep.signals import StopSignals
from lockstep.testing import TinyTask
from lockstep.trainer import Trainer


def rank():
    return int(os.environ.get("RANK", "0"))


class Sound(TinyTask):
    """Nothing is wrong with it."""

    settings_of_run: dict = {}

    def __init__(self):
        super().__init__(dropout=0.2)

    def error(self, output, batch):
        units = batch["units"] + 1
        return ((output - batch["y"]).square().sum(dim=1) * units).sum(), units.sum()

    def loss(self, model, batch, context):
        return PartialLoss(*self.error(model(batch["x"]), batch))


class Rounded(Sound):
    """Nothing is wrong with it, but gradients are rounded between ranks."""

    settings_of_run = {"gradients": {"exchange_in": "bf16"}}


# --- After a resume ----------------------------------------------------------


class OwnOrder(Sound):
    """A sampler that counts for itself: after a resume it begins again."""

    def order(self, data, seed):
        class Counted:
            taken = 0

            def ids(self, epoch, start, stop):
                ids = Shuffled(len(data), seed).ids(0, self.taken, self.taken + stop - start)
                self.taken += stop - start
                return ids

        return Counted()


class ClockAugmentation(Sound):
    """Augments by the time of day."""

    def train_data(self):
        class Shaken(list):
            def __getitem__(self, index):
                sample = list.__getitem__(self, index)
                return {**sample, "x": sample["x"] + time.time_ns() % 1000 / 1e4}

        return Shaken(super().train_data())


class GlobalNumpy(Sound):
    """Draws in the loss from NumPy's global generator, which is seeded for each micro-batch."""

    def loss(self, model, batch, context):
        value, weight = self.error(model(batch["x"]), batch)
        return PartialLoss(value * np.random.uniform(0.9, 1.1), weight)


class OwnGenerator(Sound):
    """Draws its noise from a generator of its own, seeded once."""

    def __init__(self):
        super().__init__()
        self.noise = torch.Generator().manual_seed(7)

    def loss(self, model, batch, context):
        noise = torch.randn(batch["x"].shape, generator=self.noise, dtype=torch.float64)
        return PartialLoss(*self.error(model(batch["x"] + noise), batch))


class RememberedLoss(Sound):
    """Weighs the loss by a running mean that is not in `state()`."""

    def __init__(self):
        super().__init__()
        self.mean = 1.0

    def loss(self, model, batch, context):
        value, weight = self.error(model(batch["x"]), batch)
        self.mean = 0.9 * self.mean + 0.1 * float(value.detach() / weight)
        return PartialLoss(value / self.mean, weight)


class UnsavedCount(Sound):
    """Fades its inputs in by a count of calls that is not in `state()`."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def loss(self, model, batch, context):
        self.seen += 1
        return PartialLoss(*self.error(model(batch["x"] * (1 + 0.01 * self.seen)), batch))


class HiddenCount(Sound):
    """Likewise, where no trace can look."""

    def __init__(self):
        super().__init__()
        self.hidden = {"calls": iter(range(1, 1000))}

    def loss(self, model, batch, context):
        seen = next(self.hidden["calls"])
        return PartialLoss(*self.error(model(batch["x"] * (1 + 0.01 * seen)), batch))


class ForgottenCount(UnsavedCount):
    """Saves its count, and does not take it back."""

    def state(self):
        return {"seen": self.seen}


class StampedCount(UnsavedCount):
    """Also keeps when it started, which changes nothing."""

    def __init__(self):
        super().__init__()
        self.started = time.time()


class UnseededScale(Sound):
    """Draws a factor for its loss when the script starts."""

    def __init__(self):
        super().__init__()
        self.scale = 1 + np.random.default_rng().uniform()

    def loss(self, model, batch, context):
        value, weight = self.error(model(batch["x"]), batch)
        return PartialLoss(value * self.scale, weight)


class UnseededData(Sound):
    """Draws its targets when the script starts, from a generator nobody has seeded."""

    def __init__(self):
        super().__init__()
        self.noise = np.random.default_rng().normal(size=(self.num_samples, 3))

    def train_data(self):
        noise = torch.from_numpy(self.noise)
        return [{**s, "y": s["y"] + noise[n]} for n, s in enumerate(super().train_data())]


class UnseededModel(Sound):
    """Builds its model when the script starts, before anything is seeded."""

    def __init__(self):
        super().__init__()
        torch.seed()
        self.built = super().build_model()

    def build_model(self):
        return self.built


class Normed(Sound):
    """Has batch normalisation."""

    def build_model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


class Forgetful(nn.Sequential):
    """Leaves running statistics out of its checkpoints, and takes back what there is."""

    def state_dict(self, *args, **named):
        state = super().state_dict(*args, **named)
        return {name: value for name, value in state.items() if "running" not in name}

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(state, strict=False, assign=assign)


class LostStatistics(Normed):
    """Loses the running statistics of batch normalisation."""

    def build_model(self):
        return Forgetful(*super().build_model())


class FreshHead(Sound):
    """Builds its last layer anew whenever weights are loaded: a fine-tuning line left in."""

    def build_model(self):
        class Fresh(nn.Sequential):
            def load_state_dict(self, state, strict=True, assign=False):
                result = super().load_state_dict(state, strict, assign)
                self[-1].reset_parameters()
                return result

        return Fresh(*super().build_model())


class OwnMomentum(Sound):
    """An optimizer that keeps its momentum where `state_dict` does not see it."""

    def build_optimizer(self, model, lr):
        torch.optim.SGD(model.parameters())  # from now on torch hooks its step, too

        class Heavy(torch.optim.SGD):
            velocity = None

            def step(self, closure=None):
                grads = [p.grad for group in self.param_groups for p in group["params"]]
                old = self.velocity or [torch.zeros_like(g) for g in grads]
                self.velocity = [0.9 * v + g for v, g in zip(old, grads, strict=True)]
                for grad, velocity in zip(grads, self.velocity, strict=True):
                    grad.copy_(velocity)
                return super().step(closure)

        return Heavy(model.parameters(), lr=lr)


class Counting(nn.Module):
    """Scales by how often it was called, in a buffer that is not saved, or not even that."""

    def __init__(self, as_buffer):
        super().__init__()
        self.as_buffer = as_buffer
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.count = 0

    def forward(self, x):
        self.calls += self.as_buffer
        self.count += not self.as_buffer
        return x * (1 + 0.01 * (self.calls.item() + self.count))


class VolatileBuffer(Sound):
    """Changes a buffer in forward that is not persistent."""

    as_buffer = True

    def build_model(self):
        return nn.Sequential(*super().build_model(), Counting(self.as_buffer))


class ModuleAttribute(VolatileBuffer):
    """Counts in a plain attribute of a module."""

    as_buffer = False


class Kernel(Sound):
    """A stand-in for a kernel that is not deterministic: the last bits are anyone's guess."""

    def build_model(self):
        class Atomic(nn.Module):
            def forward(self, x):
                return x * (1 + int.from_bytes(os.urandom(4), "big") * 1e-19)

        return nn.Sequential(*super().build_model(), Atomic())


class OwnLoop(Sound):
    """A loop of its own, by the second entrance."""

    def begin(self, run):
        pass

    def before_step(self, batch, world):
        pass

    def rate(self, batch, taken):
        return 1.0

    def run(self, config):
        with ExitStack() as stack:
            world = stack.enter_context(World.enter())
            run = prepare(self, config, world, stack)
            self.begin(run)
            trainer = Trainer(run, stack.enter_context(StopSignals()), stack)
            for taken, batch in enumerate(trainer.steps()):
                run.set_rate(self.rate(batch, taken))
                self.before_step(batch, world)
                report = train_step(
                    self.loss, run.model, run.optimizer, batch, world, scaler=run.scaler
                )
                trainer.record_step(report, batch)
            return trainer.finish()


class Adversarial(OwnLoop):
    """Nothing is wrong with it: a critic in float32, trained before the model in every step."""

    settings_of_run = {"batch": {"batch_size": 4, "accumulate": 2}}

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.critic = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=1.0)

    def build_model(self):
        return super().build_model().float()

    def collate(self, samples):
        return {key: value.float() for key, value in super().collate(samples).items()}

    def state(self):
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self.critic_optimizer.state_dict(),
        }

    def load_state(self, state):
        self.critic.load_state_dict(state["critic"])
        self.critic_optimizer.load_state_dict(state["optimizer"])

    def begin(self, run):
        self.model = unwrap(run.model)
        self.replica = run.world.replicate(self.critic)

    def critic_loss(self, critic, batch, context):
        with torch.no_grad():
            made = self.model(batch["x"])
        real = nn.functional.softplus(-critic(batch["y"]))
        fake = nn.functional.softplus(critic(made))
        return (real + fake).mean()

    def before_step(self, batch, world):
        for _ in range(5):
            train_step(self.critic_loss, self.replica, self.critic_optimizer, batch, world)

    def loss(self, model, batch, context):
        return nn.functional.softplus(-self.critic(model(batch["x"]))).mean()


class MisweighedAdversarial(Adversarial):
    """Divides the loss of its model by the number of ranks."""

    def loss(self, model, batch, context):
        return super().loss(model, batch, context) / context.world.size


class RateSinceStart(OwnLoop):
    """Decays the rate by the steps of this process, not of the run."""

    def rate(self, batch, taken):
        return 0.9**taken


class OwnScaler(OwnLoop):
    """Makes a scaler of its own at every start."""

    def begin(self, run):
        run.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)


# --- On another number of ranks ----------------------------------------------


class RankOrder(Sound):
    """Shuffles by rank, as one does with a sampler per process."""

    def order(self, data, seed):
        return Shuffled(len(data), rank())


class SizeByWorld(Sound):
    """Divides the batch size by the number of ranks, to keep the global batch."""

    @property
    def settings_of_run(self):
        return {"batch": {"batch_size": 8 // int(os.environ.get("WORLD_SIZE", "1"))}}


class TokenMean(Sound):
    """Returns a mean over units, of which samples have different numbers."""

    def loss(self, model, batch, context):
        value, weight = self.error(model(batch["x"]), batch)
        return value / weight


class InBatch(Sound):
    """Compares the samples of a micro-batch with each other: how it is cut is part of the loss."""

    def loss(self, model, batch, context):
        rows = model(batch["x"])
        logits = rows @ batch["y"].T
        return nn.functional.cross_entropy(logits, torch.arange(len(rows)))


class Weighed(Sound):
    """Adds two means with units of their own, rightly."""

    def weights(self, batch, context):
        return {"units": batch["units"].sum() + len(batch["units"]), "samples": len(batch["units"])}

    def loss(self, model, batch, context):
        output = model(batch["x"])
        value, _ = self.error(output, batch)
        return value / context.weights["units"] + output.abs().sum() / context.weights["samples"]


class Fussy(Sound):
    """Takes micro-batches of one size only."""

    def loss(self, model, batch, context):
        if len(batch["x"]) % 4:
            raise ValueError("four samples, or none")
        return super().loss(model, batch, context)


class Noisy(Sound):
    """Draws noise for each micro-batch, rightly."""

    def loss(self, model, batch, context):
        noise = torch.randn(batch["x"].shape, generator=context.generator("noise"))
        return PartialLoss(*self.error(model(batch["x"] + noise), batch))


class RankAugmentation(Sound):
    """Augments by rank, while samples become a batch."""

    def collate(self, samples):
        return super().collate([{**s, "x": s["x"] + 0.01 * rank()} for s in samples])


class RankNoise(Sound):
    """Draws noise from a generator seeded by rank."""

    def loss(self, model, batch, context):
        generator = torch.Generator().manual_seed(100 * context.step + context.world.rank)
        noise = torch.randn(batch["x"].shape, generator=generator, dtype=torch.float64)
        return PartialLoss(*self.error(model(batch["x"] + noise), batch))


class RankDropout(Sound):
    """Drops by a mask that is seeded by rank, inside the model."""

    def build_model(self):
        class Masked(nn.Module):
            def forward(self, x):
                generator = torch.Generator().manual_seed(rank())
                return x * (torch.rand(x.shape, generator=generator) > 0.2)

        return nn.Sequential(*super().build_model(), Masked())


class DividedByWorld(Sound):
    """Divides the loss by the number of ranks, as if gradients were summed."""

    def loss(self, model, batch, context):
        value, weight = self.error(model(batch["x"]), batch)
        return PartialLoss(value / context.world.size, weight)


class OwnCount(Sound):
    """Divides by the mean count of the ranks at this moment, as one does under DDP."""

    def loss(self, model, batch, context):
        value, weight = self.error(model(batch["x"]), batch)
        mean = context.world.all_sum(weight) / context.world.size
        return PartialLoss(value / mean, 1.0)


class RateByWorld(Sound):
    """Multiplies the rate by the number of ranks itself, beside lockstep's own rule."""

    def build_optimizer(self, model, lr):
        return super().build_optimizer(model, lr * int(os.environ.get("WORLD_SIZE", "1")))


class DecayByWorld(Sound):
    """Lets the weights decay by hand, the more the more ranks there are."""

    def build_optimizer(self, model, lr):
        class Decaying(torch.optim.SGD):
            def step(self, closure=None):
                result = super().step(closure)
                for weight in self.param_groups[0]["params"]:
                    weight.data *= 1 - 0.01 * int(os.environ.get("WORLD_SIZE", "1"))
                return result

        return Decaying(model.parameters(), lr=lr)


class OneRanksWeight(Sound):
    """Clamps a weight on one rank alone."""

    def loss(self, model, batch, context):
        if context.step == 1 and context.world.rank == 1:
            unwrap(model)[0].weight.data[0, 0] = 0.5
        return super().loss(model, batch, context)


class Gathering(Sound):
    """Compares the samples of all ranks, rightly."""

    gathers = True

    def __init__(self):
        super().__init__()
        self.dropout = 0.0

    def everyone(self, rows, context):
        return context.gather(rows)

    def loss(self, model, batch, context):
        rows = model(batch["x"])
        away = (rows - self.everyone(rows, context).mean(dim=0)).square().sum()
        return PartialLoss(away + (rows - batch["y"]).square().sum(), float(len(rows)))


class DetachedGather(Gathering):
    """Gathers without gradients: the loss is right, and the step is not."""

    def everyone(self, rows, context):
        start = context.gather_start(rows)
        everyone = context.gather(rows.detach()).clone()
        everyone[start : start + len(rows)] = rows
        return everyone


class RoundedAndDetached(DetachedGather):
    """The same, where gradients are also rounded between ranks."""

    settings_of_run = Rounded.settings_of_run


class ShakenGather(Gathering):
    """Augments by rank, where samples of all ranks meet."""

    def collate(self, samples):
        return super().collate([{**s, "x": s["x"] + 0.01 * rank()} for s in samples])


class FewerForMore(Sound):
    """Shares out its samples itself, beside lockstep."""

    def train_data(self):
        return super().train_data()[:: int(os.environ.get("WORLD_SIZE", "1"))]


class SyncNormed(Normed):
    """Has batch normalisation over all ranks."""

    settings_of_run = {"sync_batch_norm": True}


def main(defect, folder):
    task = globals()[defect]()
    config = RunConfig.parse(
        {
            "output_dir": folder,
            "epochs": 300,
            "batch": {"batch_size": 4},
            "rate": {"lr": 0.02, "lr_scaling": "linear"},
            "averages": [0.9],
            "sinks": {"curves": False},
            **task.settings_of_run,
        }
    )
    return (task.run(config) if isinstance(task, OwnLoop) else fit(task, config)).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:], *["unused"][: 3 - len(sys.argv)]))
