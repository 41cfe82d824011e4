"""`torch.unique` in a program whose sizes are fixed: as many places as there are elements, and which of them count."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.client.frontends.torch.selections import Selection


class Distinct(Selection):
    """The distinct values, or what there is of each. inverse: the number of each element's value among them."""

    def __init__(self, values: Any, mask: Any, inverse: Any) -> None:
        super().__init__(values, mask)
        self._inverse = inverse

    def __getitem__(self, index: Any) -> Any:
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if first is self._inverse and all(part is None or isinstance(part, slice) for part in rest):
            return self.values[index]
        return super().__getitem__(index)


def find_distinct(
    tensor: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: None = None
) -> Any:
    """As `torch.unique` of all elements."""
    del sorted, dim  # they are sorted in either case
    flat = tensor.detach().reshape(-1)
    ordered, order = flat.sort()
    begins = torch.cat([torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]])
    numbers = begins.cumsum(0) - 1
    inverse = torch.zeros_like(numbers).scatter(0, order, numbers)
    mask = torch.arange(flat.numel()) <= numbers[-1]
    values = torch.where(mask, torch.zeros_like(ordered).scatter(0, numbers, ordered), ordered[0])
    places = inverse.reshape(tensor.shape)
    results: list[Any] = [Distinct(values, mask, places)]
    results += [places] if return_inverse else []
    if return_counts:
        counts = torch.zeros_like(numbers).index_add(0, numbers, torch.ones_like(numbers))
        results.append(Distinct(torch.where(mask, counts, counts[0]), mask, places))
    return tuple(results) if len(results) > 1 else results[0]
