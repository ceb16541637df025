"""The errors that users see. Each message has what was expected, what was found, and the fix.

All are ``GSplitError``. Each is also the matching built-in error: ``ValueError`` for unusable input (``InputError``,
``StoreError``), ``RuntimeError`` for failed communication (``CommError``) and storage (``UnavailableError``),
``ImportError`` for a missing package (``MissingDependencyError``). Bugs of GSplit itself are assertions. ``explain``
formats all messages.
"""

__all__ = [
    "CommError",
    "GSplitError",
    "InputError",
    "MissingDependencyError",
    "RankFaultError",
    "StoreError",
    "Terminated",
    "UnavailableError",
    "explain",
    "printable",
]


class GSplitError(Exception):
    """Base class of the errors that GSplit raises."""


class StoreError(GSplitError, ValueError):
    """A store on disk is missing, damaged, of another version, or would be overwritten."""


class InputError(GSplitError, ValueError):
    """Data or options cannot be used as they are."""


class UnavailableError(GSplitError, RuntimeError):
    """Storage is full, fails or does not answer. The same may work later, so ranks are restarted after it."""


class CommError(GSplitError, RuntimeError):
    """A collective failed: a rank ended, or the ranks called different collectives."""


class RankFaultError(CommError):
    """A collective failed, and the message names the rank at fault."""


class MissingDependencyError(GSplitError, ImportError):
    """An optional package is needed."""


class Terminated(BaseException):
    """SIGTERM as an exception, so that resources are released before the process ends."""


def explain(where: object, expected: str, got: object, fix: str) -> str:
    """Format the message of an error.

    >>> explain("x.npy", "128 columns", 64, "import it again")
    'x.npy: expected 128 columns (got 64). Fix: import it again.'
    """
    return printable(f"{where}: expected {expected} (got {got}). Fix: {fix}.")


def printable(text: str) -> str:
    """Escape text for a terminal, so that the content of a file cannot move the cursor or start a new line.

    >>> printable("two\\nlines, \\x1b[31mred"), printable("fünf ≠ 5")
    ('two\\\\nlines, \\\\x1b[31mred', 'fünf ≠ 5')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
