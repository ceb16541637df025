"""The documentation: links out of docs/ lead somewhere, nothing generated is missing, every quoted message exists.

The site itself is built by ``make docs``, strictly, in ``make check``.
"""

import ast
import inspect
import json
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from docs_hooks import ROOT, hooks

import gsplit
from gsplit_bench.commands import app as benchmarks
from gsplit_bench.measured import checkpoint_shares, find_record, read_record
from gsplit_bench.measured_choice import summarise as summarise_choices
from gsplit_bench.planner_check import LEAST_STAGE_S
from gsplit_bench.step_overhead import describe_device, describe_host

DOCS = ROOT / "docs"
REPOSITORY = "https://forge.example/gsplit"
DEVICE_TESTS = ("simulated_device", "device_loading", "device_training")
MEASUREMENTS = vars(typer.main.get_command(benchmarks))["commands"]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return hooks()


def test_links_out_of_docs_become_links_to_the_repository(site: ModuleType) -> None:
    assert site.link_out("training.md", "../src/gsplit/training/trainer.py", REPOSITORY) == (
        f"{REPOSITORY}/blob/main/src/gsplit/training/trainer.py"
    )
    assert site.link_out("measured.md", "../benchmarks/results", REPOSITORY + "/") == (
        f"{REPOSITORY}/tree/main/benchmarks/results"
    )
    assert site.link_out("decisions/0008-loading.md", "../loading.md", REPOSITORY) == "../loading.md"
    with pytest.raises(Exception, match="training.md links to ../src/gone.py, which is not there"):
        site.link_out("training.md", "../src/gone.py", REPOSITORY)


def test_what_the_texts_link_to_exists() -> None:
    texts = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert len(texts) > 40
    for text in texts:
        said = text.read_text()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", said) + re.findall(r'<img src="([^"]+)"', said):
            assert "://" in link or (text.parent / link).exists(), f"{text.name}: {link}"


def _options(tree: object, path: tuple[str, ...] = ("gsplit",)) -> list[tuple[str, str]]:
    if isinstance(tree, dict):
        return [pair for word, below in tree.items() for pair in _options(below, (*path, word))]
    assert isinstance(tree, list)
    return [(" ".join(path), option) for option in tree if option.startswith("--") and option != "--help"]


def test_the_command_line_reference_has_every_command_and_option(site: ModuleType) -> None:
    sections = re.split(r"^#+ ", site.command_line(), flags=re.MULTILINE)
    by_name = {section.split("\n", 1)[0]: section for section in sections}
    recorded = _options(json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text()))
    assert len(recorded) > 100
    for command, option in recorded:
        assert option in by_name[command], (command, option)


def test_every_public_name_is_in_the_api_reference() -> None:
    text = (DOCS / "api.md").read_text()
    errors = text.split("::: gsplit.errors")[1]
    for name in set(dir(gsplit)) - {"__version__"}:
        assert f"::: gsplit.{name}\n" in text or name in errors, name
    for handle, members in re.findall(r"::: ([\w.]+)\n    options:\n      members: \[(.*)\]", text):
        home, _, last = handle.rpartition(".")
        owner = import_module(handle) if handle == "gsplit.errors" else getattr(import_module(home), last)
        assert [name for name in members.split(", ") if not hasattr(owner, name)] == [], handle


def test_every_module_has_a_place_in_the_tour() -> None:
    """A folder that the layout names stands for its modules; nothing is named that does not exist."""
    layout = (DOCS / "tour.md").read_text().split("```text\n")[1].split("```")[0]
    assert len(layout.splitlines()) == 16
    package = ROOT / "src" / "gsplit"
    paths = [path for path in package.iterdir() if path.name not in ("py.typed", "__main__.py", "__pycache__")]
    names = {path.stem if path.suffix == ".py" else f"{path.name}/" for path in paths}
    first, *lines = layout.splitlines()
    modules = set(re.findall(r"\w+", first.split("  ")[0]))
    folders = {name for line in lines for name in re.match(r"(?:\w+/ ?)+", line)[0].split()}  # type: ignore[index]
    assert modules | folders == names


def test_every_capability_has_a_command_or_call_and_a_test_that_exist() -> None:
    rows = [line.split(" | ") for line in (DOCS / "capabilities.md").read_text().splitlines() if line.startswith("| ")]
    claims = [row for row in rows if row[0] != "| capability"]
    commands = json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text())
    assert len(claims) > 50
    for claim, calls, tests in claims:
        named = re.findall(r"tests/[\w/]+\.py", tests)
        assert named and all((ROOT / name).is_file() for name in named), (claim, tests)
        assert "`" in calls, claim
        for call in re.findall(r"`([^`]+)`", calls):
            words = call.split()
            if words[0] == "python":
                assert words[:3] == ["python", "-m", "gsplit_bench"] and words[3] in MEASUREMENTS, call
            elif words[0] == "gsplit":
                _check_command(words[1:], commands, call)
            else:
                function, arguments = re.fullmatch(r"gsplit\.(\w+)(?:\((.*)\))?", call).groups()  # type: ignore[union-attr]
                assert function in dir(gsplit), call
                keyword = (arguments or "").partition("=")
                assert not keyword[1] or keyword[0] in inspect.signature(getattr(gsplit, function)).parameters, call


