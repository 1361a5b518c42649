"""Faults of a machine and of models: kills, a full disk, two runs at once, fuzzed answers (docs/RELIABILITY.md)."""
