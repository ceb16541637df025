"""Devices, streams, and packing into pinned memory."""

__all__: list[str] = []
