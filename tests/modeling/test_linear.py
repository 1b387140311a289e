"""Linear layers that are laid out once: the same products, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gkd.modeling.linear import PackedLinear, can_lay_out, pack_linear_layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("k", "n"), [(64, 96), (2048, 512), (33, 7)])
def test_rows_are_what_they_are_alone(bias: bool, k: int, n: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=bias)
    packed, x = PackedLinear(layer), torch.randn(400, k)
    exact = nn.functional.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    with torch.no_grad():
        whole = packed(x)
        torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-5)
        for count in (1, 2, 5, 17, 130):
            assert torch.equal(packed(x[:count]), whole[:count])
        assert torch.equal(packed(x[3]), whole[3])
        assert torch.equal(packed(x[None, 3:4]), whole[None, 3:4])


def test_every_linear_layer_of_a_model_is_replaced_and_no_other() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), Scaled(6, 3))
    x = torch.randn(5, 8)
    before, weight = model(x), model[0].weight.detach().clone()
    pack_linear_layers(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(PackedLinear) == 2 and nn.Linear not in kinds and Scaled in kinds
    torch.testing.assert_close(model(x), before)
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_type_that_this_cpu_has_no_such_products_of_stays_as_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).to(dtype)
    x = torch.randn(5, 64, dtype=dtype)
    before = model(x)
    pack_linear_layers(model)
    kinds = {type(module) for module in model.children()}
    assert kinds == {PackedLinear if can_lay_out(dtype) else nn.Linear}
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)
