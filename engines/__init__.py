"""The engine library that all stages share: one contract, many backends."""
