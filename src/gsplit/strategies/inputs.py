"""A batch's input rows, in two halves: what the loader does ahead of training, and what the model's device does.

On the host (``HostInputs``) the loader does it all: own rows are read straight into the mixed tensor of layer 0 and
rows of other ranks received into its tail, so nothing is copied. For a device (``DeviceInputs``) the loader only finds
out where the rows are; the device gathers them out of its own and the host's memory and exchanges them itself. Stored
features carry no gradient, so both may run ahead of training.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gsplit.exchange import Exchange
from gsplit.features.device import DeviceRows
from gsplit.features.protocol import RowSource, RowsRead
from gsplit.kernels.buffers import BufferPool
from gsplit.strategies.protocol import SampledStep
from gsplit.telemetry import StepTelemetry

__all__ = ["DeviceInputs", "HostInputs", "Inputs"]


class Inputs(Protocol):
    """Where the rows of ``batch.x`` come from."""

    def fetch(self, sampled: SampledStep) -> Any:
        """What can be done ahead, as a dataclass of tensors. A collective on the host, in the loader's thread."""

    def place(self, fetched: Any, exchange: Exchange, telemetry: StepTelemetry) -> Tensor:
        """The mixed input rows on the model's device, from what was fetched. A collective on devices."""


def _exchange_rows(rows: Tensor, exchange: Exchange, telemetry: StepTelemetry) -> Tensor:
    with telemetry.span("exchange_features", rows.device):  # all ranks: once per step
        x = exchange.mix_stored(rows, "exchange features")
    telemetry.count("bytes_sent", exchange.num_sent * x[:1].nbytes)
    telemetry.count("bytes_received", exchange.num_received * x[:1].nbytes)
    telemetry.count("collectives", exchange.num_collectives)
    return x


def _count(read: RowsRead, num_local: int, telemetry: StepTelemetry) -> None:
    telemetry.count("input_rows", num_local)
    telemetry.count("rows_loaded", read.rows)
    telemetry.count("bytes_loaded", read.num_bytes)
    telemetry.count("cache_hits", read.hits)


@dataclass(frozen=True)
class _Mixed:
    x: Tensor


class HostInputs:
    """See ``Inputs``. ``pool`` lies where mini-batches are sampled, and so do the rows."""

    def __init__(self, features: RowSource, pool: BufferPool) -> None:
        self._features, self._pool = features, pool

    def fetch(self, sampled: SampledStep) -> _Mixed:
        features, exchange, telemetry = self._features, sampled.loading_exchange, sampled.telemetry
        rows = self._pool.empty((exchange.num_buffer, *features.row_shape), features.dtype)
        with telemetry.span("load_features"):
            read = features.read(sampled.read_ids, rows[: exchange.num_local])
        _count(read, exchange.num_local, telemetry)
        return _Mixed(_exchange_rows(rows, exchange, telemetry))

    def place(self, fetched: _Mixed, exchange: Exchange, telemetry: StepTelemetry) -> Tensor:
        return fetched.x


class DeviceInputs:
    """See ``Inputs``. The host samples, the device gathers."""

    def __init__(self, features: DeviceRows, device: torch.device) -> None:
        self._features, self._device = features, device

    def fetch(self, sampled: SampledStep) -> Any:
        with sampled.telemetry.span("load_features"):
            located, read = self._features.locate(sampled.read_ids)
        _count(read, sampled.loading_exchange.num_local, sampled.telemetry)
        return located

    def place(self, fetched: Any, exchange: Exchange, telemetry: StepTelemetry) -> Tensor:
        features = self._features
        rows = torch.empty(exchange.num_buffer, *features.row_shape, dtype=features.dtype, device=self._device)
        with telemetry.span("gather_features", self._device):
            features.gather(fetched, rows[: exchange.num_local])
        return _exchange_rows(rows, exchange, telemetry)
