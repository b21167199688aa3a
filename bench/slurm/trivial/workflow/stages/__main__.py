"""A stage that only publishes: the manifest was made beforehand. Leaves the time by this node's clock, and where it ran."""

import os
import sys
import time
from pathlib import Path

stage, name = sys.argv[1], sys.argv[3]
folder = Path("results/store", stage, name)
folder.mkdir(parents=True, exist_ok=True)
with Path("clock.txt").open("a") as clock:
    clock.write(
        f"{name} {time.time():.3f} {os.environ['SLURM_JOB_ID']} {os.environ['SLURM_JOB_PARTITION']}\n"
    )
temporary = folder / ".manifest"
temporary.write_text(Path("manifests", f"{name}.json").read_text())
temporary.rename(folder / "manifest.json")
