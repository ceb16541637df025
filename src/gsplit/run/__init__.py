"""A training run from settings to results: settings, stock models, the recipe, the folder on disk."""

__all__: list[str] = []
