"""Runs of the command line on heterogeneous graphs: training, resuming, inference, reports, plans, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch_geometric.data import HeteroData
from typed_models import COUNTS, RELATIONS, WIDTHS, make_data
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.report.reading import read_run
from gsplit.run.config import TYPED_MODELS, TrainSettings
from gsplit.run.folder import finished_folder, load_run, load_weights
from gsplit.run.models import make_typed_model, relations_of_layers
from gsplit.run.recipe import build_model, infer_run, verify_run
from gsplit.run.training import train_run
from gsplit.store.reader import Store

SETTINGS = TrainSettings(
    targets="paper/train", hidden=8, fanout=[3, 2], batch_size=12, epochs=3, lr=0.02, evaluate_every=1, save_every=2
)
OPTIONS = ["--targets", "paper/train", "--hidden", "8", "--fanout", "3,2", "--batch-size", "12"]


def _data() -> HeteroData:
    data = make_data()
    for name in COUNTS:
        data[name].x = data[name].x.float()
        data[name].z = torch.arange(COUNTS[name] * 2.0).view(-1, 2).sin()
    place = torch.arange(COUNTS["paper"]) % 3
    for number, name in enumerate(("train", "val", "test")):
        data["paper"][f"{name}_mask"] = place == number
    return data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("typed")
    plain = gsplit.from_pyg(_data(), folder / "g.gsplit")
    options: dict[str, Any] = {"batch_size": 12, "solver": "random", "objective": "random", "epochs": 1}
    return gsplit.partition(plain, folder / "p.gsplit", 2, [3, 2], "paper/train", **options)


@pytest.fixture(scope="module")
def run(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    train_run(SETTINGS, store, solo_mesh(), out)
    return out


def test_a_run_is_evaluated_by_its_type_and_resumes_bit_for_bit(store: Store, run: Path, tmp_path: Path) -> None:
    history = json.loads((finished_folder(run) / "history.json").read_text())
    assert len(history["losses"]) == 15 and np.mean(history["losses"][-5:]) < np.mean(history["losses"][:5])
    assert [sorted(found) for found in history["evaluations"]] == [["epoch", "paper/test", "paper/val"]] * 3
    best = max(found["paper/val"] for found in history["evaluations"])
    assert read_run(run).best_score == best
    out = tmp_path / "part"
    first = train_run(SETTINGS.model_copy(update={"steps": 7}), store, solo_mesh(), out)
    assert len(first.history.losses) == 7
    again = train_run(SETTINGS, store, solo_mesh(), out, resume=True)
    assert again.history.losses.tolist() == history["losses"]
    whole, resumed = (load_file(finished_folder(path) / "weights.safetensors") for path in (run, out))
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(value, resumed[name]) for name, value in whole.items())
    other = SETTINGS.model_copy(update={"targets": "paper/val"})
    with pytest.raises(InputError, match="targets"):
        train_run(other, store, solo_mesh(), out, resume=True)


def test_predictions_are_those_of_the_model_on_the_whole_graph(store: Store, run: Path, tmp_path: Path) -> None:
    settings, shape = load_run(run)
    assert shape.widths == WIDTHS and shape.edge_types == RELATIONS
    model = build_model(settings, shape, store).eval()
    load_weights(run, model)
    data = _data()
    with torch.no_grad():
        wanted = model(data.x_dict, data.edge_index_dict).numpy()
    infer_run(run, store, tmp_path / "out.npy", solo_mesh())
    assert np.abs(np.load(tmp_path / "out.npy") - wanted).max() < 1e-5
    for only in ("test", "paper/test"):
        infer_run(run, store, tmp_path / "out.csv", solo_mesh(), only=only, overwrite=True)
        lines = (tmp_path / "out.csv").read_text().splitlines()[1:]
        assert [int(line.split(",")[1]) for line in lines] == wanted.argmax(1)[2::3].tolist()
    narrow = _data()
    del narrow["author"].x
    narrow["author"].x = torch.zeros(COUNTS["author"], 2)
    with pytest.raises(InputError, match="expected features by type .*'author': 5.* .got .*'author': 2"):
        infer_run(run, gsplit.from_pyg(narrow, tmp_path / "n.gsplit"), tmp_path / "x.npy", solo_mesh())


@pytest.mark.parametrize("model", TYPED_MODELS)
def test_every_model_is_exact_with_several_features(store: Store, model: str) -> None:
    """One process against itself runs all checks of the wrapped model; ranks are in tests/dist."""
    norm = "batch_norm" if model == "sage" else "layer_norm"
    settings = SETTINGS.model_copy(update={"model": model, "features": "x,z", "norm": norm})
    found = verify_run(settings, store, solo_mesh(), 2)
    assert found.ok and found.largest_gradient > 0


def test_layers_compute_what_the_targets_need() -> None:
    layers = relations_of_layers(list(COUNTS), RELATIONS, "paper", 2)
    assert layers[1] == [each for each in RELATIONS if each[2] == "paper"]
    assert layers[0] == list(RELATIONS)
    weights = dict(make_typed_model(**_sizes(), vertex_type="field", num_layers=1).named_parameters())
    assert {name.split("<")[1].split("___")[0] for name in weights} == {"paper", "author"}
    with pytest.raises(InputError, match="expected some into the targets' type at each of 1 layers .got venue"):
        relations_of_layers(["venue", "paper"], [("venue", "holds", "paper")], "venue", 1)
    with pytest.raises(InputError, match="model: expected one of sage, .* for a heterogeneous graph .got gcn"):
        make_typed_model(**{**_sizes(), "kind": "gcn"}, vertex_type="paper", num_layers=1)
    with pytest.raises(InputError, match="hidden: expected a multiple of 3 heads .got 8"):
        make_typed_model(**{**_sizes(), "kind": "gat", "heads": 3}, vertex_type="paper", num_layers=1)


def _sizes() -> dict[str, Any]:
    return {"kind": "sage", "widths": WIDTHS, "edge_types": RELATIONS, "hidden_channels": 8, "out_channels": 4}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"task": "link"}, "task: expected a setting that is built .got link.*LinkNeighborLoader"),
    ({"model": "gin"}, "model: expected a setting that is built .got gin.*sage, sage_max, gat"),
    ({"jk": "cat"}, "jk: expected a setting that is built"),
    ({"edge_attr": "edge_attr"}, "edge_attr: expected a setting that is built"),
    ({"edge_weight": "edge_weight"}, "edge_weight: expected a setting that is built"),
    ({"sampler": "labor"}, "sampler: expected a setting that is built .*labor"),
    ({"copies": "1KB"}, "copies: expected a setting that is built .*1KB"),
    ({"device_cache": "1KB"}, "device_cache: expected a setting that is built .*1KB"),
    ({"targets": "train"}, "expected one of the targets it has, targets/paper/test.* .got targets/train"),
    ({"targets": "author/train"}, "expected one of the targets it has.* .got targets/author/train"),
    ({"features": "w"}, "features: expected features w of every vertex type with edges .got none of paper, author, f"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_built_is_refused_by_name(store: Store, change: dict[str, Any], message: str) -> None:
    settings = SETTINGS.model_copy(update=change)
    message = message.replace("is built", "is built for heterogeneous graphs")
    with pytest.raises(InputError, match=message):
        train_run(settings, store, solo_mesh(), None)
    with pytest.raises(InputError, match=message):
        verify_run(settings, store, solo_mesh(), 1)


def test_types_without_features_and_labels_are_named(tmp_path: Path) -> None:
    data = _data()
    data["author"].num_nodes = COUNTS["author"]
    del data["author"].x
    store = gsplit.from_pyg(data, tmp_path / "g.gsplit")
    with pytest.raises(InputError, match="of every vertex type with edges .got none of author.*OwnedEmbedding"):
        train_run(SETTINGS, store, solo_mesh(), None)
    data["author"].train_mask = torch.arange(COUNTS["author"]) % 2 == 0
    other = gsplit.from_pyg(data, tmp_path / "h.gsplit")
    with pytest.raises(InputError, match="the store: expected labels of author to train on"):
        train_run(SETTINGS.model_copy(update={"targets": "author/train"}), other, solo_mesh(), None)


def test_plans_of_a_type_are_printed(store: Store) -> None:
    words = ["plan", str(store.path), *OPTIONS, "--hardware", "v100-nvlink"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "data_cached(strided)" in shown.output and "is fastest" in shown.output
    cached = CliRunner().invoke(app, [*words, "--cache", "1KB", "--features-on-disk", "--json"])
    assert json.loads(cached.stdout)["model"]["types"]["widths"] == list(WIDTHS.values())
    every = CliRunner().invoke(app, [*words, "--targets", "paper"])
    assert every.exit_code == 0
    wrong = CliRunner().invoke(app, [*words, "--targets", "train"])
    assert wrong.exit_code == 2 and "expected one of the targets it has, targets/paper/test" in wrong.stderr
