"""Stands in the place of the real package, in the jobs of the benchmark only."""
