"""Two results of one learning identity, side by side: weights, optimizer, curves, answers and files. Loads no framework."""

from workflow.compare.findings import Finding
from workflow.compare.pairs import NotComparable, Pair, find_pairs
from workflow.compare.results import Comparison, compare, passed, summary

__all__ = ["Comparison", "Finding", "NotComparable", "Pair", "compare", "find_pairs", "passed", "summary"]
