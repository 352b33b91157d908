"""Does `verify` say that a scheme of one's own is one that posbench has?"""

import pytest

from posbench.verify import certificate_config
from posbench.verify.nearest import nearest_scheme

FILE = """
import torch

from posbench.schemes import Scheme


class Cable(Scheme):
    per_layer = True

    def __init__(self, shape):
        super().__init__(shape)
        self.w = self.normal(shape.num_heads, shape.d_model)

    def gate(self, x, pos):
        z = x.to(self.w.dtype) @ self.w.t()
        return -torch.nn.functional.softplus(z.double()).transpose(1, 2)[..., None]

    def bias(self, q, k, gates, at):
        until_query, until_key = gates.sum_at_query[..., 0], gates.sum_at_key[..., 0]
        return lambda b, h, i, j: until_query[b, h, i] - until_key[b, h, j]


class Steep(Scheme):
    def bias(self, q, k, gates, at):
        steps = torch.arange(1, self.shape.num_heads + 1, device=q.device).double()
        return at.look_up(-4 * 2.0 ** -steps[:, None] * at.distances(q))


class Distant(Scheme):
    def bias(self, q, k, gates, at):
        return at.look_up((at.distances(q) / 8.0).expand(self.shape.num_heads, -1))


class Nothing(Scheme):
    pass
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        # -softplus(z) is ln sigmoid(-z), so CABLE is the forgetting transformer with the signs of w turned.
        ("Cable", "cable equals fox, with the other sign of what is learnt: logits differ by at most"),
        ("Steep", "nearest to alibi (in each head a multiple of it)"),
        *(
            pytest.param(name, sentence, marks=pytest.mark.slow)
            for name, sentence in {
                "Distant": "distant equals no scheme of posbench's; nothing it adds to scores is near to theirs",
                "Nothing": "nothing equals nope: logits differ by at most 0e+00",
            }.items()
        ),
    ],
)
def test_a_scheme_is_compared_with_those_of_posbench(tmp_path, name, sentence):
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    assert sentence in nearest_scheme(certificate_config(f"{file}:{name}"))