def test_every_claim_and_trap_of_the_tasks_names_tests_that_exist() -> None:
    page = (DOCS / "decisions" / "0017-samplers-pairs-types.md").read_text()
    claims, traps = (
        [line.split(" | ") for line in page.split(head)[1].split("\n\n")[0].splitlines() if line.startswith("| ")]
        for head in ("| claim | shown by |\n|---|---|\n", "| trap | avoided, as shown by |\n|---|---|\n")
    )
    assert len(claims) == 9 and [row[0].split(".")[0] for row in traps] == [f"| {n}" for n in range(1, 18)]
    for claim, tests in [*claims, *traps]:
        named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", tests)
        assert named, claim
        for path, test in named:
            assert f"\ndef {test}(" in (ROOT / path).read_text(), (claim, path, test)


def _check_command(words: list[str], commands: Any, call: str) -> None:
    while isinstance(commands, dict):
        assert words and words[0] in commands, call
        commands, words = commands[words[0]], words[1:]
    assert [word for word in words if word.startswith("--") and word not in commands] == [], call


def test_every_measurement_that_a_text_names_exists() -> None:
    texts = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    named = {
        (text.name, word) for text in texts for word in re.findall(r"gsplit_bench ([a-z][\w-]*)", text.read_text())
    }
    assert len(named) > 30
    assert [(page, word) for page, word in named if word not in MEASUREMENTS] == []


def test_every_page_has_a_place_in_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text().replace("!ENV ", "")
    placed = re.findall(r"[\w/-]+\.md", json.dumps(yaml.safe_load(settings)["nav"]))
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def _rows(page: Path) -> list[str]:
    """First cells of the rows of all tables whose first column holds messages."""
    cells: list[str] = []
    inside = False
    for line in page.read_text().splitlines():
        first = line.split(" | ")[0].removeprefix("| ")
        if not line.startswith("|"):
            inside = False
        elif first.startswith("message"):
            inside = True
        elif inside and not line.startswith("|---"):
            cells.append(first)
    return cells


