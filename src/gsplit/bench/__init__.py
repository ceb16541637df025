"""Measurements anybody can repeat: ours against a named peer or the bare engine, interleaved in one run."""

__all__: list[str] = []
