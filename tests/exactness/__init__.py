"""N ranks compute what one process computes: one table of cases, one training loop, one oracle."""
