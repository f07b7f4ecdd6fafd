"""What a command printed when it failed: the first error, and the place that is the user's own."""

from lockstep.harness.failure import CommandFailure


def test_the_first_error_is_found_in_what_any_launcher_prints() -> None:
    plain = "step 1\nlockstep: no such folder\n  try: another\n"
    assert CommandFailure.read(plain).error == "no such folder"
    chained = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 3, in save\n    f()\n'
        '  File "/usr/lib/python3.11/json.py", line 9, in dump\n    g()\n'
        "TypeError: not JSON\n"
        "Traceback (most recent call last):\nRuntimeError: later\n"
    )
    failure = CommandFailure.read(chained)
    assert (failure.error, failure.place) == ("TypeError: not JSON", "train.py:3 in save")
    assert failure.is_about_saving
    assert CommandFailure.read("Killed\n\n").error == "Killed"
    frame = (
        'Current thread 0x1 (most recent call first):\n  File "/home/me/a.py", line {} in {}\n\n'
    )
    stacks = [frame.format(1, "_worker_loop"), frame.format(2, "all_max"), frame.format(3, "draw")]
    assert CommandFailure.read_stacks("".join(stacks)).place == "a.py:3 in draw"
    assert CommandFailure.read_stacks("".join(stacks[:2])).place == "a.py:2 in all_max"
    assert CommandFailure.read_stacks("nothing").place == ""
    assert CommandFailure.read("").error == "it printed nothing"
