"""What waits for a later pass: offloaded activations, and the factors of deferred products."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_like.config.load import load_config
from titan_like.models.batch import Batch
from titan_like.models.registry import build_model, model_config
from titan_like.parallel import offload
from titan_like.parallel.layout import Layout
from titan_like.parallel.tuning import Tuning
from titan_like.parallel.weight_gradients import defer_weight_gradients
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import workload_of

RUN = ["--model.family=llama", "--model.flavor=debug", "--training.steps=1", "--training.micro_batch_size=2"]


def test_buffers_are_reused_and_each_layer_is_fetched_as_the_one_above_begins(monkeypatch) -> None:
    model = build_model(model_config(load_config(RUN).model), "llama")
    model.init_weights(0)
    plain = build_model(model_config(load_config(RUN).model), "llama")
    plain.load_state_dict(model.state_dict())
    offload.offload_activations(model, torch.device("cpu"), Tuning(offload_bytes=1))
    host = model.layers["0"].offload_host
    buffers, fetched = [], []
    load, fetch = host.load, offload.LayerTensors.fetch
    monkeypatch.setattr(host, "load", lambda buffer, flat: (buffers.append(buffer.data_ptr()), load(buffer, flat)))
    monkeypatch.setattr(offload.LayerTensors, "fetch", lambda self: (fetched.append(self), fetch(self))[1])
    tokens, weights = torch.arange(64).view(2, 32), {one.data_ptr() for one in model.parameters()}
    for _ in range(2):  # microbatches
        model(Batch(tokens))[..., :200].square().sum().backward()
        plain(Batch(tokens))[..., :200].square().sum().backward()
    first, second = buffers[: len(buffers) // 2], buffers[len(buffers) // 2 :]
    assert len(first) == len(set(first)) and set(first) == set(second)
    held = {one.data_ptr() for free in host._free.values() for one in free}
    assert held == set(first) and not held & weights
    layers = list(dict.fromkeys(fetched))
    assert len(layers) == 2 * len(model.layers) and all(layer.saved == {} for layer in layers)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_traced_layers_keep_nothing_large_and_move_all_of_it(tmp_path: Path) -> None:
    config = load_config([*RUN, "--training.seq_len=4096"])
    key = TraceKey.of(workload_of(config, model_config(config.model), Layout()))
    plain, moved = (trace(key._replace(offload=offloads), tmp_path).layers[0] for offloads in (False, True))
    gone = plain.kept - moved.kept
    assert moved.kept < plain.kept / 4
    assert moved.offloaded == gone and moved.backward.flops == plain.backward.flops


def test_waiting_products_keep_their_factors_alone() -> None:
    """With the graph of its input, a product would keep what the stage received, and the gradient of that."""
    model: Any = nn.Linear(8, 8)
    received = torch.randn(4, 8, requires_grad=True)
    deferred, freed = defer_weight_gradients(model), weakref.ref(received)
    model(received.sin()).sum().backward()
    del received
    (product,) = deferred.take()
    assert freed() is None and product.compute().shape == (8, 8)
