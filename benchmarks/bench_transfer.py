"""Reading many small arrays beside `jax.device_get`, and uploading a large one beside a bare gRPC stream.

    make bench-transfer    (or: python benchmarks/bench_transfer.py [--leaves 5000] [--mib 512] [--rounds 7])

Each round measures all of them once, one after another, on the same machine. Medians are printed with their ratio;
exit code 1 if one misses its bar. The first round is not counted: memory is new to it. JAX reads arrays with the
handles' shardings on as many CPU devices of this process, new ones each time (it caches the values). The bare stream
sends the same bytes in chunks of the same size, without protobuf, to a server with preallocated memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

DEVICES = 8
#: Bar of reading: this many times JAX's seconds, and a slack.
MAX_READ_RATIO, READ_SLACK_S = 3.0, 0.1
#: Bar of uploads: this part of the bare stream's speed.
MIN_UPLOAD_RATIO = 0.6
_SERVE = "--serve-bytes"

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=5000)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(_SERVE, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bytes:
        _serve_bare(options.serve_bytes)
        return 0
    import shardwright as sw

    with sw.connect(devices=DEVICES) as session:
        is_fast = [
            *_bench_reading(session, options.leaves, options.rounds),
            *_bench_uploads(session, options.mib << 20, options.rounds),
        ]
    return 0 if all(is_fast) else 1


def _bench_reading(session: Any, count: int, rounds: int) -> Iterator[bool]:
    import jax
    import numpy as np

    state = {f"leaf{number}": np.full(DEVICES, number, np.float32) for number in range(count)}
    for kind, dims in (("replicated", (None,)), ("split", ("x",))):
        layout = _make_layout(state["leaf0"], dims)
        sharding = _make_sharding(dims)
        handles = dict(zip(state, _upload(session, list(state.values()), layout), strict=True))
        ours, plain = [], []
        for _ in range(rounds + 1):
            arrays = jax.block_until_ready(jax.device_put(state, sharding))
            plain.append(_time_call(jax.device_get, arrays))
            ours.append(_time_call(jax.device_get, handles))
        values = jax.device_get(handles)
        assert all(np.array_equal(values[name], state[name]) for name in state)
        our_s, plain_s = statistics.median(ours[1:]), statistics.median(plain[1:])
        print(
            f"{count} leaves, {kind}: device_get of handles {our_s:.3f} s, of JAX's own arrays {plain_s:.3f} s: "
            f"{our_s / plain_s:.2f} times"
        )
        yield our_s <= MAX_READ_RATIO * plain_s + READ_SLACK_S


def _bench_uploads(session: Any, size_bytes: int, rounds: int) -> Iterator[bool]:
    import numpy as np

    value = np.random.default_rng(0).integers(0, 255, (DEVICES, size_bytes // DEVICES), np.uint8)
    layouts = {"split": _make_layout(value, ("x", None)), "replicated": _make_layout(value, (None, None))}
    seconds: dict[str, list[float]] = {kind: [] for kind in ("bare", *layouts)}
    with _start_bare_server(size_bytes) as send:
        for _ in range(rounds + 1):
            seconds["bare"].append(_time_call(send, value, session.info.chunk_bytes))
            for kind, layout in layouts.items():
                seconds[kind].append(_time_call(_upload, session, [value], layout))
    bare_s = statistics.median(seconds["bare"][1:])
    for kind in layouts:
        our_s = statistics.median(seconds[kind][1:])
        print(
            f"{size_bytes >> 20} MiB up, {kind}: {size_bytes / our_s / 1e9:.2f} GB/s, "
            f"bare stream {size_bytes / bare_s / 1e9:.2f} GB/s: {bare_s / our_s:.2f} of its speed"
        )
        yield bare_s / our_s >= MIN_UPLOAD_RATIO


def _make_layout(value: Any, dims: tuple[str | None, ...]) -> Any:
    from shardwright.dtypes import to_element_type
    from shardwright.plans.layouts import Layout
    from shardwright.plans.shardings import Mesh, TensorSharding

    axes = tuple((axis,) if axis else () for axis in dims)
    return Layout(
        element_type=to_element_type(value.dtype),
        shape=value.shape,
        mesh=Mesh.of({"x": DEVICES}),
        sharding=TensorSharding(axes),
        stored_shape=value.shape,
    )


def _make_sharding(dims: tuple[str | None, ...]) -> Any:
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))


def _upload(session: Any, values: list[Any], layout: Any) -> list[Any]:
    from shardwright.client.array_specs import spec_of
    from shardwright.client.arrays import RemoteArray

    result = session._state.arrays.upload([(value, layout) for value in values])
    return [
        RemoteArray(session._state.arrays, spec_of(value), ids=ids, place=layout)
        for value, ids in zip(values, result, strict=True)
    ]


def _time_call(function: Callable[..., Any], *arguments: Any) -> float:
    start_s = time.perf_counter()
    result = function(*arguments)
    elapsed_s = time.perf_counter() - start_s
    del result
    return elapsed_s


# ---- the bare stream ---------------------------------------------------------


@contextmanager
def _start_bare_server(size_bytes: int) -> Iterator[Callable[[Any, int], None]]:
    """Start a bare gRPC server; yields a function to send it an array in chunks of a given size."""
    import grpc

    from shardwright.protocol import wire

    command = [sys.executable, __file__, _SERVE, str(size_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        channel = grpc.insecure_channel(f"127.0.0.1:{int(server.stdout.readline())}", options=wire.CHANNEL_OPTIONS)
        put = channel.stream_unary("/bare/Put")

        def send(value: Any, chunk_bytes: int) -> None:
            received = put(wire.chunks(value.reshape(-1).data, chunk_bytes))
            assert int(received) == value.nbytes

        yield send
        channel.close()
        server.stdin.close()


def _serve_bare(size_bytes: int) -> None:
    import grpc

    from shardwright.protocol import wire

    memory = bytearray(size_bytes)

    def put(chunks: Iterator[bytes], context: Any) -> bytes:
        del context
        at = 0
        for chunk in chunks:
            memory[at : at + len(chunk)] = chunk
            at += len(chunk)
        return str(at).encode()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=wire.CHANNEL_OPTIONS)
    handlers = {"Put": grpc.stream_unary_rpc_method_handler(put)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    sys.exit(main())
