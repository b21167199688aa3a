"""Benchmarks: each writes one JSON file; none is a test."""
