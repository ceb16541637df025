"""Streams of a device, on a module that notes what it is asked."""

from types import SimpleNamespace

import pytest
import torch

from gsplit.device import devices


def test_work_beside_training_comes_before_what_training_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, int]] = []

    def new_stream(device: torch.device, priority: int = 0) -> SimpleNamespace:
        asked.append((device, priority))
        return SimpleNamespace(wait_stream=lambda other: None)

    module = SimpleNamespace(Stream=new_stream, current_stream=lambda device: None)
    monkeypatch.setattr(devices, "_module", lambda device: module)
    devices.SideStream(torch.device("cuda", 1))
    assert asked == [(torch.device("cuda", 1), -1)]
