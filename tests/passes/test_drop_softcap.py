"""The cap changes no order, so its removal must change no token but a tie's, and only when asked for."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gemma_npu_compile.passes.drop_softcap import drop_softcap

aten = torch.ops.aten


def capped(logits: Tensor, cap: float = 30.0) -> Tensor:
    return torch.tanh(logits / cap) * cap


@given(seed=st.integers(0, 999), spread=st.floats(0.1, 40))
def test_the_best_token_stays(seed: int, spread: float) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(3, 4, 50) * spread
    gm = make_fx(lambda x: capped(x).argmax(-1))(logits)
    assert drop_softcap(gm, skip_softcap=True).changed == 1
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=aten.tanh.default)
    chosen, best = gm(logits), capped(logits).amax(-1)
    assert torch.equal(capped(logits).gather(-1, chosen[..., None])[..., 0], best)
    assert torch.equal(chosen, logits.argmax(-1))
    assert drop_softcap(gm, skip_softcap=True).changed == 0


def test_a_tie_the_cap_makes_is_why_this_is_an_option() -> None:
    logits = torch.tensor([[1e6, 2e6]])
    gm = make_fx(lambda x: capped(x).argmax(-1))(logits)
    off = drop_softcap(gm, skip_softcap=False)
    assert (off.changed, dict(off.left)) == (0, {"skip_softcap is off": 1})
    assert gm(logits).tolist() == [0]
    drop_softcap(gm, skip_softcap=True)
    gm.recompile()
    assert gm(logits).tolist() == [1]


def test_logits_that_are_read_otherwise_stay() -> None:
    gm = make_fx(lambda x: (capped(x).argmax(-1), capped(x) + 1))(torch.randn(2, 5))
    gm2 = make_fx(lambda x: ((y := capped(x)).argmax(-1), y))(torch.randn(2, 5))
    for each in (gm, gm2):
        assert drop_softcap(each, skip_softcap=True).changed == 1
        assert len(each.graph.find_nodes(op="call_function", target=aten.tanh.default)) == 1


def test_what_only_looks_like_a_cap_is_not_touched() -> None:
    looks = (
        lambda x: (torch.tanh(x / 30.0) * 20.0).argmax(-1),  # two numbers
        lambda x: (torch.tanh(x / -30.0) * -30.0).argmax(-1),  # falls twice: rises, but nobody writes it
        lambda x: (torch.sigmoid(x / 30.0) * 30.0).argmax(-1),
        lambda x: (torch.tanh(x / 30.0) * 30.0).argmin(-1),
    )
    for fn in looks:
        result = drop_softcap(make_fx(fn)(torch.randn(2, 5)), skip_softcap=True)
        assert (result.changed, sum(result.left.values())) == (0, 0)
