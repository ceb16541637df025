"""The errors a user can see. Each message says what was expected, what was found and how to fix it.

All are ``GSplitError``, and each is also the built-in error that fits: ``ValueError`` where what the caller gave cannot
be used (``InputError``, ``StoreError``), ``RuntimeError`` where ranks lost each other (``CommError``), ``ImportError``
where a package is missing (``MissingDependencyError``). Our own bugs are assertions. ``explain`` is the one place that
puts the three parts of a message together.
"""

__all__ = [
    "CommError",
    "GSplitError",
    "InputError",
    "MissingDependencyError",
    "RankFaultError",
    "StoreError",
    "Terminated",
    "explain",
    "printable",
]


class GSplitError(Exception):
    """Base of every error GSplit raises on purpose."""


class StoreError(GSplitError, ValueError):
    """A store on disk is missing, damaged, of another version, or would be overwritten."""


class InputError(GSplitError, ValueError):
    """Data or options handed to GSplit cannot be used as they are."""


class CommError(GSplitError, RuntimeError):
    """A collective between ranks failed: another rank ended, or the ranks did not do the same."""


class RankFaultError(CommError):
    """A collective failed, and the message names the rank at fault."""


class MissingDependencyError(GSplitError, ImportError):
    """An optional package is needed for what was asked."""


class Terminated(BaseException):
    """SIGTERM, as an exception that unwinds the work."""


def explain(where: object, expected: str, got: object, fix: str) -> str:
    """One message form for the whole project.

    >>> explain("x.npy", "128 columns", 64, "import it again")
    'x.npy: expected 128 columns (got 64). Fix: import it again.'
    """
    return printable(f"{where}: expected {expected} (got {got}). Fix: {fix}.")


def printable(text: str) -> str:
    """Text as a terminal may show it: what a file says must not move the cursor or begin a line of its own.

    >>> printable("two\\nlines, \\x1b[31mred"), printable("fünf ≠ 5")
    ('two\\\\nlines, \\\\x1b[31mred', 'fünf ≠ 5')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
