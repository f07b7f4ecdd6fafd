"""Entry point of the `lockstep` command, with a clean Ctrl-C while the rest is imported."""

import signal

from lockstep.cli.interrupt import leave, quick_to_interrupt


def main() -> None:
    """Run the command."""
    try:
        with quick_to_interrupt():
            from lockstep.cli.main import main as run
        run()
    except KeyboardInterrupt:
        leave(signal.SIGINT, None)


if __name__ == "__main__":
    main()
