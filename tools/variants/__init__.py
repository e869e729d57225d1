"""The parts of tools/run_variants.py."""
