"""One rank of `functions.run`, in a process of its own."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from shardwright import object_codec
from shardwright.errors import OptionError
from shardwright.launch.functions import CALL_FILE, RESULT_FILE, load_function


def main(folder: str) -> int:
    """Call the function, and leave its result or its traceback in the folder."""
    rank = os.environ["SHARDWRIGHT_RANK"]
    call = object_codec.loads(Path(folder, CALL_FILE).read_bytes())
    sys.path[:] = call["path"]
    result: dict[str, Any]
    code = 0
    try:
        result = {"value": load_function(call["function"])(*call["args"], **call["kwargs"])}
        message = object_codec.dumps(result, "result")
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = OptionError("the function left the process: sys.exit", where="result", remedy="return instead")
        traceback.print_exception(error)
        message = object_codec.dumps({"traceback": "".join(traceback.format_exception(error))}, "result")
        code = 1
    partial = Path(folder, f"partial.{rank}")
    partial.write_bytes(message)
    partial.rename(Path(folder, RESULT_FILE.format(rank=rank)))
    return code
