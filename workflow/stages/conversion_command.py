"""``python -m workflow.stages.conversion_command``: what ``baton convert`` runs, in a process of its own.

Megatron takes over the process that imports it; the command's own process loads no framework.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engines.model_folder import ModelFolderError
from workflow.manifest import ManifestError


def main() -> int:
    """Parse the command line, convert, and print the record; 0 when the target is there and verified."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # conversion needs no accelerator, and must not take one
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", choices=["megatron", "hf"], required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--max-shard-size", required=True)
    parser.add_argument("--full-logits", type=int, required=True)
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        return _convert(options, console)
    except (ModelFolderError, ManifestError, ValueError) as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    except ImportError as error:
        console.print(
            f"[red]refused:[/] this environment lacks {escape(str(error.name))}: conversion needs env/cpu.txt and, on top of it, "
            "pip install --no-deps --ignore-requires-python -r env/megatron.txt",
            highlight=False,
            soft_wrap=True,
        )
    except (RuntimeError, OSError) as error:
        console.print(
            f"[red]failed:[/] {type(error).__name__}: {escape(str(error))}", highlight=False, soft_wrap=True
        )
    return 1


def _convert(options: argparse.Namespace, console: Console) -> int:
    warnings.filterwarnings("ignore", module="megatron")  # that Apex and Transformer Engine are not installed
    with console.status("loading Megatron"):
        import torch
        from transformers.utils import logging

        from workflow.stages.conversion import convert_checkpoint
    torch.set_num_threads(1)  # before the ranks are forked: a pool of threads does not survive that
    logging.disable_progress_bar()
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, int] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        record, measured = convert_checkpoint(
            options.source,
            options.target,
            options.to,
            ranks=options.ranks,
            full_logits=options.full_logits,
            max_shard_size=options.max_shard_size,
            report=report,
        )
    print(json.dumps(record.verified, indent=2))
    if measured.bytes:
        rate = measured.bytes / 1e9 / measured.convert_seconds
        console.print(
            f"converted {measured.bytes / 1e9:.2f} GB in {measured.convert_seconds:.1f} s ({rate:.2f} GB/s, "
            f"{measured.convert_peak_bytes / 1e6:.0f} MB a rank), verified in {measured.verify_seconds:.1f} s "
            f"({measured.verify_peak_bytes / 1e6:.0f} MB): {options.target}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print(
            f"[green]{options.target} is this result already, and intact[/]", highlight=False, soft_wrap=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
