"""The planner's time of an update follows what the optimizer does."""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.stack_profiles import profiles
from tests.unit.planner_cases import flavor
from titan_like.config.entry_points import RULES
from titan_like.config.schema import Optimizer
from titan_like.optim.optimizer import Gradients, build_optimizer, update
from titan_like.optim.update_work import ADAMW_WORK, Exchange, UpdateWork, _update_work, update_work
from titan_like.planner.cost import gemm_time
from titan_like.planner.memory import rank_moments
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.program import Gemm
from titan_like.planner.update_time import update_time
from titan_like.planner.workload import Workload

SELENE = profiles()["selene_2021"]


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
    optimizer, gradients = build_optimizer([("layers.0.weight", weight)], section), Gradients([weight])
    for counted in (nullcontext(), mode):
        weight.grad = torch.randn_like(weight)
        with counted:
            update(optimizer, gradients, section.lr, torch.ones((), dtype=torch.float64), torch.tensor(False))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sgd"},
        {"name": "sgd", "weight_decay": 0.0},
        {"name": "muon", "newton_schulz_dtype": "float32"},
        {"name": "muon", "newton_schulz_dtype": "bfloat16"},
        {"name": "adafactor"},
        {"name": "adafactor", "beta1": 0.9},
        {"name": "adafactor", "scale_parameter": True},
        {"name": "adafactor", "beta1": 0.9, "scale_parameter": True},
        {"name": "adamw", "implementation": "foreach"},
    ],
)
def test_bytes_that_an_update_reads_and_writes(settings: dict[str, Any]) -> None:
    section, counted = Optimizer(**settings), MatrixTraffic(48 * 96)
    work = update_work(section)
    take_step(section, 48, 96, counted)
    assert counted.nbytes == (work.traffic + work.matrix_traffic) * 48 * 96


def test_fused_adamw_is_counted_as_its_constant_says() -> None:
    assert _update_work(Optimizer().model_dump_json()) == ADAMW_WORK


class Lion(torch.optim.Optimizer):
    """A rule of a user's: with decay 8, two means of gradient and momentum 12 + 12, a sign 8 and its subtraction 12."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].get("momentum")
                if momentum is None:
                    momentum = self.state[weight]["momentum"] = torch.zeros_like(weight)
                direction = momentum.lerp(weight.grad, 0.1).sign()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 0.01)


def lion(groups: Any, section: Optimizer) -> Lion:
    return Lion(groups, {"lr": section.lr})


def whitened(groups: Any, section: Optimizer) -> torch.optim.Optimizer:
    class Whitened(torch.optim.SGD):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for weight in self.param_groups[0]["params"]:
                weight.sub_(weight.grad @ (weight.grad.mT @ weight.grad))

    return Whitened(groups, section.lr)


def test_an_optimizer_of_another_package_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lion", "whitened"):
        monkeypatch.setitem(RULES, name, f"{__name__}:{name}")
    work = update_work(Optimizer(name="lion"))
    # The gradients' clipping first. A direction and its factors exist at once, and the direction of the matrix before.
    assert work == UpdateWork(8 + 12 + 8 + 8 + 12 + 12, widens=True, workspace=12, matrix_workspace=12)
    work = update_work(Optimizer(name="whitened"))
    assert work.gemms(30, 70) == {(70, 70, 30): 1, (30, 70, 70): 1}
    assert (work.traffic, work.gemm_dtype) == (8 + 12, "float32")


def test_an_optimizer_states_its_own_exchange_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(all_to_alls=3, workspace=lambda work, parts, ranks: 10**6 * sum(p.elements for p in parts))

    def exchanging(groups: Any, section: Optimizer) -> torch.optim.Optimizer:
        optimizer = whitened(groups, section)
        type(optimizer).exchange = exchange
        return optimizer

    monkeypatch.setitem(RULES, "exchanging", f"{__name__}:exchanging")
    monkeypatch.setattr(sys.modules[__name__], "exchanging", exchanging, raising=False)
    model = flavor("gpt", "debug")
    work = Workload(model, 256, 1, 8, shard=8, zero_stage=3, update=update_work(Optimizer(name="exchanging")))
    alone = work._replace(update=work.update._replace(exchange=None))
    times = [update_time(of, SELENE, {}) for of in (work, alone)]
    elements = sum(p.elements for p in trace(TraceKey.of(work)).layers[0].parameters if len(p.shape) == 2)
    sends = 3 * SELENE.links.all_gather(4 * elements * model.num_layers / 8, 8, 1)
    assert times[0] - times[1] == pytest.approx(sends)
    of_update = rank_moments(work, 0)[1].total - rank_moments(alone, 0)[1].total
    assert of_update == pytest.approx(10**6 * elements * model.num_layers / 8, rel=1e-3)


@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (96, 48), (64, 64)])
def test_flops_of_muon(rows: int, columns: int) -> None:
    counter, section = FlopCounterMode(display=False), Optimizer(name="muon")
    take_step(section, rows, columns, counter)
    gemms = update_work(section).gemms(rows, columns)
    assert counter.get_total_flops() == sum(calls * 2 * m * n * k for (m, n, k), calls in gemms.items())


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
    muon = update_work(Optimizer(name="muon"))

    def computed(shape: torch.Size) -> float:
        return sum(
            calls * gemm_time(Gemm(*s, 1, False, 16), "bfloat16", SELENE) for s, calls in muon.gemms(*shape).items()
        )

    computes = model.num_layers / 32 * sum(map(computed, layer))
    sends = 2 * SELENE.links.all_gather(2 * elements, 32, 1)
    expected = found["adamw"] + 42 * elements / SELENE.memory_rate + computes + sends
    assert found["muon"] == pytest.approx(expected, rel=1e-12)
    # With more processes than matrices, one of them still works on a whole matrix. Processes with equal copies share
    # nothing.
    assert update_time(times["muon"]._replace(shard=4096), SELENE, {}) > max(map(computed, layer))
    copies = times["muon"]._replace(zero_stage=0, tensor=1)
    assert update_time(copies, SELENE, {}) > 32 * computes


def test_muon_is_priced_on_a_device_without_bfloat16() -> None:
    profile = builtin_profiles()["dgx2_v100"]
    work = Workload(flavor("gpt", "1.7b"), 2048, 1, 64, shard=8, zero_stage=1, dtype="float16")
    sections = [Optimizer(name="muon", newton_schulz_dtype=dtype) for dtype in (None, "float32")]
    elements = {"dp_shard": 10**9}
    times = [update_time(work._replace(update=update_work(section)), profile, elements) for section in sections]
    assert times[0] == pytest.approx(times[1], rel=1e-3)  # gradients are cast, which takes other bytes
