"""``python -m gsplit_bench``."""

from gsplit_bench.commands import app

__all__: list[str] = []

if __name__ == "__main__":
    app(prog_name="python -m gsplit_bench")
