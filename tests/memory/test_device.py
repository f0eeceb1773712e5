"""Device profiles: complete, sourced, and chosen rightly for the card that torch names."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sweep.config.check import check
from sweep.config.device import (
    AllocatorOptions,
    allocator_capacity,
    cublas_workspace_mib,
    environment_alloc_conf,
    find_profile,
    load_profile,
    profile_names,
)
from sweep.config.schema import Config, DeviceConf, StrategyConf, WorkloadConf
from sweep.errors import BadInput
from sweep.memory.device import machine_has, resolve_device
from sweep.results import MIB

CARDS = [name for name in profile_names() if name not in ("auto", "cpu")]


def _fake_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: str, mib: float, sms: int = 100) -> None:
    major, minor = capability.split(".")
    card = SimpleNamespace(
        name=name, major=int(major), minor=int(minor), total_memory=int(mib * MIB), multi_processor_count=sms
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)


@pytest.mark.parametrize("name", CARDS)
def test_profile_is_complete_plausible_and_sourced(name: str) -> None:
    d = load_profile(name)
    assert (d.name, d.type) == (name, "cuda")
    assert d.capacity_mib is not None and d.context_mib is not None
    assert d.memory_bandwidth_gb_s is not None and d.link_bandwidth_gb_s is not None
    assert 10_000 < d.capacity_mib < 200_000 and 50 < d.context_mib < 1000
    assert d.memory_bandwidth_gb_s > 5 * d.link_bandwidth_gb_s
    assert d.torch_name and d.compute_capability and d.multiprocessors
    assert all(word in d.source for word in ("capacity", "context", "bandwidth", "link"))
    rates = d.peak_tflops
    assert rates["fp32"] > 0 and rates["fp16"] >= rates["fp32"]
    # bf16 and tf32 came with Ampere (8.0).
    assert ("bf16" in rates) == ("tf32" in rates) == (float(d.compute_capability) >= 8.0)
    workload = WorkloadConf(name="x", model={"_target_": "x"}, data={"_target_": "x"})
    check(Config(workload=workload, strategy=StrategyConf(name="x"), device=d))


@pytest.mark.parametrize(
    ("capability", "torch_version", "mib"),
    [
        ("8.9", "2.13.0", 8.125),
        ("9.0", "2.6.0+cu124", 32.0),
        ("10.0", "2.11.0", 8.125),
        ("10.3", "2.12.0", 32.0),
        ("11.0", "2.12.1+cu130", 32.0),
        ("12.0", "2.11.0+cu128", 8.125),
        ("12.1", "2.13.0", 32.0),
    ],
)
def test_cublas_workspace_by_architecture_and_torch(capability: str, torch_version: str, mib: float) -> None:
    card = DeviceConf("card", "cuda", compute_capability=capability)
    assert cublas_workspace_mib(card, torch_version) == mib


def test_cublas_workspace_is_what_the_config_or_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    card = load_profile("h200")
    for said, mib in ((":4096:8:16:8", (8 * 4096 + 8 * 16) / 1024), ("nonsense", 32.0)):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", said)
        assert resolve_device(card).cublas_workspace_mib == mib
        assert resolve_device(replace(card, cublas_workspace_mib=4.0)).cublas_workspace_mib == 4.0
    assert cublas_workspace_mib(load_profile("cpu")) == 0.0


def test_allocator_settings_come_from_the_environment_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    assert environment_alloc_conf() == ("expandable_segments:True", "garbage_collection_threshold:0.8")
    assert resolve_device(load_profile("l4")).alloc_conf == "expandable_segments:True"
    assert resolve_device(load_profile("cpu")).alloc_conf == ""
    given = replace(load_profile("l4"), alloc_conf="max_split_size_mb:128")
    assert resolve_device(given).alloc_conf == "max_split_size_mb:128"


def test_allocator_conf_is_read_in_torchs_syntax() -> None:
    parsed = AllocatorOptions.parse("expandable_segments:True, max_split_size_mb:128")
    assert parsed == AllocatorOptions(128 * MIB, True)
    assert AllocatorOptions.parse("") == AllocatorOptions()
    with pytest.raises(BadInput, match=r"x=backend:cudaMallocAsync: backend:cudaMallocAsync cannot be replayed"):
        AllocatorOptions.parse("backend:cudaMallocAsync", key="x")
    with pytest.raises(BadInput, match="max_split_size_mb is too small"):
        AllocatorOptions.parse("max_split_size_mb:20")


def test_allocator_gets_what_the_context_leaves() -> None:
    assert allocator_capacity(DeviceConf(name="x", capacity_mib=1000.0, context_mib=300.0)) == 700 * MIB
    assert allocator_capacity(DeviceConf(name="x")) is None


def test_auto_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    auto = load_profile("auto")
    assert machine_has(auto)
    auto.capacity_mib = 500.0
    device = resolve_device(auto)
    assert (device.type, device.name, device.capacity_mib) == ("cpu", "cpu", 500.0)
    assert resolve_device(load_profile("cpu")) == load_profile("cpu")
    with pytest.raises(BadInput, match="device.type=cuda: this machine has no CUDA device"):
        resolve_device(DeviceConf(name="auto", type="cuda"))


def test_auto_with_a_known_card_takes_its_profile_mocked_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpu(monkeypatch, "NVIDIA H100 80GB HBM3", "9.0", 81082.0)
    device = resolve_device(load_profile("auto"))
    profile = load_profile("h100_80gb")
    assert (device.type, device.name, device.compute_capability) == ("cuda", "h100_80gb", "9.0")
    assert device.capacity_mib == pytest.approx(81082.0)  # what torch says, not the profile's
    assert device.link_bandwidth_gb_s == profile.link_bandwidth_gb_s and device.peak_tflops == profile.peak_tflops
    assert device.cublas_workspace_mib == 32.0
    assert machine_has(device) and machine_has(profile)
    assert resolve_device(device) == device


def test_auto_with_an_unknown_card_says_what_torch_knows_mocked_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpu(monkeypatch, "NVIDIA RTX 6000 Ada Generation", "8.9", 45000.0, sms=142)
    device = resolve_device(load_profile("auto"))
    assert device.name == "NVIDIA RTX 6000 Ada Generation" and device.link_bandwidth_gb_s is None
    assert device.context_mib == round(3.6 * 142) and machine_has(device)
    assert not machine_has(load_profile("rtx_4090"))


def test_values_that_were_given_stay_mocked_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpu(monkeypatch, "NVIDIA GeForce RTX 4090", "8.9", 24209.0)
    device = resolve_device(DeviceConf(name="auto", capacity_mib=8000.0, link_bandwidth_gb_s=12.0))
    assert (device.capacity_mib, device.link_bandwidth_gb_s) == (8000.0, 12.0)
    assert device.memory_bandwidth_gb_s == 1008
    assert machine_has(device)


def test_index_beyond_the_devices_is_bad_input_mocked_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpu(monkeypatch, "NVIDIA L4", "8.9", 22558.0)
    with pytest.raises(BadInput, match="device.index=3"):
        resolve_device(DeviceConf(name="auto", index=3))


@pytest.mark.parametrize(
    ("torch_name", "capability", "mib", "profile"),
    [
        ("NVIDIA GeForce RTX 4090", "8.9", 24210, "rtx_4090"),
        ("NVIDIA GeForce RTX 4090", "8.9", 48500, "rtx_4090_48gb"),
        ("NVIDIA A100-SXM4-40GB", "8.0", 40338, "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "8.0", 81038, "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", "8.0", 81038, "a100_80gb"),
        ("Tesla T4", "7.5", 15095, "t4"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "12.0", 11760, "rtx_5070_ti_laptop"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "12.0", 24000, None),
        ("NVIDIA L40", "8.9", 45000, None),
    ],
)
def test_card_is_found_by_torchs_name_and_memory(
    torch_name: str, capability: str, mib: float, profile: str | None
) -> None:
    found = find_profile(torch_name, capability, mib)
    assert (found.name if found else None) == profile


def test_profiles_name_the_wrong_one() -> None:
    with pytest.raises(BadInput, match="device=rtx_9090: is no device profile; give one of a10, "):
        load_profile("rtx_9090")


def test_every_profile_is_found_by_itself() -> None:
    for name in CARDS:
        card = load_profile(name)
        assert card.torch_name is not None and card.compute_capability is not None and card.capacity_mib is not None
        found = find_profile(card.torch_name.replace("*", " "), card.compute_capability, card.capacity_mib)
        assert found is not None and found.name == name
