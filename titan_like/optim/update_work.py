"""The work of an optimizer's update, counted while it updates one large matrix."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.torch_private import TorchDispatchMode, schema_of, tree_leaves

_GEMMS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
# Sides of the counted matrix. It has more elements than a block of AdamW, whose scratch stays in caches. Rules with
# a square matrix for each side, as Shampoo, update it within seconds.
_SHORT, _LONG = 1 << 9, 1 << 10

Gemm = tuple[int, int, int]  # (m, n, k) of [m, k] · [k, n]


class MatrixParts(NamedTuple):
    """One process's parts of the matrices that are stacked in a parameter."""

    shape: tuple[int, int]  # of each whole matrix
    matrices: int  # of which the process has a part
    elements: int  # of these parts together


class Exchange(NamedTuple):
    """How an optimizer gathers sharded matrices on one of their ranks each: the ``exchange`` of its class."""

    all_to_alls: int  # in an update; each moves every rank's parts
    # Most bytes at once beside weights, gradients and state, on the first of the ranks that split a set of matrices.
    workspace: Callable[[UpdateWork, Sequence[MatrixParts], int], float]  # from the parts, and the number of ranks


class UpdateWork(NamedTuple):
    """The work of an update. Bytes are per element, read and written, in float32."""

    traffic: float = 28  # fused AdamW reads weight, gradient and moments, and writes all but the gradient
    matrix_traffic: float = 0  # in addition, for matrices inside layers
    matrix_gemms: tuple[tuple[Gemm, int], ...] = ()  # GEMM → calls, for a matrix [_SHORT, _LONG] inside layers
    gemm_dtype: str = "float32"
    widens: bool = False  # whether gradients in a 16-bit dtype are converted first
    held: float = 0  # bytes at once beside weight, gradient and state, per element of all parameters together
    workspace: float = 0  # most bytes in addition, per element of one matrix
    matrix_workspace: float = 0  # the same for matrices inside layers, whose
    square_workspace: float = 0  # tensors of the shorter side, squared, come in addition
    exchange: Exchange | None = None  # None: each rank works on its parts of matrices

    def workspace_of_matrix(self, rows: int, columns: int) -> float:
        """Bytes at once beside weight, gradient and state, in an update of a matrix inside layers."""
        return self.matrix_workspace * rows * columns + self.square_workspace * min(rows, columns) ** 2

    def gemms(self, rows: int, columns: int) -> Counter[Gemm]:
        """The number of calls of each GEMM in an update of a matrix inside layers."""
        sides, gemms = {_SHORT: min(rows, columns), _LONG: max(rows, columns)}, Counter[Gemm]()
        for (m, n, k), calls in self.matrix_gemms:
            gemms[sides.get(m, m), sides.get(n, n), sides.get(k, k)] += calls
        return gemms


ADAMW_WORK = UpdateWork()


def update_work(section: OptimizerSection) -> UpdateWork:
    """The work of an update by the run's optimizer, whether built in or of another package.

    Bytes count operands as large as the parameter, in float32, GEMMs' apart. Decompositions of matrices count
    as if they only read and wrote them. Fused AdamW's work is known: counting it would import torch's compiler. Raises
    a `ConfigError` as `build_optimizer`.
    """
    if section.name == "adamw" and section.implementation == "fused":
        return ADAMW_WORK
    on_gpus = section.model_copy(update={"newton_schulz_dtype": section.newton_schulz_dtype or "bfloat16"})
    return _update_work(on_gpus.model_dump_json())


