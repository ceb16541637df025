"""Ranks that torchrun has started again find each other, also where its rendezvous keeps what the ended ones wrote."""

from pathlib import Path

import torch.distributed as dist
from forked_scripts import start_forked

PROGRAM = """
import os
import gsplit
from gsplit.distributed.comm.comm import Call

mesh = gsplit.init()
print("met:", mesh.world.gather_text(Call("meet"), str(mesh.rank)), flush=True)
os._exit(0)  # as if killed: nothing is taken back
"""


def test_a_second_start_does_not_read_the_addresses_of_the_first(tmp_path: Path) -> None:
    """With a store that outlives the ranks, as torchrun's static rendezvous has."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    (tmp_path / "rank.py").write_text(PROGRAM)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for start in ("0", "1"):
        ranks = [
            start_forked(
                [str(tmp_path / "rank.py")],
                tmp_path,
                {**shared, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": start},
                name=f"start-{start}-rank-{rank}",
            )
            for rank in ("0", "1")
        ]
        for done in [rank.wait(300) for rank in ranks]:
            assert (done.returncode, done.stdout) == (0, "met: ['0', '1']\n"), done.stderr
