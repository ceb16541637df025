"""Each error is also the built-in error that fits, and no other."""

import pytest

from gsplit.errors import CommError, GSplitError, InputError, MissingDependencyError, RankFaultError, StoreError

BUILT_IN = (ValueError, RuntimeError, ImportError)


@pytest.mark.parametrize(
    "kind, like",
    [
        (InputError, ValueError),
        (StoreError, ValueError),
        (CommError, RuntimeError),
        (RankFaultError, RuntimeError),
        (MissingDependencyError, ImportError),
    ],
)
def test_an_error_is_one_kind_of_built_in_error(kind: type[GSplitError], like: type[Exception]) -> None:
    assert issubclass(kind, GSplitError)
    assert [base for base in BUILT_IN if issubclass(kind, base)] == [like]


def test_the_base_is_no_value_error() -> None:
    assert GSplitError.__bases__ == (Exception,)
