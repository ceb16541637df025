"""A mesh says what it is, closes once, and is never made up where there are other ranks."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gsplit
from gsplit.device.devices import resolve_device
from gsplit.distributed.comm import mesh as mesh_module
from gsplit.distributed.comm import process_groups
from gsplit.distributed.comm.comm import Call, Comm, SoloComm
from gsplit.distributed.comm.mesh import Mesh, _choose_sample_device, resolve_mesh, solo_mesh

CALLS: list[Callable[[Comm, Call], object]] = [
    lambda comm, call: comm.all_to_all_counts(call, (1,)),
    lambda comm, call: comm.all_to_all(call, torch.empty(1), torch.ones(1), (1,), (1,)),
    lambda comm, call: comm.all_reduce(call, torch.ones(1)),
    lambda comm, call: comm.broadcast(call, torch.ones(1)),
    lambda comm, call: comm.gather_text(call, "here"),
]


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher would set for one rank of one, so that a process group can be made in this process."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_repr_fits_one_line() -> None:
    assert repr(solo_mesh()) == "Mesh(rank 0 of 1, replica 0 of 1, device cpu)"
    assert repr(solo_mesh("meta", "cpu")) == "Mesh(rank 0 of 1, replica 0 of 1, device meta, samples on cpu)"


def test_every_group_is_on_its_device() -> None:
    mesh = solo_mesh("meta", "cpu")
    assert (mesh.device.type, mesh.sample_device.type) == ("meta", "cpu")
    groups = {name: getattr(mesh, name) for name in ("shuffles", "loading", "gradients", "world")}
    assert {name: comm.device.type for name, comm in groups.items()} == {
        "shuffles": "meta",
        "loading": "cpu",
        "gradients": "meta",
        "world": "meta",
    }
    for comm in groups.values():
        assert comm.send_buffer((2, 3), torch.float32).device == comm.device


def test_the_sample_device_is_the_device_unless_told_otherwise() -> None:
    assert solo_mesh("meta").sample_device == torch.device("meta")
    assert solo_mesh("meta", "cpu").sample_device == torch.device("cpu")
    assert gsplit.init("cpu").sample_device == torch.device("cpu")


@pytest.mark.parametrize("device, runs, chosen", [("meta", True, "meta"), ("meta", False, "cpu"), ("cpu", True, "cpu")])
def test_auto_samples_on_a_device_that_runs_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, runs: bool, chosen: str
) -> None:
    monkeypatch.setattr("gsplit.distributed.comm.mesh.is_available", lambda device: runs)
    with caplog.at_level("INFO"):
        assert _choose_sample_device(torch.device(device)) == torch.device(chosen)
    assert f"mini-batches are sampled on {chosen}" in caplog.text
    assert gsplit.init("cpu", "auto").sample_device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(gsplit.InputError, match="expected a machine with a cuda device"):
        gsplit.init("cuda")


def test_a_device_without_a_number_is_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, index in (("0", 0), ("1", 1), ("3", 1)):  # the last sees two of its host's devices
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert resolve_device("cuda") == torch.device("cuda", index)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(gsplit.InputError, match="expected one of the 2 that this process sees .got cuda:2, of 2"):
        resolve_device("cuda:2")


def test_every_device_has_its_backend() -> None:
    assert [process_groups._backend(torch.device(name)) for name in ("cpu", "cuda", "cuda:1")] == [
        "gloo",
        "nccl",
        "nccl",
    ]
    for name in ("xpu", "mps"):
        with pytest.raises(gsplit.InputError, match=f"device: expected cpu or cuda for several ranks .got {name}"):
            process_groups.connect(torch.device(name), torch.device("cpu"), 1, 60.0)


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_closed_mesh_refuses_every_collective(number: int) -> None:
    with solo_mesh() as mesh:
        CALLS[number](mesh.world, Call("count"))
    for comm in (mesh.shuffles, mesh.loading, mesh.gradients, mesh.world):
        message = r"count of step 3, layer 1: expected an open mesh \(got one that was closed\)"
        with pytest.raises(gsplit.InputError, match=message):
            CALLS[number](comm, Call("count", 3, 1))


def test_closing_twice_is_fine() -> None:
    with solo_mesh() as mesh:
        mesh.close()
    mesh.close()
    assert mesh.world.closed


@pytest.mark.usefixtures("process_group")
class TestProcessGroup:
    """How a mesh leaves a real process group, of one rank."""

    @pytest.fixture(autouse=True)
    def _no_group_is_left(self) -> object:
        assert not dist.is_initialized()
        yield
        if dist.is_initialized():
            dist.destroy_process_group()

    def make(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", sample_device: str | None = None) -> Mesh:
        monkeypatch.setattr(mesh_module, "_num_launched_ranks", lambda: 2)  # one is enough to join with
        return gsplit.init(device, sample_device)

    def test_a_group_of_devices_waits_as_long_as_torch_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if the ranks wait a minute for each other on the host."""
        mesh = self.make(monkeypatch)
        limits: list[float] = []
        make_group = dist.new_group

        def new_group(ranks: list[int], *, timeout: timedelta, backend: str) -> object:
            limits.append(timeout.total_seconds())
            return make_group(ranks, backend="gloo")

        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(process_groups, "_backend", lambda device: "nccl")
        assert mesh.connection is not None
        mesh.connection.new_comm(torch.device("cpu"))
        assert limits == [600.0]
        mesh.close()

    def test_close_leaves_the_process_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh = self.make(monkeypatch)
        assert dist.is_initialized()
        mesh.world.all_reduce(Call("sum"), torch.ones(1)).wait()
        mesh.close()
        mesh.close()
        assert not dist.is_initialized()
        for comm in (mesh.shuffles, mesh.loading, mesh.gradients, mesh.world):
            with pytest.raises(gsplit.InputError, match="expected an open mesh"):
                comm.all_to_all_counts(Call("count"), (1,))

    def test_an_old_mesh_that_is_closed_again_leaves_the_new_one_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        old = self.make(monkeypatch)
        old.close()
        new = self.make(monkeypatch)
        old.close()
        new.world.all_reduce(Call("sum"), torch.ones(1)).wait()
        new.close()

    @pytest.mark.parametrize("code, left", [(None, True), (0, True), (1, False), ("why", False)])
    def test_a_program_that_exits_well_leaves_politely(
        self, code: int | str | None, left: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SystemExit), self.make(monkeypatch):
            raise SystemExit(code)
        assert dist.is_initialized() is not left

    def test_an_exception_that_unwinds_does_not_leave_politely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        unregistered: list[object] = []
        monkeypatch.setattr(atexit, "unregister", unregistered.append)
        with pytest.raises(RuntimeError, match="on purpose"), self.make(monkeypatch) as mesh:
            raise RuntimeError("on purpose")
        assert dist.is_initialized()
        assert mesh.world.closed
        assert mesh.connection is not None
        assert unregistered == [mesh.connection._end]  # nor when the program ends

    def test_close_in_a_finally_clause_does_not_leave_politely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            mesh = self.make(monkeypatch)
            try:
                raise RuntimeError("on purpose")
            finally:
                mesh.close()

        with pytest.raises(RuntimeError, match="on purpose"):
            fail()
        assert dist.is_initialized()

    def test_a_process_group_of_the_program_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dist.init_process_group("gloo")
        self.make(monkeypatch).close()
        assert dist.is_initialized()


class TestResolveMesh:
    def test_a_mesh_is_taken_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mesh = solo_mesh()
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert resolve_mesh(mesh, "infer") is mesh

    @pytest.mark.parametrize("world_size", [None, "1"])
    def test_alone_means_alone(self, world_size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if world_size:
            monkeypatch.setenv("WORLD_SIZE", world_size)
        mesh = resolve_mesh(None, "infer")
        assert (mesh.size, type(mesh.world)) == (1, SoloComm)

    def test_none_under_a_launcher_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        message = (
            r"infer: expected the mesh of the 4 ranks \(got mesh=None\).*mesh = gsplit.init\(\).*mesh=mesh to infer"
        )
        with pytest.raises(gsplit.InputError, match=message):
            resolve_mesh(None, "infer")

    def test_none_in_a_process_group_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        assert "WORLD_SIZE" not in os.environ
        with pytest.raises(gsplit.InputError, match="NeighborLoader: expected the mesh of the 3 ranks"):
            resolve_mesh(None, "NeighborLoader")
