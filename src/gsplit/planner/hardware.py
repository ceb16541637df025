"""The constants of a machine that estimates are computed from: a preset, a file or a calibration.

All rates are those of one rank. If ranks are processes that share the cores of a host, ``cores`` is their number: more
ranks than cores take turns, and fewer ranks run torch operations on several threads. If every rank has its own device,
``cores`` is None.

``v100-nvlink`` is fitted to Tables 1 and 3 of the paper (docs/planner-formulas.md). ``a100`` and ``h100`` are not
measured: they have the same shares of their published peak rates and the same fixed costs as the V100.
"""

import json
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from gsplit.errors import InputError, explain
from gsplit.files.untrusted import Expected, read_document

__all__ = ["PRESETS", "Hardware", "preset_of", "read_hardware", "write_hardware"]

_REACH_BYTES = 1e8


def _check_kind(name: str, value: object) -> None:
    """Refuse values of other types, and numbers with which formulas would overflow."""
    if name == "name":
        expected = "a name"
        valid = isinstance(value, str) and len(value) <= 200
    elif name == "cores":
        expected = "a whole number of cores"
        valid = value is None or (type(value) is int and 1 <= value <= 1 << 20)
    else:
        most = 10.0 if name in ("crowding", "thread_gain") else 1e30
        expected = f"a number up to {most:g}"
        valid = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= most
    if not valid:
        raise InputError(explain(f"hardware: {name}", expected, str(value)[:80], "correct the file"))


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one rank, and fixed costs. The formulas are in ``estimate``."""

    name: str
    sample_edges_per_s: float
    """Edges drawn and relabelled, with the graph in the memory of the rank's device."""
    far_sample_edges_per_s: float
    """The same with the graph in host memory; always so for a rank on the host."""
    split_ids_per_s: float
    """Ids of a frontier sorted by owner, and located on the owner."""
    load_bytes_per_s: float
    """Wide input rows gathered from host memory."""
    cache_bytes_per_s: float
    """Input rows gathered from the rank's cache."""
    row_overhead_bytes: float
    """Bytes that gathering a row costs in addition to its size, so narrow rows are read at a lower rate."""
    disk_reads_per_s: float
    """Concurrent reads of single pages from disk, by all ranks of the host together."""
    disk_bytes_per_s: float
    """Bytes of long reads from disk, by all ranks of the host together."""
    flops_per_s: float
    """Floating-point operations of dense products."""
    aggregate_bytes_per_s: float
    """Bytes of source rows summed along edges."""
    attention_values_per_s: float
    """Values of source rows weighted and summed by attention, in the forward pass."""
    crowding: float
    """How gathers and sums along edges slow down with the size of the rows: rate * (100 MB / bytes) ** crowding; with
    half of the exponent for attention, which computes more."""
    row_bytes_per_s: float
    """Bytes read or written by row-wise operations: activations, dropout, copies."""
    exchange_bytes_per_s: float
    """Rows gathered, sent to ranks of the same host and received; bytes that leave a rank."""
    reduce_bytes_per_s: float
    """Gradients averaged over the ranks."""
    collective_s: float
    """Latency of a collective of two ranks."""
    collective_per_rank_s: float
    """Latency that every further rank adds."""
    sample_s: float
    """Fixed cost of sampling a step."""
    split_s: float
    """Fixed cost of splitting a step."""
    load_s: float
    """Fixed cost of loading a step without a cache."""
    step_s: float
    """Fixed cost of the forward and backward pass without attention: kernel launches and host work."""
    attention_step_s: float
    """The same with attention."""
    optimizer_s: float
    """Fixed cost of the optimizer's step."""
    memory_bytes: float
    """Memory of a rank's device, or of the host if ``cores`` is given."""
    cores: int | None = None
    thread_gain: float = 0.0
    """How much of a core each further thread of a rank adds to dense, sparse and row-wise operations."""
    between_bytes_per_s: float = 0.31e9
    """The same to ranks of other hosts: 10 Gbit/s for four ranks, if nothing else is known."""
    host_sample_edges_per_s: float = 15e6
    """Edges that one thread of the host draws for a device: the rate of presampling in docs/scale-formulas.md."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            _check_kind(field.name, value)
            if isinstance(value, str) or value is None:
                continue
            rate = field.name.endswith("_per_s") or field.name == "memory_bytes"
            if value < 0 or (value == 0 and rate):
                expected = "a positive number" if rate else "0 or more"
                raise InputError(explain(f"hardware: {field.name}", expected, value, "correct the file"))

    def threads(self, num_ranks: int) -> int:
        """Threads of each rank, by the rule of the launcher."""
        return 1 if self.cores is None else max(1, self.cores // num_ranks)

    def reach(self, num_bytes: float) -> float:
        """The factor of a rate for rows gathered from this many bytes, between 0.25 and 2.

        >>> PRESETS["v100-nvlink"].reach(1e9)
        1.0
        """
        share: float = pow(_REACH_BYTES / max(num_bytes, 1.0), self.crowding)
        return min(2.0, max(0.25, share))

    def latency(self, num_ranks: int) -> float:
        """Seconds of an empty collective; 0 for a single rank."""
        if num_ranks == 1:
            return 0.0
        return self.collective_s + self.collective_per_rank_s * (num_ranks - 2)

    def wall(self, seconds: list[float]) -> float:
        """Wall time of a stage from the seconds of the ranks: the slowest rank, or their sum over the cores if larger.

        >>> PRESETS["v100-nvlink"].wall([1.0, 2.0, 1.0])
        2.0
        """
        shared = 0.0 if self.cores is None else sum(seconds) / self.cores
        return max(max(seconds), shared)


_V100_FLOPS = 15.7e12  # published peak, float32
_V100_BYTES = 0.9e12  # published peak, memory
_SHARE_FLOPS = 0.95  # shares of the peaks from the fit; both are at their bounds
_SHARE_BYTES = 0.90

_V100 = Hardware(
    name="v100-nvlink",
    sample_edges_per_s=261e6,
    far_sample_edges_per_s=65e6,
    split_ids_per_s=2e9,
    load_bytes_per_s=6.7e9,
    cache_bytes_per_s=_SHARE_BYTES * _V100_BYTES / 2,
    row_overhead_bytes=40,
    disk_reads_per_s=400e3,
    disk_bytes_per_s=1.5e9,
    flops_per_s=_SHARE_FLOPS * _V100_FLOPS,
    aggregate_bytes_per_s=_SHARE_BYTES * _V100_BYTES,
    attention_values_per_s=_SHARE_BYTES * _V100_BYTES / 7.5,
    crowding=0.0,
    row_bytes_per_s=_SHARE_BYTES * _V100_BYTES,
    exchange_bytes_per_s=24e9,
    reduce_bytes_per_s=24e9,
    collective_s=30e-6,
    collective_per_rank_s=5e-6,
    sample_s=1.1e-3,
    split_s=0.0,
    load_s=2.5e-3,
    step_s=8.4e-3,
    attention_step_s=23.8e-3,
    optimizer_s=0.0,
    memory_bytes=16e9,
    between_bytes_per_s=10e9 / 8 / 4,  # published: p3.8xlarge, 10 Gbit/s for four GPUs
)


def _scaled(
    name: str, *, flops: float, memory: float, link: float, host: float, memory_bytes: float, between: float
) -> Hardware:
    """A device with rates in proportion to its published peaks and the fixed costs of the V100.

    ``between``: bytes per second and GPU to other hosts.
    """
    base = _V100
    return replace(
        base,
        name=name,
        sample_edges_per_s=base.sample_edges_per_s * memory,
        far_sample_edges_per_s=base.far_sample_edges_per_s * host,
        load_bytes_per_s=base.load_bytes_per_s * host,
        cache_bytes_per_s=base.cache_bytes_per_s * memory,
        split_ids_per_s=base.split_ids_per_s * memory,
        flops_per_s=base.flops_per_s * flops,
        aggregate_bytes_per_s=base.aggregate_bytes_per_s * memory,
        attention_values_per_s=base.attention_values_per_s * memory,
        row_bytes_per_s=base.row_bytes_per_s * memory,
        exchange_bytes_per_s=base.exchange_bytes_per_s * link,
        reduce_bytes_per_s=base.reduce_bytes_per_s * link,
        memory_bytes=memory_bytes,
        between_bytes_per_s=between,
    )


PRESETS: dict[str, Hardware] = {
    "v100-nvlink": _V100,
    # published: 19.5 Tflop/s float32, 1.555 TB/s, NVLink 600 against 300 GB/s, PCIe 4 against 3, 40 GB; p4d:
    # 400 Gbit/s for 8 GPUs
    "a100": _scaled(
        "a100", flops=19.5 / 15.7, memory=1.555 / 0.9, link=2.0, host=2.0, memory_bytes=40e9, between=400e9 / 8 / 8
    ),
    # published: 67 Tflop/s float32, 3.35 TB/s, NVLink 900 against 300 GB/s, PCIe 5 against 3, 80 GB; p5:
    # 3200 Gbit/s for 8 GPUs
    "h100": _scaled(
        "h100", flops=67 / 15.7, memory=3.35 / 0.9, link=3.0, host=4.0, memory_bytes=80e9, between=3200e9 / 8 / 8
    ),
}
"""Machines with one GPU per rank. GSplit has not been run on them."""


_PRESET_OF_NAME = {"V100": "v100-nvlink", "A100": "a100", "H100": "h100"}
_UNKNOWN_GPU = "a100"
"""The preset for what a report of ``gsplit doctor`` does not measure, on other GPUs."""

_FILE = Expected(
    "constants (docs/planner-formulas.md) in JSON, or TOML in a .toml file, or a report of gsplit doctor --device cuda",
    f"give a file, this, or one of {', '.join(PRESETS)}",
)


_OPTIONAL = {field.name for field in fields(Hardware) if field.default is not MISSING}


def preset_of(label: str) -> str | None:
    """The preset for a GPU by its name, or by a text that contains it."""
    return next((preset for part, preset in _PRESET_OF_NAME.items() if part in label), None)


def read_hardware(path: Path) -> Hardware:
    """Read constants from a file: all fields of ``Hardware``, or some fields and ``base``, a preset, in JSON or TOML.

    Or a report of ``gsplit doctor --device cuda``: its rates of links and kernels; others as in the preset of the GPU.
    """
    table = read_document(path, _FILE, toml=path.suffix == ".toml")
    if "findings" in table:
        return _read_report(path, table["findings"])
    names = {field.name for field in fields(Hardware)}
    base = table.pop("base", None)
    given = table.pop("constants", table)  # a calibration file has other entries too
    start = asdict(PRESETS[base]) if isinstance(base, str) and base in PRESETS else {}
    if not isinstance(given, dict) or (base is not None and not start):
        raise _FILE.refuse(
            path, f"base {base!r}" if isinstance(given, dict) else f"constants of type {type(given).__name__}"
        )
    unknown = sorted(set(given) - names)
    missing = sorted(names - set(start) - set(given) - _OPTIONAL)
    if unknown or missing:
        raise _FILE.refuse(path, f"unknown {unknown}, missing {missing}")
    return Hardware(**{**start, **given})


def _read_report(path: Path, findings: object) -> Hardware:
    """The largest transfers of every kind that ``gsplit doctor`` measured, in GB/s, and its constants of kernels."""
    listed = findings if isinstance(findings, list) else []
    by_check = {str(each.get("check")): each for each in listed if isinstance(each, dict)}
    rates = by_check.get("links", {}).get("figures")
    if not isinstance(rates, dict) or not all(isinstance(rate, int | float) and rate < 1e9 for rate in rates.values()):
        raise _FILE.refuse(path, "a report without rates of links")

    def rate_of(kind: str) -> float | None:
        of_kind = [float(rate) for what, rate in rates.items() if what.startswith(kind)]
        return 1e9 * of_kind[-1] if of_kind else None  # sizes are in rising order

    base = PRESETS[preset_of(str(by_check.get("versions", {}).get("found"))) or _UNKNOWN_GPU]
    load = rate_of("zero-copy gather") or rate_of("copy from pinned memory")
    exchange = rate_of("all-to-all")
    if load is None:
        raise _FILE.refuse(path, "a report of a CPU")
    measured = by_check.get("constants", {}).get("figures", {})
    if not isinstance(measured, dict) or not set(measured) <= {field.name for field in fields(Hardware)} - {"name"}:
        raise _FILE.refuse(path, "a report with other constants")
    return replace(
        base,
        name=path.name,
        load_bytes_per_s=load,
        exchange_bytes_per_s=exchange or base.exchange_bytes_per_s,
        reduce_bytes_per_s=exchange or base.reduce_bytes_per_s,
        **measured,
    )


def write_hardware(hardware: Hardware, path: Path, notes: dict[str, str]) -> None:
    """Write constants and notes to a JSON file that ``read_hardware`` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"notes": notes, "constants": asdict(hardware)}, indent=1) + "\n")
