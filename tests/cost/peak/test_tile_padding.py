"""What fills up the tiles that arrays lie in on TPUs."""

import pytest

from shardwright.cost.peak.tile_padding import fill_tiles, padding_factor
from tests.cost.one_device import program_of

#: (images, places, groups, channels a group) of an array that group normalisation makes of images whose sides are the
#: root of their places, and the dimension that XLA:TPU (libtpu 0.0.42.1, v5e) puts innermost, read off what it makes of
#: `x + relu(group_norm(convolution(x)))` and its gradient.
LAYOUTS = [
    ((64, 4096, 8, 16), 1), ((64, 1024, 8, 32), 0), ((64, 256, 8, 64), 3), ((32, 4096, 8, 16), 1),
    ((32, 1024, 8, 32), 3), ((32, 256, 8, 64), 3), ((32, 4096, 8, 32), 1), ((32, 1024, 8, 16), 1),
    ((64, 1024, 8, 16), 0), ((64, 4096, 8, 32), 1), ((128, 4096, 8, 16), 0), ((128, 256, 8, 64), 0),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "innermost"), LAYOUTS)
def test_the_dimension_that_fills_up_least_lies_innermost(lengths: tuple[int, ...], innermost: int) -> None:
    images, places, groups, channels = lengths
    side = round(places**0.5)
    filled = max(1.0, 128 / lengths[innermost])
    assert padding_factor(lengths, (images, side, side, groups * channels)) == filled


NORMALISED = """HloModule step

ENTRY main {
  images = f32[32,32,32,256]{3,2,1,0} parameter(0)
  apart = f32[32,1024,8,32]{3,2,1,0} reshape(images)
  scaled = f32[32,1024,8,32]{3,2,1,0} exponential(apart)
  joined = f32[32,32,32,256]{3,2,1,0} reshape(scaled)
  ROOT out = READER
}
"""
READERS = {
    "f32[32,32,32,256]{3,2,1,0} negate(joined)": 4,
    "f32[32,8,1024,32]{3,2,1,0} transpose(scaled), dimensions={0,2,1,3}": 1,  # lies as its readers need it
}


@pytest.mark.parametrize(("reader", "ratio"), READERS.items())
def test_what_lies_between_two_reshapes_is_filled_up(reader: str, ratio: int) -> None:
    program = program_of(NORMALISED.replace("READER", reader), "tpu-v5e")
    before = {each.name: sizes for each, sizes in zip(program.instructions, program.sizes_bytes, strict=True)}
    fill_tiles(program, lambda instruction: instruction.shape.leaves[0].dimensions)
    after = {each.name: sizes for each, sizes in zip(program.instructions, program.sizes_bytes, strict=True)}
    changed = {name: sizes[0] / before[name][0] for name, sizes in after.items() if sizes != before[name]}
    assert changed == ({"apart": ratio, "scaled": ratio} if ratio > 1 else {})
