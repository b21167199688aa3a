"""Training states whose bytes were given up and that the plan would read again. Loads no framework."""

from __future__ import annotations

from pathlib import Path

from workflow.campaign.plan import Plan
from workflow.manifest import TWIN, is_released


class StatesReleased(RuntimeError):
    """What is still to be computed needs states whose bytes are gone."""


def check_released(plan: Plan) -> None:
    """Refuse to start when a stage without result reads a training state that was given up once its readers had published.

    Raises:
        StatesReleased: naming the stages, the folders, and what to do.
    """
    readers: list[str] = []
    folders: set[str] = set()
    for spec in plan.stages.values():
        manifest = Path(spec.manifest())
        # A workflow engine removes the manifest of a job that it takes for failed; the stage restores it from its second name.
        if spec.stage == "train" or manifest.exists() or manifest.with_name(TWIN).exists():
            continue
        states = {plan.stages[ref.id].output_folder(ref.step) for ref in spec.inputs.values() if ref.step}
        if gone := {folder for folder in states if is_released(Path(folder))}:
            readers.append(f"{spec.stage} {spec.name}")
            folders |= gone
    if folders:
        raise StatesReleased(
            f"{', '.join(readers)}: to be computed from training states whose bytes were given up after all that "
            f"was planned then had been published. To have these states computed anew, from the same steps and with the "
            f"same result, remove their folders and run the same command again: rm -r {' '.join(sorted(folders))}. "
            "Otherwise take back the setting that changed. With checkpoint.retain=all, states are kept"
        )
