"""A run with one planted fault: python planted.py FAULT [FOLDER]."""

import sys
import time

from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

FAULT, FOLDER = (*sys.argv, "", "")[1:3]


class Planted(TinyTask):
    """Trains well; one thing goes wrong where long runs first find out."""

    def evaluate(self, model, batch, context):
        if FAULT == "evaluate":
            raise ZeroDivisionError("planted in evaluate")
        return super().evaluate(model, batch, context)

    def eval_data(self):
        return None if FAULT.startswith("nothing held out") else super().eval_data()

    def state(self):
        return {"lock": object()} if FAULT.endswith(" state") else {"words": ["a"]}

    def load_state(self, state):
        if FAULT == "load_state":
            raise KeyError("planted in load_state")

    def finish_evaluation(self, model, context, folder):
        if context.step == 4 and FAULT == "end":
            raise ValueError("planted at the end")
        if context.step == 4 and FAULT == "hang":
            time.sleep(600)
        return {}


if __name__ == "__main__":
    config = RunConfig.parse(
        {
            "output_dir": FOLDER,
            "epochs": 300,
            "batch": {"batch_size": 4},
            "evaluation": {"every_epochs": 10},
            "checkpoint": {"every_epochs": 100},
            "sinks": {"curves": False},
        }
    )
    sys.exit(fit(Planted(), config).exit_code)