def _strings() -> Iterator[str]:
    """Every string of the program but its docstrings, which are expressions that stand alone."""
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield node.value


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    cells = _rows(DOCS / "troubleshooting.md")
    messages = [message for cell in cells if cell.startswith("`") for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 40
    said = "\n".join(_strings())
    assert [message for message in messages if message not in said] == []


def test_the_allocator_settings_of_the_page_are_the_launchers() -> None:
    from gsplit.distributed.launch.allocator import ALLOCATOR

    export = " ".join(["export", *(f"{name}={value}" for name, value in ALLOCATOR.items())])
    assert export in (DOCS / "performance.md").read_text()


def test_the_result_of_the_front_page_is_that_of_its_picture() -> None:
    drawing = runpy.run_path(str(DOCS / "draw_result.py"))
    seconds, mean = drawing["read_seconds"](), drawing["mean"]

    def less(peer: str) -> str:
        ratios = [mean(seconds["sage", n, "split"]) / mean(seconds["sage", n, peer]) for n in drawing["RANKS"]]
        return " and ".join(f"{100 * (1 - ratio):.0f}" for ratio in ratios)

    said = f"{less('dgl')} % less CPU time than with DGL, and {less('pyg_our_sampler')} % less than with PyG"
    said = f"On 2 and 4 ranks that share two cores, a GraphSAGE step of `split` takes {said}."
    assert said in (ROOT / "README.md").read_text(), said


def test_the_cost_of_watching_is_that_of_the_record() -> None:
    found = read_record("watch-cost")
    text = " ".join((ROOT / "docs" / "reliability.md").read_text().split())
    milliseconds = 1000 * found["watch_cpu_s"]
    assert f"each of {found['calls']:.0f} records in a step of three layers: {milliseconds:.2f} ms" in text
    assert f"{100 * found['share']:.1f} % of a small step of {1000 * found['step_cpu_s']:.0f} ms" in text
    assert f"Comparing the {found['weights']:,} weights takes {100 * found['weights_share']:.2f} % of that step" in text


def test_the_table_of_faults_is_that_of_the_record() -> None:
    trials = read_record("faults")["records"]
    assert all(trial["verdict"] == "ok" and trial["left"] == [] for trial in trials)
    stopped, disagreed = (
        [trial["seconds"] for trial in trials if word in trial["trial"]] for word in (": SIGSTOP", "mismatched")
    )
    others = [trial["seconds"] for trial in trials if trial["seconds"] not in stopped + disagreed]
    loads = [trial["load"] for trial in trials]
    page = " ".join((DOCS / "reliability.md").read_text().split())
    assert f"{len(trials)} trials on two ranks" in page
    assert f"within {max(others):.1f} s of the fault, within {max(stopped):.1f} s if a rank was stopped" in page
    assert f"{min(disagreed):.1f} to {max(disagreed):.1f} s after the start of ranks that disagreed" in page
    assert f"a load of {min(loads):.0f} to {max(loads):.0f})" in page


@pytest.mark.parametrize("name, ranks", [("soak", "4 ranks"), ("soak-hosts", "two hosts")])
def test_the_soaks_are_those_of_the_records(name: str, ranks: str) -> None:
    runs = read_record(name)["runs"]
    trials = [trial for run in runs for trial in run["trials"]]
    right = sum(trial["as_it_should"] for trial in trials)
    assert all(run["losses_equal"] for run in runs)
    page = (DOCS / "soak.md").read_text()
    for fault in {trial["fault"] for trial in trials}:
        same = [trial for trial in trials if trial["fault"] == fault]
        finished = [bool(trial["exit_codes"]) and not any(trial["exit_codes"]) for trial in same]
        ended = [trial["gone_s"] for trial, done in zip(same, finished, strict=True) if trial["gone_s"] and not done]
        result = f"ended in {min(ended):.1f} to {max(ended):.1f} s" if len(ended) > 1 else "went on"
        result = f"ended in {ended[0]:.1f} s" if len(ended) == 1 else result
        went_on = len(same) - len(ended)
        result += f"; went on {went_on} times" if ended and went_on else ""
        assert re.search(rf"\| {fault} \| .* \| {len(same)} \| {re.escape(result)} \|", page), (fault, result)
    minutes = " and ".join(f"{run['seconds'] / 60:.0f}" for run in runs)
    said = f"{right} of {len(trials)} faults in {minutes} minutes on {ranks}"
    (steps,), trainings = {run["num_losses"] for run in runs}, " and ".join(str(run["trainings"]) for run in runs)
    assert said in " ".join(page.split())
    assert f"Trainings of {steps:,} steps that were finished: {trainings}." in " ".join(page.split())


def test_the_memory_of_the_soaks_is_that_of_the_records() -> None:
    page = " ".join((DOCS / "soak.md").read_text().split())
    record = read_record("soak")
    (run,), undisturbed = record["runs"], record["undisturbed"]
    slope = undisturbed["slopes"]["memory_bytes"]
    per_hour, mean, error = (slope[key] / 1e6 for key in ("per_hour", "mean", "error"))
    assert f"run of {undisturbed['num_losses']:,} steps on 4 ranks by {per_hour:.0f} MB per hour" in page
    assert f"(of {mean:,.0f} MB; standard error {error:.1f})" in page
    per_step = slope["per_hour"] / 3600 * undisturbed["uninterrupted_s"] / undisturbed["num_losses"] / 4
    first = per_step
    assert f"about {per_step / 1000:.2f} kB per step and rank" in page
    shorter = [run["slopes"]["memory_bytes"][key] / 1e6 for key in ("per_hour", "mean")]
    assert f"it was {shorter[0]:.0f} MB per hour (of {shorter[1]:,.0f} MB)" in page
    longer = read_record("soak-memory")
    slope = longer["slopes"]["memory_bytes"]["per_hour"]
    per_step = slope / 3600 * longer["uninterrupted_s"] / longer["num_losses"] / 4
    said = f"A run of {longer['num_losses']:,} steps, slower beside other programs, "
    said += f"grew by {slope / 1e6:.0f} MB per hour, "
    assert said + f"about {per_step / 1000:.2f} kB per step and rank" in page
    assert f"a week of 6 million steps would be {6e6 * per_step / 1e9:.1f} GB per rank" in page
    growth = []
    for each in read_record("memory-by-rank")["runs"]:
        steps, *of_ranks = np.array([point for point in each["points"] if point[0] >= 1500], float).T
        growth += [f"{1.024 * np.polyfit(steps, held, 1)[0]:.2f} kB" for held in of_ranks]
    before, before_1, after, after_1 = growth
    assert f"most of it was in rank 0: {before} per step, and {before_1} in rank 1." in page
    assert f"Without them it is {after} and {after_1}." in page
    again = read_record("soak-again")
    slope = again["slopes"]["memory_bytes"]
    half = slope["per_hour"] / 3600 * again["uninterrupted_s"] / again["num_losses"] / 4
    faster = again["uninterrupted_s"] / undisturbed["uninterrupted_s"]
    assert again["num_losses"] == undisturbed["num_losses"] and 0.45 < half / first < 0.55
    per_hour, mean = slope["per_hour"] / 1e6, slope["mean"] / 1e6
    said = f"{per_hour:.0f} MB per hour (of {mean:,.0f} MB), but in {faster:.1f} of the time per step: "
    said += f"about {half / 1000:.2f} kB per step and rank, half of what it was."
    assert f"{said} A week of 6 million steps would be {6e6 * half / 1e9:.1f} GB per rank." in page
    assert f"{100 * per_hour / mean:.1f} % of the memory per hour is more than the bound of 1 %" in page
    under_faults = run["slopes_under_faults"]["memory_bytes"]["per_hour"] / 1e6
    assert f"every start lasts about two minutes, it grows by {under_faults:.0f} MB per hour" in page
    assert 100 < run["seconds"] / run["lives"] < 130
    before, after = (run["slopes"]["memory_bytes"]["per_hour"] / 1e6 for run in read_record("soak-hosts")["runs"])
    assert f"grew by {before:.0f} MB per hour before the mending below, and by {after:.0f} MB after it" in page


def test_what_loading_saves_is_that_of_the_record() -> None:
    names = {"ego": "ego-twitter", "planted500k": "planted (synthetic), 0.5 M"}
    names |= {f"planted{size}m": f"planted (synthetic), {size} M" for size in (1, 5)}
    page = " ".join((DOCS / "loading.md").read_text().split())
    documents = read_record("loading")["documents"]
    of_partition = [document for document in documents if document["batch_size"] == 1024]
    assert len(of_partition) == 6
    for document in of_partition:
        counted = {row["ranks"]: row for row in document["redundancy"]}
        assert all(row[f"{what}_split_to_mini"] == 1.0 for row in counted.values() for what in ("edges", "rows"))
        cells = [f"{counted[ranks][f'{what}_data_to_mini']:.2f}" for what in ("edges", "rows") for ranks in (2, 4, 16)]
        assert f"| {names.get(document['graph'], document['graph'])} | {' | '.join(cells)} |" in page
    hits = {
        order: [
            f"{100 * hit['measured']:.1f}"
            for graph in ("arxiv", "debian", "ego", "planted500k", "planted1m", "planted5m")
            for document in of_partition
            for hit in document["hits"]
            if (document["graph"], hit["ranks"], hit["order"], hit["budget"]) == (graph, 4, order, 0.25)
        ]
        for order in ("hot", "degree")
    }
    a, b, c, *planted = hits["hot"]
    said = f"arxiv {a} %, debian {b} %, ego-twitter {c} %, planted 0.5 M, 1 M and 5 M"
    said += f" {', '.join(planted[:2])} and {planted[2]} %;"
    assert f"{said} by degree {', '.join(hits['degree'][:-1])} and {hits['degree'][-1]} %" in page
    off = [100 * max(hit["most_off"] for hit in document["hits"]) for document in documents]
    sizes = [document["batch_size"] for document in documents]
    at_its_size, at_another = (max(x for x, size in zip(off, sizes, strict=True) if size == s) for s in (1024, 4096))
    assert f"at most {at_its_size:.1f} points off" in page and f"up to {at_another:.0f} points off" in page
    kept = [each["of_no_copies"] for one in of_partition for each in one["copies"] if each["budget"] == 0.1]
    assert f"of 10 % of the graph's rows leave {min(kept):.2f} to {max(kept):.2f} of the" in page


def test_exact_resume_is_that_of_the_record() -> None:
    found = read_record("resume")
    assert found["kills"]["largest_loss_difference"] == found["kills"]["largest_weight_difference"] == 0.0
    page = " ".join((DOCS / "checkpoints.md").read_text().split())
    losses, weights = (
        {kind: max(case[what] for case in found["chain"] if case["dtype"] == kind) for kind in ("float64", "float32")}
        for what in ("loss", "weights")
    )
    assert f"by {losses['float64']:.1e} in float64 and by at most {losses['float32']:.1e} in float32" in page
    assert f"weights differ by {weights['float64']:.1e} and {weights['float32']:.1e}" in page
    held, written = (f"{share:.1f} %" for share in checkpoint_shares(found))
    text = " ".join((DOCS / "performance.md").read_text().split())
    assert f"holds training up for {held} of the time of a step. It is on the disk after {written}" in text


def test_faults_are_shown_by_tests_that_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "docs" / "reliability.md").read_text())
    assert len(set(named)) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_what_was_tested_on_devices_is_shown_by_tests_that_exist() -> None:
    page = (DOCS / "gpu.md").read_text()
    files = re.findall(r"tests/[\w/]+\.py", page)
    named = re.findall(r"`(test_\w+)`", page)
    assert len(set(files)) > 8 and len(named) > 10
    assert [name for name in files if not (ROOT / name).is_file()] == []
    found = "".join((ROOT / f"tests/dist/test_{name}.py").read_text() for name in DEVICE_TESTS)
    assert [name for name in named if f"def {name}(" not in found] == []


