"""Training states on disk: one file per state, written atomically and checked when read. No pickles."""

__all__: list[str] = []
