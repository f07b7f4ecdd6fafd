"""A whole Task: mark the colours that follow a number. docs/task.md shows it piece by piece."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep import PartialLoss, RunConfig, Task, fit
from lockstep.data.grouped import Grouped

WORDS = ["one", "two", "three", "red", "green", "blue", "the", "and", "of"]


def sentences(num, seed):
    """Return `num` sentences of different lengths; a tag is 1 at a colour after a number."""
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        words = draw.choices(WORDS, k=draw.randint(3, 12))
        pairs = zip(["", *words], words, strict=False)
        tags = [int(before in WORDS[:3] and word in WORDS[3:6]) for before, word in pairs]
        found.append((words, tags))
    return found


class Tagger(Task):
    name = "tagger"

    def __init__(self, width=32, batch_size=16):
        self.width, self.batch_size = width, batch_size

    def settings(self):
        return {"width": self.width}

    def train_data(self):
        data = sentences(512, seed=1)
        seen = sorted({word for words, _ in data for word in words})
        self.numbers = {word: number for number, word in enumerate(seen, start=1)}
        return data

    def collate(self, samples):
        longest = max(len(words) for words, _ in samples)
        words = torch.zeros(len(samples), longest, dtype=torch.long)
        tags = torch.full((len(samples), longest), -1)
        for row, (sentence, marks) in enumerate(samples):
            numbers = [self.numbers.get(word, 0) for word in sentence]
            words[row, : len(numbers)] = torch.tensor(numbers)
            tags[row, : len(marks)] = torch.tensor(marks)
        return {"words": words, "tags": tags}

    def build_model(self):
        return Network(len(self.numbers) + 1, self.width)

    def loss(self, model, batch, context):
        tags = batch["tags"].flatten()
        scores = model(batch["words"]).flatten(0, 1)
        total = cross_entropy(scores, tags, ignore_index=-1, reduction="sum")
        return PartialLoss(total, (tags >= 0).sum())  # a sum, and the number of words in it

    def build_optimizer(self, model, lr):
        embedding = list(model.embed.parameters())
        others = [p for name, p in model.named_parameters() if not name.startswith("embed.")]
        groups = [
            {"params": embedding, "lr": 2 * lr, "weight_decay": 0.0},
            {"params": others, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=lr)

    def eval_data(self):
        return sentences(100, seed=2)

    def evaluate(self, model, batch, context):
        tags = batch["tags"].flatten()
        scores = model(batch["words"]).flatten(0, 1)
        total = cross_entropy(scores, tags, ignore_index=-1, reduction="sum")
        counted = tags >= 0
        pairs = 2 * tags[counted] + scores.argmax(dim=1)[counted]
        table = torch.bincount(pairs, minlength=4).reshape(2, 2)  # rows: true, columns: predicted
        return {"loss": (total, counted.sum()), "table": (table, counted.sum())}

    def derive(self, means):
        table = means["table"]  # shares of all held-out words
        f1 = 2 * table[1, 1] / (2 * table[1, 1] + table[0, 1] + table[1, 0]).clamp(min=1e-12)
        return {**super().derive(means), "accuracy": float(table.trace()), "f1": float(f1)}

    def order(self, data, seed):
        lengths = np.array([len(words) for words, _ in data])
        return Grouped(lengths, self.batch_size, seed)

    def state(self):
        return {"numbers": self.numbers}

    def load_state(self, state):
        self.numbers = state["numbers"]


class Network(nn.Module):
    def __init__(self, num_words, width):
        super().__init__()
        self.embed = nn.Embedding(num_words, width, padding_idx=0)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.score = nn.Linear(width, 2)

    def forward(self, words):
        mixed = self.mix(self.embed(words).transpose(1, 2)).transpose(1, 2)
        return self.score(mixed.relu())


class TaggerOfTwoTerms(Tagger):
    """The mean over tagged words plus the mean over the others, so that rare tags count as much."""

    def weights(self, batch, context):
        tags = batch["tags"]
        return {"tagged": (tags == 1).sum(), "other": (tags == 0).sum()}

    def loss(self, model, batch, context):
        tags = batch["tags"].flatten()
        scores = model(batch["words"]).flatten(0, 1)
        errors = cross_entropy(scores, tags, ignore_index=-1, reduction="none")
        tagged, other = (errors * (tags == 1)).sum(), (errors * (tags == 0)).sum()
        in_step = context.weights  # the counts of the whole step, on all ranks
        parts = {
            "tagged": (tagged, (tags == 1).sum()),
            "other": (other, (tags == 0).sum()),
        }
        return PartialLoss(tagged / in_step["tagged"] + other / in_step["other"], 1, parts)


if __name__ == "__main__":
    task = Tagger()
    config = RunConfig(
        output_dir="tagger",
        epochs=10,
        batch={"batch_size": task.batch_size, "global_batch_size": 32},
        rate={"lr": 3e-3},
        evaluation={"best_metric": "f1", "best_is": "highest"},
    )
    raise SystemExit(fit(task, config).exit_code)