def test_the_strategies_compared_are_those_of_the_record() -> None:
    """CPU seconds over those of split: geometric means over the graphs, 2 / 4 ranks."""
    mean = runpy.run_path(str(DOCS / "draw_result.py"))["mean"]
    found = {
        (record["graph"], record["ranks"], record["batch_size"], record["system"]): record["cpu_s"]["median"]
        for record in read_record("crossover")["records"]
    }
    graphs = {graph for graph, *_ in found}

    def ratio(system: str, batch: int, ranks: int) -> float:
        key = (ranks, batch)
        return float(mean({graph: found[graph, *key, system] / found[graph, *key, "split"] for graph in graphs}))

    page = (DOCS / "performance.md").read_text()
    for batch in (256, 1024, 4096):
        systems = ("data", "data(owner)", "hybrid(1)", "split+labor")
        cells = [f"{ratio(system, batch, 2):.2f} / {ratio(system, batch, 4):.2f}" for system in systems]
        assert f"| SAGE, batch {batch} | {' | '.join(cells)} |" in page
    owner = [100 * (1 - ratio("data(owner)", 256, ranks)) for ranks in (2, 4)]
    plain = [100 * (1 - 1 / ratio("data", batch, ranks)) for batch in (1024, 4096) for ranks in (2, 4)]
    advice = (DOCS / "strategies.md").read_text()
    less = f"{owner[0]:.0f} and {owner[1]:.0f} % less"
    assert f"| SAGE on two graphs: {less} than `split` on 2 and 4 ranks;" in advice
    assert f"`split` takes {min(plain):.0f} to {max(plain):.0f} % less than plain `data`" in advice
    assert f"takes {less} on 2 and 4 ranks" in (DOCS / "faq.md").read_text()
    largest = [100 * (ratio(system, 4096, ranks) - 1) for system in ("data(owner)", "hybrid(1)") for ranks in (2, 4)]
    assert (
        f"at 4096 `split`: `data(owner)` and `hybrid(1)` take {min(largest):.0f} to {max(largest):.0f} % more" in advice
    )