@lru_cache(maxsize=64)
def _update_work(section: str) -> UpdateWork:
    rule, shape = OptimizerSection.model_validate_json(section), (_SHORT, _LONG)
    optimizer, _, layer = updated("layers.0", shape, rule)
    tables = [updated("table", shape, rule, number=number)[2] for number in (1, 2, 3)]
    traffic, matrix_traffic = (counted.nbytes / (_SHORT * _LONG) for counted in (tables[0], layer))
    single, double, triple, of_layer = (counted.peak[0] / (_SHORT * _LONG) for counted in (*tables, layer))
    held = triple - double
    left = double - single - held  # by one parameter while the next is updated
    widens, squares = not getattr(optimizer, "takes_factor", False), layer.peak[1] / _SHORT**2
    work = traffic, matrix_traffic - traffic, tuple(layer.gemms.items()), layer.gemm_dtype
    workspaces = single - held + left, of_layer - held + left, squares
    return UpdateWork(*work, widens, held, *workspaces, getattr(optimizer, "exchange", None))


def updated(
    name: str, shape: tuple[int, ...], section: OptimizerSection, matrices: int = 1, number: int = 1
) -> tuple[torch.optim.Optimizer, torch.nn.Parameter, UpdateCounter]:
    """An optimizer that has updated a ``number`` of equal parameters twice, and what the second update took.

    Each of them is a stack of ``matrices``. The first one is returned too.
    """
    from titan_like.optim.optimizer import Gradients, build_optimizer, update  # imports DTensor, for 0.5 s

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(number)]
    for parameter in parameters:
        parameter.num_matrices = matrices  # type: ignore[attr-defined]
    optimizer, gradients = build_optimizer([(name, p) for p in parameters], section), Gradients(parameters)
    clip, skip = torch.ones((), dtype=torch.float64), torch.tensor(False)
    for _ in range(2):  # the first update creates the state
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with UpdateCounter() as counter:
            update(optimizer, gradients, section.lr, clip, skip)
    return optimizer, parameters[0], counter


class UpdateCounter(TorchDispatchMode):
    """Counts bytes that operators read and write, of tensors as large as the matrix, and GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        # Bytes that operators have allocated: tensors as large as the matrix, and as a square of its shorter side.
        self.held = self.peak = (0, 0)
        self.gemms = Counter[Gemm]()
        self.gemm_dtype = "float32"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, schema = func(*args, **(kwargs or {})), schema_of(func)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in _tensors([args, kwargs])}
        created = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in inputs]
        self._hold(created)
        if schema.name in _GEMMS:
            a, b = [value for value in args if isinstance(value, torch.Tensor)][-2:]
            self.gemms[a.shape[-2], b.shape[-1], a.shape[-1]] += len(a) if a.ndim == 3 else 1
            self.gemm_dtype = str(a.dtype).removeprefix("torch.")
            return result
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
        if "empty" in schema.name or not (created or schema.is_mutable):  # a view
            return result
        self._add(created)
        is_factory = "::new_" in schema.name or schema.name.endswith("_like")  # it reads no element
        for argument in schema.arguments if not is_factory else ():
            # Schemas of fused kernels let them write gradients, which they do only to unscale them.
            writes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
            reads = argument.name != "out" and not (writes and schema.name.endswith("copy_"))
            self._add(_tensors(given.get(argument.name)) * (reads + writes))
        return result

    def _add(self, tensors: list[torch.Tensor]) -> None:
        self.nbytes += sum(tensor.nbytes for tensor in _large(tensors))

    def _hold(self, created: list[torch.Tensor]) -> None:
        large = {tensor.untyped_storage() for tensor in _large(created)}
        for storage in {tensor.untyped_storage() for tensor in _large(created, _SHORT**2)}:
            size = (storage.nbytes(), 0) if storage in large else (0, storage.nbytes())
            self._add_held(*size)
            self.peak = max(self.peak, self.held, key=sum)
            weakref.finalize(storage, self._add_held, -size[0], -size[1])

    def _add_held(self, of_matrices: int, of_squares: int) -> None:
        self.held = self.held[0] + of_matrices, self.held[1] + of_squares


def _large(tensors: list[torch.Tensor], elements: int = _SHORT * _LONG) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if len(tensor.untyped_storage()) >= elements * tensor.itemsize]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
