"""How far each layout of Megatron is from one process, written into docs/layouts.md: ``python -m tests.conformance.layouts``.

One line per layout and model: three AdamW steps of a tiny model, against plain transformers fed one sequence at a time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conformance.check_numbers import GRADIENT, LOSS, PARAMETERS, batches, train_on_rank
from tests.conformance.subject import ADAMW, LAYOUTS, Subject, merged
from tests.conformance.table import CASES

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
START, END = "<!-- table: python -m tests.conformance.layouts -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Differences:
    """The largest over all ranks."""

    loss: float
    """Relative, of the first step."""
    gradient: float
    """Of a tensor, by its norm; by the global norm where its own is tiny."""
    parameter: float
    """Absolute, of an element after three steps."""

    @property
    def allowed(self) -> bool:
        """Whether the conformance suite takes them."""
        return self.loss <= LOSS and self.gradient <= GRADIENT and self.parameter <= PARAMETERS


def measure(subject: Subject, family: str) -> Differences:
    """Train in the subject's layout and in one process."""
    model, steps = subject.model(family), batches()
    how: dict[str, Any] = {"aggregation": "token-mean", "max_length": None}
    right = subject.reference(model).train(steps, subject.loss, ADAMW, **how)
    ranks = subject.run(train_on_rank, model, steps, subject.loss, how, {}, timeout=300)
    found = merged([metrics[0] for metrics, _, _ in ranks])["loss"]
    return Differences(
        loss=abs(found - right.losses[0]) / abs(right.losses[0]),
        gradient=max(_relative(gradient, right.gradients) for _, gradient, _ in ranks),
        parameter=max(_largest(parameters, right.parameters) for _, _, parameters in ranks),
    )


def _relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    whole = torch.stack([tensor.double().norm() for tensor in expected.values()]).norm()
    errors = []
    for name, right in expected.items():
        own = right.double().norm()
        error = (found[name].double() - right.double()).norm()
        errors.append((error / (own if own > 1e-3 * whole else whole)).item())
    return max(errors)


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((found[name] - right).abs().max().item() for name, right in expected.items())


def row(layout: str, family: str, differences: Differences) -> str:
    """One line of the table."""
    numbers = (differences.loss, differences.gradient, differences.parameter)
    return (
        f"| {layout} | {LAYOUTS[layout].world_size} | {family} | {' | '.join(f'{n:.1e}' for n in numbers)} |"
    )


def main() -> None:
    """Measure every case and write the table; a difference that the suite would not take is an error."""
    rows, wrong = [], []
    for layout, family in CASES:
        differences = measure(Subject("language_model", "megatron", layout=layout), family)
        rows.append(row(layout, family, differences))
        print(rows[-1], flush=True)
        if not differences.allowed:
            wrong.append(f"{layout} {family}")
    head = [
        "| layout | ranks | model | loss | gradient | parameters |",
        "|---|---|---|---|---|---|",
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text("\n".join([before + START, *head, *rows, END]) + after, encoding="utf-8")
    if wrong:
        sys.exit(f"more than the suite allows: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
