"""Random layouts of arrays over small meshes, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding

MESHES = [Mesh.of({"x": 8}), Mesh.of({"x": 2, "y": 4}), Mesh.of({"x": 4, "y": 2}), Mesh.of({"x": 2, "y": 2, "z": 2})]
SMALL_MESHES = [*MESHES, Mesh.of({"x": 1}), Mesh.of({"x": 2}), Mesh.of({"x": 3}), Mesh.of({"x": 2, "y": 3})]


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def layouts_of(draw: st.DrawFn, shape: tuple[int, ...], meshes: list[Mesh] = SMALL_MESHES) -> Layout:
    """A layout of an array of that shape, padded where an axis does not divide it."""
    mesh = draw(st.sampled_from(meshes))
    axes = draw(st.permutations([axis.name for axis in mesh.axes]))
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for axis in axes:
        at = draw(st.integers(-1, len(shape) - 1)) if shape else -1
        if at >= 0:
            dims[at] = (*dims[at], axis)
    stored = tuple(-(-size // mesh.size(dim)) * mesh.size(dim) for size, dim in zip(shape, dims, strict=True))
    return Layout(element_type="s32", shape=shape, mesh=mesh, sharding=TensorSharding(tuple(dims)), stored_shape=stored)
