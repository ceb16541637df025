"""Sizes in bytes as users write them."""

from gsplit.errors import InputError, explain

__all__ = ["parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(size: int | str, option: str = "cache") -> int:
    """Parse a number of bytes, with or without a unit. ``option``: the name of the option, for messages.

    >>> parse_bytes(4096), parse_bytes("2GB"), parse_bytes("1.5 MiB")
    (4096, 2000000000, 1572864)
    """
    text = str(size).strip().upper()
    number = text.rstrip("KMGTIB ")
    unit = _UNITS.get(text[len(number) :].strip())
    try:
        num_bytes = -1 if unit is None or isinstance(size, bool) else int(float(number) * unit)
    except (ValueError, OverflowError):
        num_bytes = -1
    if num_bytes < 0:
        fix = "write it as 500MB, 2GB, 1.5GiB or a number of bytes"
        raise InputError(explain(option, "a size in bytes", repr(size), fix))
    return num_bytes
