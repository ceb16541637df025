"""Commands of the exactness harness.

python -m tests.exactness cover            find the covering array anew, after an option or a refusal has changed
python -m tests.exactness record [FILE]    write the golden record, or another one to compare with it
python -m tests.exactness grid OUT.json [GROUP ...]    train the whole grid, or some groups, and write a record
"""

import sys
import tempfile
from pathlib import Path

from tests.exactness.cover import write_covering_cases
from tests.exactness.graphs import write_stores
from tests.exactness.grid import GROUPS, MESHES, run_grid, write_grid
from tests.exactness.record import RECORD, write_record
from tests.exactness.training import BOUND


def main(words: list[str]) -> None:
    match words:
        case ["cover"]:
            write_covering_cases()
        case ["record", *path]:
            with tempfile.TemporaryDirectory() as folder:
                write_stores(Path(folder))
                write_record(Path(path[0]) if path else RECORD, Path(folder))
        case ["grid", out, *groups] if set(groups) <= set(GROUPS):
            with tempfile.TemporaryDirectory() as folder:
                write_stores(Path(folder))
                rows = run_grid(Path(folder), groups or list(GROUPS), MESHES)
            write_grid(Path(out), rows)
            if any(row["largest"] > BOUND for row in rows):
                raise SystemExit(1)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
