"""Where files store parameters: rows in other orders, several parameters in one tensor, quantised weights."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from titan_like.hugging_face.folder import read_header, slice_reader
from titan_like.hugging_face.quantized import check_quantization, with_scales
from titan_like.models.hugging_face import Fields, RefusedError, Stored, fill_part, to_tensors

LAYOUTS = {
    "gate and up below each other": [
        Stored("gate", (6, 5), {"gate_up": (12, 5)}, taken=(6,)),
        Stored("up", (6, 5), {"gate_up": (12, 5)}, taken=(6, None)),
    ],
    "gate and up in turn, in stacked and transposed matrices": [
        Stored("gate", (12, 5), {"gate_up": (3, 5, 8)}, is_transposed=True, matrix_dims=1, taken=(0, None, 2)),
        Stored("up", (12, 5), {"gate_up": (3, 5, 8)}, is_transposed=True, matrix_dims=1, taken=(1, None, 2)),
    ],
    "their biases": [
        Stored("gate", (12,), {"bias": (3, 8)}, matrix_dims=1, taken=(0, None, 2)),
        Stored("up", (12,), {"bias": (3, 8)}, matrix_dims=1, taken=(1, None, 2)),
    ],
    "stacked": [Stored("down", (12, 5), {"down": (3, 5, 4)}, is_transposed=True, matrix_dims=1)],
    "stacked twice": [Stored("rates", (12,), {"rates": (1, 3, 4, 1)}, matrix_dims=2)],
    "a tensor each": [Stored("down", (12, 5), {f"down {i}": (4, 5) for i in range(3)})],
    "rotated pairs, padded": [
        Stored("qkv", (36, 5), {"q": (16, 5), "k": (8, 5), "v": (8, 5)}, (16, 8, 8), 2, pairs=(4, 1, 2)),
    ],
    "queries, keys and values in one": [Stored("qkv", (32,), {"qkv": (32,)}, (16, 8, 8), 2, pairs=(4, 0, 4))],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_goes_out_and_comes_back_in_any_shards(name):
    layout = LAYOUTS[name]
    ours = {stored.name: torch.randn(stored.shape) for stored in layout}
    files = dict(to_tensors(layout, ours.__getitem__))
    assert {key: tuple(tensor.shape) for key, tensor in files.items()} == layout[0].sources
    rows = sum(layout[0].rows)
    for stored in layout:
        assert len(stored.order().unique()) == len(stored.order()) == rows // len(layout)
        for first, last in ((0, stored.shape[0]), (1, 7), (5, 11), (stored.shape[0] - 1, stored.shape[0])):
            for columns in ((0, 5), (2, 4)) if len(stored.shape) > 1 else ((),):
                part = ours[stored.name][first:last]
                part = part[:, slice(*columns)] if columns else part
                found = torch.full_like(part, 7.0)
                fill_part(found, (first, *columns[:1]), stored, lambda key, index: files[key][index])
                expected = part.clone()
                expected[max(0, rows // len(layout) - first) :] = 0
                assert torch.equal(found, expected)


def opened(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object]):
    save_file(tensors, folder / "model.safetensors")
    block = check_quantization(Fields({"quantization_config": quantization}))
    headers = {tensor.name: tensor for tensor in read_header(folder / "model.safetensors")}
    return with_scales(headers, block)


def in_parts(read, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """All of a tensor, read in pieces that begin and end inside of blocks."""
    *ends, last = ([*range(0, size, 37), size] for size in shape)
    rows = [
        torch.cat([read(name, (*one, slice(a, b))) for a, b in pairwise(last)], -1)
        for one in ([slice(a, b)] for a, b in pairwise(ends[-1]))
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("shape", [(256, 384), (576, 200)])  # the second does not divide into blocks
def test_float8_blocks_are_what_transformers_makes_of_them(tmp_path, shape):
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.1
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "b.weight": torch.ones(2, 2)}
    found = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert found.keys() == {"a.weight", "b.weight"} and found["a.weight"].dtype == "BF16"
    read = in_parts(slice_reader(found), "a.weight", shape)
    padded = torch.zeros(scales.shape[0] * 128, scales.shape[1] * 128).to(torch.float8_e4m3fn)
    padded[: shape[0], : shape[1]] = weight
    theirs = Fp8Dequantize(None)._dequantize_one(padded, scales, torch.float32)
    assert torch.equal(read, theirs[: shape[0], : shape[1]])


@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_float8_with_one_scale(tmp_path, scale_shape):
    weight, scale = torch.randn(50, 40).to(torch.float8_e4m3fn), torch.full(scale_shape, 0.37)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "a.activation_scale": torch.ones(())}
    found = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": None})
    assert found.keys() == {"a.weight"}
    assert torch.equal(in_parts(slice_reader(found), "a.weight", (50, 40)), weight.float() * 0.37)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    experts, rows, groups = 3, 40, 5
    blocks = torch.randint(256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (experts, rows, groups), dtype=torch.uint8)
    found = opened(tmp_path, {"up_blocks": blocks, "up_scales": scales}, {"quant_method": "mxfp4"})
    assert found["up"].shape == (experts, groups * 32, rows) and found.keys() == {"up"}
    theirs, read = convert_moe_packed_tensors(blocks, scales), slice_reader(found)
    assert torch.equal(read("up", (slice(0, 3), slice(0, 160), slice(0, 40))).bfloat16(), theirs)
    part = (slice(1, 2), slice(37, 101), slice(7, 9))
    assert torch.equal(read("up", part).bfloat16(), theirs[part])


def test_unknown_quantisation_is_refused(tmp_path):
    for table, word in (({"quant_method": "gptq"}, "quant_method"), ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt")):
        with pytest.raises(RefusedError, match=f"quantization_config.{word} = "):
            check_quantization(Fields({"quantization_config": table}))
    tensors = {"a.weight": torch.zeros(256, 256).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 3)}
    with pytest.raises(RefusedError, match=r"weight_scale_inv has the shape \[2, 3\].*needs \[2, 2\]"):
        opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
