"""Packed attention and chunked log-probs against what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.training import log_probs as log_probs_module
from engines.training.log_probs import token_log_probs
from engines.training.packed_attention import Segments, packed_attention


@pytest.mark.parametrize("lengths", [[1], [7], [3, 3], [1, 40, 12, 11, 13, 2, 41, 1, 5]])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_stays_inside_segments(lengths: list[int], kv_heads: int) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    query = torch.randn(1, 4, tokens, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(1, kv_heads, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    upstream = torch.randn(1, tokens, 4, 8, dtype=torch.float64)

    def one_by_one() -> torch.Tensor:
        parts = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
        outputs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
            for q, k, v in parts
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2)

    segments = Segments(cu_seqlens, torch.device("cpu"))
    packed, _ = packed_attention(None, query, key, value, None, scaling=0.3, segments=segments)
    expected = one_by_one()
    torch.testing.assert_close(packed, expected)
    inputs = (query, key, value)
    gradients = torch.autograd.grad(packed, inputs, upstream)
    for found, right in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(found, right)


def test_attention_without_layout_is_refused() -> None:
    tensor = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="segments"):
        packed_attention(None, tensor, tensor, tensor, None, scaling=1.0)


@pytest.mark.parametrize("chunk_elements", [1 << 22, 7 * 11], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_entropy_with_their_gradients(
    chunk_elements: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs_module, "_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    labels, temperature = torch.randint(0, 11, (23,)), 0.7
    scores = torch.log_softmax(hidden @ weight.T / temperature, -1)
    expected = scores.gather(1, labels[:, None])[:, 0]
    expected_entropy = -(scores.exp() * scores).sum(-1)
    found, found_entropy = token_log_probs(hidden, weight, labels, temperature, entropy)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(23)
    right, mine = (expected * upstream).sum(), (found * upstream).sum()
    if entropy:
        torch.testing.assert_close(found_entropy, expected_entropy)
        right, mine = (
            right + (expected_entropy * upstream.cos()).sum(),
            mine + (found_entropy * upstream.cos()).sum(),
        )
    else:
        assert found_entropy is None
    for found_gradient, gradient in zip(
        torch.autograd.grad(mine, (hidden, weight)), torch.autograd.grad(right, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_head_is_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 sum of 2,000 equal parts stops growing at 256 of them."""
    monkeypatch.setattr(log_probs_module, "_CHUNK_ELEMENTS", 11)
    torch.manual_seed(0)
    row, weight, labels = torch.randn(1, 5), torch.randn(11, 5), torch.zeros(2000, dtype=torch.int64)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        head = weight.bfloat16().to(dtype).requires_grad_()
        log_probs, _ = token_log_probs(row.bfloat16().to(dtype).expand(2000, 5), head, labels)
        found.append(torch.autograd.grad(log_probs.sum(), head)[0])
    assert found[1].dtype == torch.bfloat16
    assert (found[1].float() - found[0]).norm() < 1e-2 * found[0].norm()


def test_no_rows_still_give_gradients() -> None:
    """A filler predicts nothing and must still take part in the backward pass."""
    hidden, weight = torch.zeros(0, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    found, _ = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert not weight.grad.any()
