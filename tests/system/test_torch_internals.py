"""The private parts of torch that posbench reaches exist and do what they did."""

from __future__ import annotations

import torch

from posbench.system.torch_internals import allow_recompiles, as_dtype, attention_with_logsumexp


def test_a_dtype_that_changes_nothing_leaves_the_tensor_as_it_is() -> None:
    x = torch.ones(2)
    assert as_dtype(x, torch.float32) is x and as_dtype(x, torch.bfloat16).dtype == torch.bfloat16


def test_attention_returns_the_log_sum_exp_of_its_scores() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    output, logsumexp = attention_with_logsumexp(q, k, v, None, 0.5)
    scores = (0.5 * q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(output, scores.softmax(-1) @ v)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))


def test_the_limit_of_recompiles_only_grows() -> None:
    allow_recompiles(300)
    allow_recompiles(20)
    assert torch._dynamo.config.recompile_limit == 300
