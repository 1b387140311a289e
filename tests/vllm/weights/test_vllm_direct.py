"""Copies past weight loaders, through vLLM's own reload of a layer that is made for it. No engine is started."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

ROWS, COLS = 4, 3


class Layer(nn.Module):
    """Has a weight that its model copies into by itself, and one that goes through its loader."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(ROWS, COLS), requires_grad=False)
        self.gate = nn.Parameter(torch.zeros(COLS), requires_grad=False)

    def load_weights(self, pairs: list[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in pairs:
            if name == "gate":
                parameters["gate"].weight_loader(parameters["gate"], weight)
            elif name == "experts":
                parameters["experts"].data.copy_(weight)
            else:
                parameters["experts"][int(name)].copy_(weight)


WEIGHTS = {"experts": torch.arange(12.0).view(ROWS, COLS), "gate": torch.full((COLS,), 7.0)}
ONE_BY_ONE = [(str(row), weight) for row, weight in enumerate(WEIGHTS["experts"])]
ORDERS = {
    "the copy first": [[("experts", WEIGHTS["experts"])], [("gate", WEIGHTS["gate"])]],
    "the copy last": [[("gate", WEIGHTS["gate"])], [("experts", WEIGHTS["experts"])]],
    "all at once": [list(WEIGHTS.items())],
    "a row at a time": [*([pair] for pair in ONE_BY_ONE), [("gate", WEIGHTS["gate"])]],
    "the copy alone": [[("experts", WEIGHTS["experts"])]],
}


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_what_is_copied_arrives(order: str) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    from gkd.weights.vllm_direct import DirectCopies

    model = nn.Sequential(Layer())
    layer = model[0]
    layerwise.record_metadata_for_reloading(model)
    places = {name: p.data_ptr() for name, p in layer.named_parameters()}
    for factor in (1, 2):  # a second push finds what the first one left
        layerwise.initialize_layerwise_reload(model)
        direct = DirectCopies(model)
        for number, bucket in enumerate(ORDERS[order]):
            assert layer.experts.is_meta, "it was processed before it had all of its weights"
            with direct:
                layer.load_weights([(name, factor * weight) for name, weight in bucket])
            direct.process(whole=False)
            complete = number == len(ORDERS[order]) - 1 and order != "the copy alone"
            assert layer.experts.is_meta != complete
        direct.process(whole=True)
        layerwise.finalize_layerwise_reload(model, None)
        assert torch.equal(layer.experts, factor * WEIGHTS["experts"])
        if order != "the copy alone":
            assert torch.equal(layer.gate, factor * WEIGHTS["gate"])
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == places  # graphs hold on to them


@torch.no_grad()
def test_a_model_is_reloaded_any_number_of_times() -> None:
    """Once a step, for as many as a run has; vLLM keeps the tensors with their loaders from one reload to the next."""
    from vllm.model_executor.model_loader.reload import layerwise

    from gkd.weights.vllm_direct import DirectCopies

    model = nn.Sequential(Layer())
    layerwise.record_metadata_for_reloading(model)
    for factor in range(sys.getrecursionlimit()):
        layerwise.initialize_layerwise_reload(model)
        direct = DirectCopies(model)
        with direct:
            model[0].load_weights([(name, factor * weight) for name, weight in WEIGHTS.items()])
        direct.process(whole=True)
        layerwise.finalize_layerwise_reload(model, None)
        assert torch.equal(model[0].gate, factor * WEIGHTS["gate"])