def test_one_process_with_threads_against_ranks_is_that_of_the_record() -> None:
    wall = {
        (record["graph"], record["ranks"], record["threads"]): f"{record['wall_s']['median']:.2f}"
        for record in read_record("threads")["records"]
        if record["system"] == "split"
    }
    arxiv, planted = ((wall[graph, 1, 2], wall[graph, 2, 1]) for graph in ("arxiv", "planted1m"))
    advice = (DOCS / "strategies.md").read_text()
    assert f"{' and '.join(arxiv)} (arxiv), {' and '.join(planted)} (1 M vertices)" in advice
    words = " ".join((DOCS / "faq.md").read_text().split())
    assert f"takes {arxiv[0]} s per SAGE step and two ranks take {arxiv[1]} s (arxiv)" in words
    assert f"{' and '.join(planted)} s on a million vertices" in words


def test_the_bare_loop_is_that_of_the_record() -> None:
    seconds = {record["model"]: record["seconds"] for record in read_record("bare-loop")["records"]}
    ratios = {
        model: median(ours / bare for ours, bare in zip(found["ours"], found["bare"], strict=True))
        for model, found in seconds.items()
    }
    said = ", ".join(f"{model} {ratios[model.lower()]:.2f}" for model in ("SAGE", "GCN", "GIN", "GAT"))
    for page in (DOCS / "faq.md",):
        assert said in page.read_text(), (page, said)


