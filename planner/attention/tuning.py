"""Numbers that tune the recognition of attention."""

#: Tuples, barriers and loops that one value is followed through. Smaller: masks of deeply nested loops are not told;
#: larger: time on texts that nobody writes.
MAX_ORIGIN_STEPS = 64

#: Instructions between two products of an attention. Smaller: attention with long masks is left alone; larger: time on
#: programs that have none.
MAX_CONE_NODES = 400

#: Nested operations of one value that is evaluated. Smaller: fewer masks are told; larger: Python's own limit of nested
#: calls is met.
MAX_DEPTH = 80

#: Elements of an array without axes that is evaluated whole. Smaller: masks by tables are not told; larger: planning
#: time.
MAX_WHOLE_ELEMENTS = 1 << 20

#: Elements of scores that are evaluated at once. Smaller: more steps; larger: memory.
BLOCK_ELEMENTS = 1 << 18

#: Difference, beside the largest number, at which values are taken for equal. Smaller: rounding of float64 counts;
#: larger: what is nearly a softmax is taken for one.
CLOSE = 1e-6

#: Width of the scores that are drawn. Smaller: what is nearly linear in them, like a soft-cap, does not show; larger:
#: exponentials are 0.
SCORE_SPREAD = 20.0

#: Times that reshapes may cut axes further. Smaller: heads merged twice are not told; larger: time on other programs.
MAX_CUTS = 4

#: A number added to a score, beside the highest of its row, that hides a key. Nearer to 0: biases are taken for masks;
#: farther: masks of -10,000 are biases.
HIDDEN = -1e4
