"""``python -m gsplit`` is the ``gsplit`` command."""

from gsplit.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
