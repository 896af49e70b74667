"""The planner's time of an update follows what the optimizer does."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.planner_cases import flavor
from titan_like.config.schema import Optimizer
from titan_like.optim.optimizer import build_optimizer
from titan_like.optim.state_size import UpdateWork, update_work
from titan_like.planner.cost import gemm_time
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.update_time import update_time
from titan_like.planner.workload import Workload

SELENE = builtin_profiles()["selene_2021"]


class MatrixTraffic(TorchDispatchMode):
    """Bytes of tensors as large as a matrix that operators read and write, except products and views."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.nbytes = elements, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        schema = function._schema
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
        if is_view or schema.name in ("aten::mm", "aten::addmm", "aten::new_zeros"):
            return found
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
        touched = [value for name, value in given.items() if name != "out"]  # read
        touched += [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        touched += [] if any(value.alias_info is not None for value in schema.returns) else [found]
        tensors = (leaf for leaf in tree_leaves(touched) if isinstance(leaf, torch.Tensor))
        matrices = (tensor for tensor in tensors if tensor.numel() == self.elements)
        self.nbytes += sum(matrix.numel() * matrix.element_size() for matrix in matrices)
        return found


def take_step(section: Optimizer, rows: int, columns: int, mode: Any) -> None:
    """The second update of a matrix inside a layer."""
    weight = torch.nn.Parameter(torch.randn(rows, columns))
    optimizer: Any = build_optimizer([("layers.0.weight", weight)], section)
    for update in range(2):
        weight.grad = torch.randn_like(weight)
        if optimizer.defaults["fused"]:
            optimizer.found_inf, optimizer.factor = torch.zeros(()), torch.ones((), dtype=torch.float64)
        if update == 0:
            optimizer.step()
        else:
            with mode:
                optimizer.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd", "implementation": "foreach"},
        {"name": "muon"},
        {"name": "adafactor"},
        {"name": "adafactor", "beta1": 0.9},
        {"name": "adafactor", "scale_parameter": True},
        {"name": "adafactor", "beta1": 0.9, "scale_parameter": True},
    ],
)
def test_bytes_that_an_update_reads_and_writes(settings: dict[str, Any]) -> None:
    section, counted = Optimizer(**settings), MatrixTraffic(48 * 96)
    work = update_work(section)
    take_step(section, 48, 96, counted)
    assert counted.nbytes == (work.traffic + work.matrix_traffic) * 48 * 96


@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (96, 48), (64, 64)])
def test_flops_of_muon(rows: int, columns: int) -> None:
    counter = FlopCounterMode(display=False)
    take_step(Optimizer(name="muon"), rows, columns, counter)
    expected = 5 * sum(2 * m * n * k for m, n, k in UpdateWork.products(rows, columns))
    assert counter.get_total_flops() == expected


def test_an_update_takes_the_time_of_what_it_does() -> None:
    model = flavor("gpt", "18b")
    work = Workload(model, 2048, 1, 64, tensor=8, shard=4, zero_stage=3, dtype="bfloat16")
    whole = trace(TraceKey.of(work._replace(tensor=1))).layers[0]
    layer = [parameter.shape for parameter in whole.parameters if len(parameter.shape) == 2]
    elements = model.num_layers * sum(rows * columns for rows, columns in layer) / 32  # on each of the processes
    times = {name: work._replace(update=update_work(Optimizer(name=name))) for name in ("adamw", "adafactor", "muon")}
    found = {name: step_time(of, SELENE).optimizer for name, of in times.items()}
    parameters = model.num_parameters() / 32
    assert found["adamw"] == pytest.approx(parameters * SELENE.optimizer_traffic / SELENE.memory_rate, rel=1e-2)
    more = (68 - 28) / SELENE.optimizer_traffic
    assert found["adafactor"] == pytest.approx(found["adamw"] * (1 + more), rel=1e-12)
    products = [sizes for shape in layer for sizes in UpdateWork.products(*shape)]
    computes = 5 * model.num_layers / 32 * sum(gemm_time(*sizes, 1, "bfloat16", SELENE) for sizes in products)
    sends = 2 * SELENE.links.all_gather(2 * elements, 32, 1)
    expected = found["adamw"] + 44 * elements / SELENE.memory_rate + computes + sends
    assert found["muon"] == pytest.approx(expected, rel=1e-12)
    # With more processes than matrices, one of them still works on a whole matrix. Processes with equal copies share
    # nothing.
    most = max(5 * sum(gemm_time(*s, 1, "bfloat16", SELENE) for s in UpdateWork.products(*shape)) for shape in layer)
    assert update_time(times["muon"]._replace(shard=4096), SELENE, {}) > most
    copies = times["muon"]._replace(zero_stage=0, tensor=1)
    assert update_time(copies, SELENE, {}) > 32 * computes


def test_muon_is_priced_on_a_device_without_bfloat16() -> None:
    profile = builtin_profiles()["dgx2_v100"]
    work = Workload(flavor("gpt", "1.7b"), 2048, 1, 64, shard=8, zero_stage=1, dtype="float16")
    sections = [Optimizer(name="muon", newton_schulz_dtype=dtype) for dtype in (None, "float32")]
    elements = {"dp_shard": 10**9}
    times = [update_time(work._replace(update=update_work(section)), profile, elements) for section in sections]
    assert times[0] == times[1] > 0
