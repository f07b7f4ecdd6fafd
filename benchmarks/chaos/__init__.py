"""The chaos rig: a seeded schedule of real faults on a real run, and what must hold after it.

`schedule.py` draws the faults, `train.py` is what is trained, `points.py` fires faults at named
places in a rank, `supervise.py` launches ranks again and again, `drive.py` fires faults by the
clock and keeps it all going, `oracles.py` judges, `mutants.py` breaks the product on purpose.
"""