def test_the_distance_to_the_limit_is_that_of_the_record() -> None:
    rows = find_record("profile").with_suffix(".md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "%" in row]
    shares = {(row[0], row[2]): row[7].replace("%", " %") for row in cells}
    page = " ".join((DOCS / "performance.md").read_text().split())
    assert f"arxiv {shares['arxiv', '1']} of the limit on 1 rank and {shares['arxiv', '2']} on 2" in page
    assert f"planted1m {shares['planted1m', '1']} and {shares['planted1m', '2']}" in page
    for words, name in (("sampling", "sampling"), ("bias, ReLU and their gradients", "activations")):
        parts = [
            sum(run["categories"][name] for run in record["per_rank"]) / sum(run["cpu_s"] for run in record["per_rank"])
            for record in read_record("profile")["records"]
        ]
        assert f"{words} ({100 * min(parts):.0f} to {100 * max(parts):.0f} %)" in page, (words, parts)

    def times(category: str, alone: str) -> list[float]:
        """CPU seconds of a category in the step over those of the same work alone."""
        return [
            sum(run["categories"][category] for run in record["per_rank"])
            / sum(run["limit"][alone] for run in record["per_rank"])
            for record in read_record("profile")["records"]
        ]

    products = times("dense products", "products_s")
    rates = [100 / ratio for ratio in times("sums over edges", "gathered_s")]
    assert f"Products take {min(products):.1f} to {max(products):.1f} times their time alone" in page, products
    assert f"sums over edges run at {min(rates):.0f} to {max(rates):.0f} % of the rate of bare reading" in page, rates
    (one,) = read_record("profile")["records"][0]["per_rank"]
    shares_of_one = {name: f"{100 * seconds / one['cpu_s']:.0f} %" for name, seconds in one["categories"].items()}
    said = (
        f"dense products take {shares_of_one['dense products']} and sums over edges {shares_of_one['sums over edges']}"
    )
    assert said in page, said


def test_the_cases_of_the_exactness_matrix_are_those_of_the_record() -> None:
    document = read_record("exactness")
    worst = max(max(row[kind] for kind in document["worst"]) for row in document["rows"])
    said = f"{len(document['rows']):,} cases, "
    page = (DOCS / "numerics.md").read_text()
    assert document["ok"] and said in page and f"largest difference {worst:.1e}" in page


def test_the_cases_of_the_matrix_of_tasks_are_those_of_the_record() -> None:
    document = read_record("exactness-tasks")
    rows = document["rows"]
    meshes = {(row["replicas"], row["splits"]) for row in rows}
    assert document["ok"] and meshes == {(1, 1), (1, 2), (1, 3), (1, 4), (2, 2)}
    assert {(row["dropout"], row["prefetch"]) for row in rows} == {(False, 0), (False, 2), (True, 0), (True, 2)}
    assert sum(row["draws"] for row in rows) == 0 and len({row["strategy"] for row in rows}) == 7
    pages = {"samplers": "samplers", "times": "temporal", "types": "heterogeneous"}
    pages |= {"pairs": "link-prediction", "pairs of types": "link-prediction"}
    assert {row["task"] for row in rows} == set(pages)
    said = {(DOCS / f"{page}.md", task) for task, page in pages.items()}
    for page, task in [*said, (DOCS / "numerics.md", None)]:
        mine = [row for row in rows if task in (row["task"], None)]
        worst = max(row[kind] for row in mine for kind in ("output", "loss", "gradient", "weights"))
        text = rf"{len(mine):,} cases[\w ]*, largest difference {worst:.1e}"
        assert re.search(text, page.read_text()), (page, text)


def test_the_cases_of_tasks_on_the_simulated_device_are_those_of_the_record() -> None:
    document = read_record("exactness-tasks-sim")
    worst = max(value for kind, value in document["worst"].items() if kind != "draws")
    said = f"{len(document['rows']):,} cases, largest difference {worst:.1e}, no other edge drawn"
    assert document["ok"] and document["worst"]["draws"] == 0 and said in (DOCS / "gpu.md").read_text()
    everywhere = {(row["task"], row["model"]) for row in read_record("exactness-tasks")["rows"]}
    assert {(row["task"], row["model"]) for row in document["rows"]} == everywhere


def test_the_host_work_of_a_step_is_that_of_the_record() -> None:
    document = read_record("step-overhead")
    page = (DOCS / "simulated-device.md").read_text()
    for lines in (describe_host(document["host"]), describe_device(document["device"])):
        assert "\n".join(lines) in page


def test_the_choice_by_trial_steps_is_that_of_the_record() -> None:
    document = read_record("planner")
    records = document["records"]
    page = (DOCS / "planner.md").read_text()
    found: dict[tuple[str, str], list[str]] = {}
    clocks = {"wall": "wall time", "cpu": "CPU seconds"}
    for chosen, judged in (("wall", "wall"), ("wall", "cpu"), ("cpu", "cpu")):
        each = summarise_choices(records, judged, chosen_by=chosen)  # type: ignore[arg-type]
        keys = ("within_5_percent", "worst_regret")
        cells = [_percent(each[how][key]) for key in keys for how in ("trial", "estimate")]
        name = f"{clocks[chosen]}, as `gsplit plan` does" if chosen == "wall" else clocks[chosen]
        assert f"| {' | '.join([name, clocks[judged], *cells])} |" in page
        found[chosen, judged] = cells
    assert all(document["summary"][by] == summarise_choices(records, by) for by in clocks)  # type: ignore[arg-type]
    on_disk = {record["graph"] for record in records if record["features"] == "disk"}
    in_memory = {record["graph"] for record in records if record["features"] == "memory"}
    said = f"Measured at {len(records)} points: SAGE and GAT, 2 and 4 ranks, 256 and 1024 targets"
    assert f"{said}, on {len(in_memory)} graphs in memory and on {len(on_disk)} of them on disk" in page
    changes = {by: _percent(median(_changes(records, by))) for by in clocks}
    behind, spread = ({by: _percent(median(_gaps(records, by, at))) for by in clocks} for at in (1, -1))
    text = " ".join(page.split())
    assert f"changed by {changes['wall']} (CPU seconds: {changes['cpu']})" in text
    said = f"is only {behind['wall']} behind the best ({behind['cpu']}): medians over the points, as is the slowest"
    assert f"{said} strategy's {spread['wall']}" in text
    later = summarise_choices(records[len(records) // 2 :], "wall")
    assert f"in the second half the worst is {_percent(later['trial']['worst_regret'])}" in text
    assert later["trial"]["worst_regret"] < document["summary"]["wall"]["trial"]["worst_regret"]
    cpu, wall = found["wall", "cpu"], found["wall", "wall"]
    text = " ".join((DOCS / "performance.md").read_text().split())
    short = f"in {cpu[0]} (the estimate alone: {cpu[1]}), and {cpu[2]} off in the worst case ({cpu[3]})"
    said = f"At {len(records)} measured points its choice was within 5 % of the best by CPU seconds {short}"
    assert f"{said}; by wall time in {wall[0]} ({wall[1]})" in text
    assert (
        f"of one strategy changed by {changes['wall']}, and the second best strategy is {behind['wall']} behind" in text
    )
    short = f"in {cpu[0]} of {len(records)} measured cases (the estimate alone: {cpu[1]}), at worst {cpu[2]} off"
    assert f"{short}; by wall time in {wall[0]} ({wall[1]})" in (DOCS / "strategies.md").read_text()


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _steps(record: dict[str, Any], by: str) -> list[list[float]]:
    """The seconds of ten steps of every strategy."""
    return [[step[by == "cpu"] for step in steps] for steps in record["steps_s"].values()]


def _changes(records: list[dict[str, Any]], by: str) -> list[float]:
    """How much the medians of five steps of the same strategy differ."""
    return [abs(median(s[:5]) / median(s[5:]) - 1) for record in records for s in _steps(record, by)]


def _gaps(records: list[dict[str, Any]], by: str, place: int) -> list[float]:
    """How far behind the best of every point a strategy is: the second one, the last one."""
    ordered = (sorted(median(steps) for steps in _steps(record, by)) for record in records)
    return [times[place] / times[0] - 1 for times in ordered]


def test_the_choice_by_the_estimate_is_that_of_the_record() -> None:
    document = read_record("planner-check")
    page = (DOCS / "planner.md").read_text()
    for name, features in (("in memory", "memory"), ("on disk", "disk"), ("all", "")):
        regrets = sorted(each["regret"] for each in document["choices"] if features in each["point"])
        points = [each for each in document["points"] if features in each["features"]]
        totals = [abs(each["predicted_s"] / each["measured_s"] - 1) for each in points]
        pairs = (pair for each in points for pair in each["stages"].values())
        stages = [abs(own / taken - 1) for own, taken in pairs if taken >= LEAST_STAGE_S]
        shares = [sum(regret <= 0.05 for regret in regrets) / len(regrets), regrets[-1], regrets[-2]]
        cells = [name, str(len(regrets)), *map(_percent, [*shares, median(totals), median(stages)])]
        assert f"| {' | '.join(cells)} |" in page
    worst = max(document["choices"], key=lambda each: each["regret"])
    assert worst["point"].startswith("planted1m, sage, 2, 1, 256,")
    of_point, names = ("planted1m", "sage", 2, 256), ("graph", "model", "ranks", "batch_size")
    tried_at = [each for each in read_record("planner")["records"] if tuple(each[name] for name in names) == of_point]
    (trial,) = (each for each in tried_at if each["features"] == "memory")
    points = [each for each in document["points"] if tuple(each[name] for name in names) == of_point]
    ranges = [[each[key] for each in points] for key in ("measured_s", "predicted_s")]
    ranges.append([median(times) for times in _steps(trial, "cpu")])
    measured, predicted, tried = (f"{min(times):.2f} to {max(times):.2f} s" for times in ranges)
    text = " ".join(page.split())
    assert f"the strategies took {measured} in the record of training; the estimate has {predicted} for all" in text
    assert f"In the trial steps of the same point they took {tried}." in text


def test_presampling_is_that_of_the_record() -> None:
    runs = read_record("presampling")["runs"]["after"]
    serial, total = (median(run[key] for run in runs) for key in ("main_cpu_s", "cpu_s"))
    page = " ".join((DOCS / "partition.md").read_text().split())
    assert f"of {total:.0f} CPU seconds for 120 million edges, {serial:.2f} are not spread" in page


def test_fitted_and_held_out_cuts_are_those_of_the_record() -> None:
    page = (DOCS / "solvers.md").read_text()
    rows = read_record("held-out")["rows"]
    for graph, solver in {(row["graph"], row["solver"]) for row in rows}:
        cells = [f"{graph}, {solver}"]
        seconds: list[str] = []
        for epochs in (10, 1):
            seeds = [row for row in rows if (row["graph"], row["solver"], row["epochs"]) == (graph, solver, epochs)]
            assert len(seeds) == 3
            cells += [f"{mean(row[side]['cross_edge_share'] for row in seeds):.4f}" for side in ("fitted", "held_out")]
            seconds.insert(0, f"{seeds[0]['presample_cpu_s']:.1f}")
        assert f"| {' | '.join([*cells, ', '.join(seconds)])} |" in page


def test_the_solvers_are_those_of_the_record() -> None:
    page = (DOCS / "solvers.md").read_text()
    rows = {(row["graph"], row["parts"], row["solver"]): row for row in read_record("solvers")["rows"]}
    solvers = ("metis", "kaminpar", "cluster", "restream")
    shown = [key[:2] for key in rows if key[1] in (8, 1024) and all((*key[:2], name) in rows for name in solvers)]
    assert len(set(shown)) == 7
    for graph, parts in shown:
        sides = [rows[graph, parts, solver] for solver in solvers]
        cuts = " | ".join(f"{side['cross_edge_share']:.4f}" for side in sides)
        seconds = ", ".join(f"{side['cpu_seconds']:.1f}" for side in sides)
        peaks = ", ".join(f"{side['peak_bytes'] / 1e6:.0f}" for side in sides)
        assert f"| {graph}, {parts:,} | {cuts} | {seconds} | {peaks} |" in page
    metis, kaminpar = (rows["planted1m", 8, solver] for solver in ("metis", "kaminpar"))
    ratios = [f"{kaminpar[key] / metis[key]:.2f}" for key in ("cpu_seconds", "peak_bytes")]
    assert f"it took {ratios[0]} of the time and {ratios[1]} of the memory" in page
    share = {key: row["cross_edge_share"] for key, row in rows.items()}
    more = max(
        share[key] / share[*key[:2], "kaminpar"]
        for key in share
        if key[2] == "cluster" and (*key[:2], "kaminpar") in share
    )
    less = max(1 - share[*key[:2], "cluster"] / share[key] for key in share if key[2] == "restream")
    assert (
        f"It cuts at most {100 * (more - 1):.0f} % more than KaMinPar, and up to {100 * less:.0f} % less than" in page
    )


def test_a_thousand_ranks_are_those_of_the_records() -> None:
    page = (DOCS / "scale.md").read_text()
    for run in read_record("many-ranks")["runs"]:
        work, expected = run["imbalance_of_work"], run["expected_imbalance_of_work"]
        sent, peers = (
            ", ".join(f"{number:.0f}" for number in run[f"{name}_per_rank_and_layer"]) for name in ("kb_sent", "peers")
        )
        row = (
            f"{run['ranks']:,} | {work:.2f} ({expected:.2f}) | {run['rows_sent_per_input_row']:.2f} | {sent} | {peers}"
        )
        assert f"| {row} | {run['split_ms']:.1f} ({run['split_ms_of_an_idle_rank']:.1f}) |" in page
    for start in read_record("start-ranks")["runs"]:
        seconds = f"{start['init_cpu_s']:.2f} | {1e3 * start['compare_cpu_s']:.1f}"
        assert f"| {start['ranks']} | {seconds} | {start['sockets']} |" in page


def test_the_import_by_two_hosts_is_that_of_the_record() -> None:
    said = " ".join((DOCS / "shards.md").read_text().split())
    record = read_record("sharded-import")
    assert record["num_edges"] == 100_000_000 and record["equal"]
    for order, words in (
        ("unsorted", "the slower of two processes took {:.1f} CPU seconds, one process {:.1f}"),
        ("sorted", "sorted input {:.1f} instead of {:.1f}"),
    ):
        slowest = {
            run["hosts"]: max(process["cpu_seconds"] for process in run["processes"])
            for run in record[order]
            if not run["in_turn"]
        }
        assert words.format(slowest[2], slowest[0]) in said


def test_steps_by_partition_are_those_of_the_record() -> None:
    runs = read_record("partition")["train"]
    found = {}
    for name in ("gsplit", "edge", "random"):
        of_partition = [run for run in runs if run["objective"] == name]
        found[name] = [
            median(run[key] for run in of_partition) for key in ("cpu_seconds_per_step", "rows_shuffled_per_step")
        ]
    ours, edge, random = (f"{found[name][0]:.2f}" for name in ("gsplit", "edge", "random"))
    fewer = [f"{100 * (1 - found[name][1] / found['random'][1]):.0f}" for name in ("gsplit", "edge")]
    said = f"{ours} CPU seconds per step with a `gsplit` partition, {edge} with an `edge` partition and {random} with"
    said += f" a random one; the first two shuffle {' and '.join(fewer)} % fewer rows"
    assert said in " ".join((DOCS / "performance.md").read_text().split())
    said = f"{random} CPU seconds per step with a random partition, {ours} with ours and {edge} with `--objective edge`"
    assert said in " ".join((DOCS / "faq.md").read_text().split())


def test_the_stages_of_a_billion_edges_are_those_of_the_record() -> None:
    record, page = read_record("billion-edges"), (DOCS / "scale.md").read_text()
    for stage in record["stages"]:
        minutes, memory = (
            "-" if stage[name] is None else f"{stage[name] / unit:.1f}"
            for name, unit in (("wall_s", 60), ("anonymous_gb", 1))
        )
        cells = [stage["stage"], minutes, f"{stage['cpu_s']:,}", memory, f"{stage['disk_gb']:.1f}"]
        assert f"| {' | '.join(cells)} |" in page
    assert f"whose process held {record['solver_peak_gb']:.2f} GB" in page
    assert f"have {record['cross_edge_share']['8']:.1%}".replace("%", " %") in page
    assert f"A step took {record['train']['seconds_per_step']} s" in page


def test_the_quality_of_samplers_is_that_of_the_record() -> None:
    page = (DOCS / "samplers.md").read_text()
    rows = read_record("quality")["samplers"]
    uniform = {row["graph"]: row for row in rows if row["sampler"] == "uniform"}
    assert len(uniform) == 3
    for row in rows:
        if row["sampler"] == "uniform":
            continue
        base = uniform[row["graph"]]
        before, after = (f"{100 * mean(side['test']):.1f}" for side in (base, row))
        columns = [(2, "input_rows"), (2, "edges"), (4, "rows_sent"), (2, "cpu_s"), (4, "cpu_s")]
        ratios = [f"{row[f'{ranks} ranks'][key] / base[f'{ranks} ranks'][key]:.2f}" for ranks, key in columns]
        cells = (row["graph"], row["sampler"], f"{before} -> {after}", *ratios)
        assert f"| {' | '.join(cells)} |" in page, cells


def test_figures_of_types_are_those_of_the_records() -> None:
    page = (DOCS / "heterogeneous.md").read_text()
    untyped, typed = (100 * mean(row["test"]) for row in read_record("quality")["types"])
    assert f"{typed:.1f} % with types and {untyped:.1f} % without" in page
    for words, key in (("a step took", "step_ratio"), ("making the batch", "batch_ratio")):
        low, high = sorted(round(row[key], 1) for row in read_record("typed-steps")["rows"])
        assert f"{words} {low} to {high} times" in " ".join(page.split())


def test_the_table_of_object_storage_is_the_record() -> None:
    record = read_record("objects")
    assert record["bit_identical"] and len(record["cases"]) == 3
    said = (DOCS / "object-storage.md").read_text()
    for case in record["cases"]:

        def total(name: str, ranks: Any = case["ranks"]) -> Any:
            return sum(rank[name] for rank in ranks)

        slowest = {name: max(rank[name] for rank in case["ranks"]) for name in ("open_s", "step_s")}
        hits = f"{total('hits') / total('rows'):.0%}" if total("rows") else "-"
        counts = f"{total('requests')} | {total('failures')} | {total('num_bytes') / 1e6:.0f} | {hits}"
        seconds = f"{slowest['open_s']:.1f} | {slowest['step_s']:.2f} | {total('cpu_s'):.0f}"
        assert f"| {case['case']} | {counts} | {seconds} |" in said, case["case"]
    assert sum(record["cases"][2]["injected"].values()) > 10
