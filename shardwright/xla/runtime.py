"""A planned program on this process' devices: load, compare with the plan, run.

Used by the executor that owns the devices. In a job of several processes each
process loads the same module and runs it on global arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwright.dtypes import to_dtype
from shardwright.errors import CompilationError, ExecutionError
from shardwright.plans.plan import OptionValue, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private
from shardwright.xla.compiled import beginning_of, is_out_of_memory, refusal, remedy_of
from shardwright.xla.jax_shardings import jax_mesh, mesh_devices, require_shardings, to_named_sharding

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryArray:
    """Sharding of one argument or output on the devices, compared and used by `load_program`.

    stored_shape: dimensions in storage, padded to multiples of the axes. is_on_host: whether the program has it in the
    memory of the devices' hosts.
    """

    element_type: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    sharding: TensorSharding
    is_on_host: bool = False

    @classmethod
    def of(cls, variable: VariablePlan) -> BoundaryArray:
        return cls(
            element_type=variable.element_type,
            shape=variable.shape,
            stored_shape=variable.stored_shape,
            sharding=variable.stored_sharding,
            is_on_host=variable.is_on_host,
        )


class LoadedProgram:
    """An executable on this process' devices.

    `argument_shardings`, `output_shardings`: `NamedSharding`s, built once; arrays passed
    to `run` must have them (and the stored shapes), arrays that come out do.
    """

    def __init__(
        self,
        executable: Any,
        mesh: jax.sharding.Mesh,
        arguments: Sequence[BoundaryArray],
        outputs: Sequence[BoundaryArray],
    ) -> None:
        self._executable = executable
        self.argument_shardings, self.output_shardings = (
            tuple(to_named_sharding(mesh, each.sharding, is_on_host=each.is_on_host) for each in arrays)
            for arrays in (arguments, outputs)
        )
        self._expected = [
            (sharding, argument.stored_shape, to_dtype(argument.element_type))
            for argument, sharding in zip(arguments, self.argument_shardings, strict=True)
        ]
        self._handlers = [
            private.result_handler(output.stored_shape, to_dtype(output.element_type), sharding)
            for output, sharding in zip(outputs, self.output_shardings, strict=True)
        ]

    def run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Start the program on global arrays in argument order; returns its outputs at once.

        Donated arguments are consumed: their buffers become outputs. The call returns
        before the devices are done. Raises ExecutionError on arrays of another type (XLA would end the process), or
        with XLA's message.
        """
        if len(arrays) != len(self._expected):
            raise ExecutionError(f"the program takes {len(self._expected)} arguments, {len(arrays)} were given")
        moved: dict[int, jax.Array] = {}
        for number, (array, (sharding, shape, dtype)) in enumerate(zip(arrays, self._expected, strict=True)):
            if array.shape != shape or array.dtype != dtype or array.sharding != sharding:
                moved[number] = self._bring(number, array)
        if moved:
            arrays = [moved.get(number, array) for number, array in enumerate(arrays)]
        try:
            return private.execute(self._executable, arrays, self._handlers)
        except Exception as error:
            gone = [number for number, array in enumerate(arrays) if array.is_deleted()]
            if gone and not is_out_of_memory(error):  # else they are gone since it failed
                raise ExecutionError("the array was deleted or donated before", where=f"argument {gone[0]}") from None
            said = f"XLA could not start the program: {beginning_of(error)}"
            raise ExecutionError(said, remedy=remedy_of(error)) from error

    def _bring(self, number: int, array: jax.Array) -> jax.Array:
        """An argument that lies as it should in the other memory of its devices, in the right one; other spellings of
        its sharding pass. Raises on an argument of another type."""
        import jax

        sharding, shape, dtype = self._expected[number]
        if array.shape == shape and array.dtype == dtype:
            if array.sharding.is_equivalent_to(sharding, len(shape)):
                return array
            kind = array.sharding.memory_kind
            there = sharding if kind is None else sharding.with_memory_kind(kind)
            if kind != sharding.memory_kind and array.sharding.is_equivalent_to(there, len(shape)):
                brought: jax.Array = jax.device_put(array, sharding)
                return brought
        raise ExecutionError(
            f"the program takes {dtype}{list(shape)} as {sharding.spec}, "
            f"not {array.dtype}{list(array.shape)} as {array.sharding}",
            where=f"argument {number}",
        )

    def hlo_text(self) -> str:
        """The HLO text of each device."""
        return private.hlo_of_executable(self._executable)


def load_program(
    payload: bytes,
    *,
    is_serialized: bool,
    mesh: Mesh,
    arguments: Sequence[BoundaryArray],
    outputs: Sequence[BoundaryArray],
    devices: Sequence[Any] | None = None,
    donated: Sequence[int] = (),
    compile_options: Mapping[str, OptionValue] = MappingProxyType({}),
) -> LoadedProgram:
    """Load a compiled program, or compile its StableHLO text, onto `devices` in mesh order.

    payload: `CompiledProgram.serialized`, or its StableHLO text in UTF-8.
    devices: default all devices of the job, by process, then id.
    donated: argument numbers whose buffers the program must reuse.
    compile_options: of XLA, by name.

    The loaded program is compared with `arguments`, `outputs` and `donated` every time. Raises CompilationError if it
    differs or XLA refuses it, PlanError if there are too few devices.
    """
    devices = list(mesh_devices() if devices is None else devices)[: mesh.device_count]
    grid = jax_mesh(mesh, devices)
    ids = [device.id for device in devices]
    options = private.compile_options(ids, platform=devices[0].platform, overrides=[*compile_options.items()])
    try:
        if is_serialized:
            executable = private.deserialize_executable(payload, devices, options)
        else:
            executable = private.compile_and_load(payload.decode(), devices, options)
    except Exception as error:
        raise refusal(error, compile_options) from error
    require_shardings("argument", private.parameter_shardings(executable), [a.sharding for a in arguments], mesh)
    require_shardings("output", private.output_shardings(executable), [o.sharding for o in outputs], mesh)
    text = private.hlo_of_executable(executable)
    private.prepare_custom_calls(text)
    _require_donations(text, donated)
    return LoadedProgram(executable, grid, arguments, outputs)


def _require_donations(compiled_text: str, donated: Sequence[int]) -> None:
    missing = sorted(set(donated) - private.find_aliased_parameters(compiled_text))
    if missing:
        raise CompilationError(
            f"the program does not reuse the buffers of its donated arguments {missing}",
            where=f"argument {missing[0]}",
            remedy="an output must have the shape, type and sharding of the argument it replaces",
        )
