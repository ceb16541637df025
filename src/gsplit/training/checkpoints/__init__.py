"""Training states on disk: a file per state, written whole or not at all, checked when read. No pickles."""

__all__: list[str] = []
