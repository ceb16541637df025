"""Reading stored rows: features and labels of the vertices a rank owns."""

__all__: list[str] = []
