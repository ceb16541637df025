"""The offline part of splitting (paper section 4): presample, weigh, solve, renumber, measure."""

__all__: list[str] = []
