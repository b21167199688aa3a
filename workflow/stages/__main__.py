"""``python -m workflow.stages STAGE --plan FILE --id ID [--step N]``: run one planned stage, as this process."""

from __future__ import annotations

import sys

from workflow.stages.warm import run_there


def main() -> int:
    """Have the head's stage server run it, where there is one; else run it here."""
    arguments = sys.argv[1:]
    code = run_there(arguments)
    return run_here(arguments) if code is None else code


def run_here(arguments: list[str]) -> int:
    """Parse the command line and run the stage in this process."""
    # Not for the server's clients.
    import argparse
    from pathlib import Path

    from workflow.campaign.stages import STAGES
    from workflow.stages.runner import run

    parser = argparse.ArgumentParser(prog="python -m workflow.stages", description=__doc__)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--plan", type=Path, required=True, help="the frozen plan of the campaign")
    parser.add_argument("--id", required=True, help="the stage's id in the plan, or the name of its folder")
    parser.add_argument("--step", type=int, help="train: the step at which the segment ends")
    options = parser.parse_args(arguments)
    return run(options.stage, options.plan, options.id, options.step)


if __name__ == "__main__":
    sys.exit(main())
