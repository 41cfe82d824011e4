"""Plan ↔ JSON (schema: docs/plan-schema.json): small at 51,000 instructions, strict in reading.

Instructions repeat few shardings and names: those stand once in tables, and rows refer to them by position: `shardings`
(one array each), `values` (the shardings of a value's leaves), `computations`, `opcodes` and `reasons`. A row of
`instructions` is `[computation, name, opcode, [operand values], result value, [partial axes], reason]`.

Reading accepts any minor version of the format's major number. Unknown keys are refused, except from a later minor
version. Version 1.1 added `segments`, the `name` of candidates, and `rewritten` and `view_of` in plans of rewritten
programs; 1.3 `recomputed` and `micro_batches`; 1.4 `hidden_s` and `is_bounded` of the cost; 1.5 the `groups` of
collectives along parts of axes; 1.6 the collectives' `combined`, and optional `compile_options`; 1.7
optional `strategies`; 1.8 the collectives' `sent_as`, and what a plan's program is known by; 1.9 optional `attention`;
1.10 optional `manual_axes`, `regions`, `mixtures`, `transfers_s` of the cost, `host_…_bytes` of the memory and
`is_on_host` of variables.

A plan of a rewritten program carries that program's text: only the planner has it.
"""

from __future__ import annotations

from shardwright.plans.plan_json.reading import decode, decode_data, read_json
from shardwright.plans.plan_json.writing import encode

__all__ = ["decode", "decode_data", "encode", "read_json"]
