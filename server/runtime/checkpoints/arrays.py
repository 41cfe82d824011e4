"""Boxes of arrays, read from a checkpoint by whole chunks, each of which is checked where there are checksums."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from shardwright.plans.layouts import Slices
from shardwright.server.runtime.checkpoints import chunks, damage
from shardwright.server.runtime.checkpoints.checksums import METADATA, ArrayChecksums, Checksums
from shardwright.server.tuning import TILE_BYTES, TILES


async def read(item: Any, step: int, boxes: Sequence[tuple[str, Slices]], table: Checksums | None) -> list[np.ndarray]:
    """The boxes of arrays, by name, of the PyTree in a folder. Raises CheckpointError."""
    boxes_by_name: dict[str, list[Slices]] = {}
    for name, box in boxes:
        boxes_by_name.setdefault(name, []).append(box)
    stores = await open_all(item, step, list(boxes_by_name))
    limit = asyncio.Semaphore(TILES)
    readings = [
        _read_unchecked(stores[name], wanted)
        if table is None
        else _CheckedArray(stores[name], name, wanted, table.arrays[name]).read(limit)
        for name, wanted in boxes_by_name.items()
    ]
    values: list[Any] = await asyncio.gather(*readings, return_exceptions=True)
    by_name = dict(zip(boxes_by_name, values, strict=True))
    _raise_damage(item, step, {name: value for name, value in by_name.items() if isinstance(value, Exception)})
    blocks = {name: iter(value) for name, value in by_name.items()}
    return [next(blocks[name]) for name, _ in boxes]


async def _read_unchecked(store: Any, boxes: Sequence[Slices]) -> list[np.ndarray]:
    return await _all([store[box].read() for box in boxes])


class _CheckedArray:
    """An array of a checkpoint with checksums, and what is wanted of it: `blocks`, the contents of `boxes`."""

    def __init__(self, store: Any, name: str, boxes: Sequence[Slices], checksums: ArrayChecksums) -> None:
        self._store = store
        self._name = name
        self._checksums = checksums
        self._boxes = boxes
        self._lock = threading.Lock()
        self._dtype = store.dtype.numpy_dtype
        self._blocks: dict[int, np.ndarray] = {}  # by the number of the box

    async def read(self, limit: asyncio.Semaphore) -> list[np.ndarray]:
        """The contents of the boxes. Raises ChunkDamage."""
        boxes_by_region: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number, box in enumerate(self._boxes):
            region = chunks.align(box, self._checksums.chunk, self._checksums.shape)
            boxes_by_region.setdefault(tuple((part.start, part.stop) for part in region), []).append(number)
        await _all(
            [
                self._read_tile(tile, numbers, limit)
                for borders, numbers in boxes_by_region.items()
                for tile in self._tiles(tuple(slice(*border) for border in borders), numbers)
            ]
        )
        return [self._blocks[number] for number in range(len(self._boxes))]

    def _tiles(self, region: Slices, numbers: Sequence[int]) -> Iterator[Slices]:
        """What is read at once: all, unless most of it is there only to be checked."""
        size = chunks.size_of(region)
        is_wanted = size <= 2 * sum(chunks.size_of(self._boxes[number]) for number in numbers)
        most = size if is_wanted else max(1, TILE_BYTES // self._dtype.itemsize)
        return chunks.tiles(region, self._checksums.chunk, most)

    async def _read_tile(self, tile: Slices, numbers: Sequence[int], limit: asyncio.Semaphore) -> None:
        async with limit:
            data = await self._store[tile].read()
            await asyncio.to_thread(self._take, tile, data, numbers)

    def _take(self, tile: Slices, data: np.ndarray, numbers: Sequence[int]) -> None:
        """Check a box of whole chunks, and hand out its part of the boxes of these numbers, which all touch it."""
        for key, checksum in chunks.checksums_of(data, tile, self._checksums.chunk).items():
            if self._checksums.crc32.get(key) != checksum:
                raise damage.ChunkDamage(f"{self._name}/{key}")
        for number in numbers:
            box = self._boxes[number]
            part = chunks.common((tile, box))
            values = data[chunks.within(part, tile)]
            if part == box:
                self._blocks[number] = values
            else:
                with self._lock:
                    if number not in self._blocks:
                        self._blocks[number] = np.empty([part.stop - part.start for part in box], self._dtype)
                self._blocks[number][chunks.within(part, box)] = values


async def _all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; raises the first error once nothing is under way any more."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def open_all(item: Any, step: int, names: Sequence[str]) -> dict[str, Any]:
    """The arrays of these names. Raises CheckpointError."""
    facts = facts_of(item)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    openings = [ts.open(ts.Spec(_spec(item, name, facts, context)), open=True, context=context) for name in names]
    opened = await asyncio.gather(*openings, return_exceptions=True)
    stores = dict(zip(names, opened, strict=True))
    _raise_damage(item, step, {name: store for name, store in stores.items() if isinstance(store, Exception)})
    return stores


def _raise_damage(item: Any, step: int, errors: Mapping[str, Exception]) -> None:
    if not errors:
        return
    first = next(iter(errors.values()))
    if damage.is_refusal(first):
        raise first
    base = _spec(item, next(iter(errors)), facts_of(item), None)["kvstore"].get("base")
    raise damage.of_arrays(item, step, errors, base) from first


def _spec(item: Any, name: str, facts: dict[str, Any], context: Any) -> dict[str, Any]:
    """Tensorstore's specification of an array to read."""
    is_ocdbt = facts.get("use_ocdbt", True)
    info = ocp.type_handlers.ParamInfo(
        name=name,
        parent_dir=item,
        is_ocdbt_checkpoint=is_ocdbt,
        use_zarr3=facts.get("use_zarr3", False),
        raise_array_data_missing_error=facts.get("store_array_data_equal_to_fill_value", True),
        ts_context=context,
    )
    spec: dict[str, Any] = ocp.type_handlers.get_json_tspec_read(
        info, use_ocdbt=is_ocdbt, raise_array_data_missing_error=info.raise_array_data_missing_error
    )
    return spec


def facts_of(item: Any) -> dict[str, Any]:
    """Orbax's metadata of a PyTree."""
    facts: dict[str, Any] = json.loads((item / METADATA).read_text())
    return facts
