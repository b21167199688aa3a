"""Two results of one learning identity, side by side: weights, optimizer, curves and samples. Loads no framework."""

from workflow.compare.pairs import NotComparable, Pair, find_pairs
from workflow.compare.results import Comparison, Finding, compare

__all__ = ["Comparison", "Finding", "NotComparable", "Pair", "compare", "find_pairs"]
