"""Sizes that change from call to call, in buckets: as many programs as sizes, and eager PyTorch's losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend.comparison import relative, train_eagerly
from tests.torch_frontend.models import ids

SIZES = (8, 16)


class Tagger(torch.nn.Module):
    """Each token sees all others that are no filling."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, tokens: Any, mask: Any) -> Any:
        return self.head(self.layer(self.embedding(tokens), src_key_padding_mask=mask == 0))


def tag_loss(model: Any, tokens: Any, mask: Any, tags: Any) -> Any:
    return F.cross_entropy(model(tokens, mask).flatten(0, 1), tags.flatten())


def buckets(*names: str) -> list[swt.Bucket]:
    return [swt.Bucket(name, 1, SIZES, fill=-100 if name == "tags" else 0) for name in names]


def batch(length: int, seed: int = 0) -> tuple[Any, Any, Any]:
    tokens = ids(4, length, below=32, seed=seed)
    return tokens, torch.ones_like(tokens), ids(4, length, below=5, seed=seed + 1)


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Tagger()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_lengths_of_a_bucket_share_a_program(session: sw.Session, caplog: pytest.LogCaptureFixture) -> None:
    batches = [batch(length, seed=length) for length in (5, 8, 7, 12, 16, 3, 9)]
    step = swt.parallelize(session, *make(), tag_loss, buckets=buckets("tokens", "mask", "tags"), effort="fast")
    with caplog.at_level("INFO", "shardwright"):
        losses = [step(*each).item() for each in batches]
    assert relative(losses, train_eagerly(*make(), tag_loss, batches)) <= 1e-5
    assert sum("tag_loss: ready after" in line for line in caplog.messages) == len(SIZES)


def test_results_have_the_size_of_the_bucket(session: sw.Session) -> None:
    """A step without an optimizer need not take all that has a bucket. The filling of the mask hides that of tokens."""
    model, _ = make()
    model.eval()
    tokens, mask, _ = batch(6)
    predict = lambda model, tokens, mask: model(tokens, mask)  # noqa: E731
    step = swt.parallelize(session, model, None, predict, buckets=buckets("tokens", "mask", "tags"), effort="fast")
    result = step(tokens, mask)
    assert result.shape == (4, 8, 5)
    with torch.no_grad():
        assert torch.allclose(result[:, :6], model(tokens, mask), atol=1e-5)


@pytest.mark.parametrize(
    ("of", "arguments", "told"),
    [
        (buckets("tokens", "mask", "tags"), batch(17), "tokens: .*has 17 elements.*largest bucket 16.*bucket of 17"),
        (buckets("tokens", "labels"), batch(5), "a bucket of labels.*tensors of the call are tokens, mask, tags"),
        ([swt.Bucket("tokens", 2, SIZES)], batch(5), "tokens: .*shape .4, 5. has no dimension 2"),
    ],
)
def test_what_fits_no_bucket_is_told(session: sw.Session, of: Any, arguments: Any, told: str) -> None:
    step = swt.parallelize(session, *make(), tag_loss, buckets=of)
    with pytest.raises(sw.ArgumentError, match="(?s)" + told):
        step(*arguments)


def test_a_result_is_not_filled_up(session: sw.Session) -> None:
    result = swt.parallelize(session, make()[0], None, lambda model, x: x + 1, effort="fast")(ids(4, 5))
    step = swt.parallelize(session, *make(), tag_loss, buckets=buckets("tokens"))
    with pytest.raises(sw.ArgumentError, match=r"(?s)tokens: a result of a step.*result\.cpu\(\)"):
        step(result, *batch(8)[1:])


@pytest.mark.parametrize("sizes", [(), (8, 4), (0, 8), (4.0,)])
def test_sizes_are_ascending_numbers(sizes: Any) -> None:
    with pytest.raises(sw.OptionError, match=r"(?s)the sizes of x are .*ascending"):
        swt.Bucket("x", 0, sizes)
