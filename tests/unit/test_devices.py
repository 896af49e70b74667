"""The one table of GPUs: which product a name means, and its figures."""

import pytest

from titan_like.config import ConfigError
from titan_like.metrics.devices import builtin_devices, find_device, known_device
from titan_like.metrics.hardware import peak_tflops

# What torch.cuda.get_device_name() returns, or what a user writes as cluster.gpu.
NAMES = {
    "V100": "V100-32GB", "Tesla V100-SXM2-16GB": "V100-16GB", "Tesla V100-PCIE-32GB": "V100-PCIe", "A100": "A100-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA A100-SXM4-80GB": "A100-80GB", "rtx 4090": "RTX-4090",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe", "NVIDIA A800-SXM4-80GB": "A800-80GB", "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA GeForce RTX 3090 Ti": "RTX-3090-Ti", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000", "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX-PRO-6000-Max-Q", "h100": "H100-80GB",
    "H100-96GB-HBM2e-500W": "H100-96GB", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200 NVL": "H200-NVL", "NVIDIA GH200 480GB": "GH200", "NVIDIA GH200 144G HBM3e": "GH200-144GB",
    "NVIDIA B300 SXM6 AC": "B300", "AMD Instinct MI250X": "MI250X",
}  # fmt: skip
# Slices, notebooks, cut-down and unlisted products, names of several products, and what is no GPU.
UNKNOWN = [
    "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "GRID V100D-8Q", "NVIDIA A10-24Q",
    "NVIDIA L40S-48C", "NVIDIA A100-SXM-64GB", "NVIDIA A100X", "NVIDIA H100 64GB HBM2", "NVIDIA H20-3e",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA L4 with Max-Q Design",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 4080", "Quadro RTX 6000", "RTX 6000",
    "NVIDIA RTX 5000 Ada Generation", "NVIDIA RTX PRO 5000 Blackwell", "NVIDIA RTX A5000", "NVIDIA A16", "NVIDIA L20",
    "NVIDIA T400", "NVIDIA T4G", "Tesla V100S-PCIE-32GB", "Tesla V100-FHHL-16GB", "AMD Instinct MI250X / MI250",
    "AMD Instinct MI250X/MI250", "AMD Instinct MI308X", "AMD Radeon RX 7900 XTX", "NPU-9",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_product_of_a_name(name):
    assert find_device(name).name == NAMES[name]


def test_every_product_is_found_by_its_own_name():
    assert all(find_device(name) is device for name, device in builtin_devices().items())


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_product_rather_than_a_wrong_one(name):
    assert known_device(name) is None
    assert peak_tflops(name, "bfloat16") is None
    with pytest.raises(
        ConfigError, match=r"cluster\.gpu = .*no such GPU is known; .*known are V100-PCIe, .*, RTX-4090, "
    ):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "nearest", "is_partial"),
    [
        ("RTX 4080", "RTX-4090", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-4090", True),
        ("H1000", "H100", False),
    ],
)
def test_an_unknown_gpu_is_answered_with_the_nearest_and_the_ways_out(name, nearest, is_partial):
    with pytest.raises(ConfigError) as refusal:
        find_device(name)
    reason = str(refusal.value)
    assert f"the nearest are {nearest}" in reason
    assert "[device_table]" in reason and "microbenchmark" in reason
    assert ("slower than their namesakes" in reason) == is_partial


def test_peaks_are_dense_and_of_one_chip():
    """Twice the bits take twice the time; a peak with sparsity, or with sums in float16, would break the ratio."""
    for device in builtin_devices().values():
        peak = device.peak
        assert "bfloat16" not in peak or peak["bfloat16"] == peak["float16"]
        assert "float8" not in peak or peak["float8"] == pytest.approx(2 * peak["float16"], rel=0.015), device.name
        assert "tfloat32" not in peak or peak["tfloat32"] == pytest.approx(peak["float16"] / 2, rel=0.02), device.name
        assert peak["float32"] < peak["float16"]
    for turing_or_volta in ("T4", "V100-16GB", "V100-PCIe"):
        assert peak_tflops(turing_or_volta, "bfloat16") is None
    assert peak_tflops("A100", "float64") is None
