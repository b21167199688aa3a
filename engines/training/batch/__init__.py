"""Batches inside an engine: packed sequences, loss weights that exist before the split, and the split itself."""

from engines.training.batch.packed import PackedBatch
from engines.training.batch.split import (
    NO_PADDING,
    Alignment,
    MicroBatch,
    SequenceTooLongError,
    balanced_partitions,
    pipeline_order,
    sequence_costs,
    split_micro_batches,
)
from engines.training.batch.weights import AGGREGATIONS, Aggregation, LossTotals, loss_totals, loss_weights

__all__ = [
    "AGGREGATIONS",
    "NO_PADDING",
    "Aggregation",
    "Alignment",
    "LossTotals",
    "MicroBatch",
    "PackedBatch",
    "SequenceTooLongError",
    "balanced_partitions",
    "loss_totals",
    "loss_weights",
    "pipeline_order",
    "sequence_costs",
    "split_micro_batches",
]
