"""One rank of `functions.run`, in a process of its own."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from shardwright.errors import OptionError
from shardwright.launch import values
from shardwright.launch.functions import CALL_FILE, RESULT_FILE, load_function


def main(folder: str) -> int:
    """Call the function, and leave its result or its traceback in the folder."""
    rank = os.environ["SHARDWRIGHT_RANK"]
    call = values.decode(Path(folder, CALL_FILE).read_text())
    sys.path[:] = call["path"]
    result: dict[str, Any]
    code = 0
    try:
        result = {"value": load_function(call["function"])(*call["args"], **call["kwargs"])}
        text = values.encode(result, "result")
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = OptionError("the function left the process: sys.exit", where="result", remedy="return instead")
        traceback.print_exception(error)
        text = values.encode({"traceback": "".join(traceback.format_exception(error))}, "result")
        code = 1
    partial = Path(folder, f"partial.{rank}")
    partial.write_text(text)
    partial.rename(Path(folder, RESULT_FILE.format(rank=rank)))
    return code
