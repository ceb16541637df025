"""The tests; those of ranks import each other by this name in every process."""
