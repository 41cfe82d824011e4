"""Numbers that tune mixtures."""

#: Most rows in tiles that are nobody's, over rows received: a tile of each group is partly empty. Longer tiles copy
#: fewer matrices, shorter ones multiply fewer rows in vain.
MAX_TILE_WASTE = 0.04

#: Most forms in blocks that are planned beside the plain one: each is a search of its own.
MAX_FORMS = 3
