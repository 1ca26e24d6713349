import contextlib
import subprocess
import sys

import pytest
import torch

from megatron_router_replay.testing.cpu import is_active, is_cuda_device, megatron_on_cpu, patches


def test_importing_the_package_loads_neither_megatron_nor_torch():
    code = "import sys, megatron_router_replay.testing as t; dir(t); sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("error", [None, KeyError])
def test_every_patched_attribute_is_restored(error):
    before, inherited = current_of([patch[:2] for patch in patches()]), torch.Tensor.pin_memory
    with contextlib.suppress(KeyError), megatron_on_cpu():
        changed = sum(value is not before[key] for key, value in current_of(before).items())
        if error is not None:
            raise error
    assert len(before) > 60
    assert changed >= len(before) - 1  # MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None before and inside
    after = current_of(before)
    assert all(after[key] is before[key] for key in before)
    assert torch.Tensor.pin_memory is inherited
    assert "pin_memory" not in vars(torch.Tensor)
    assert not is_active()


def current_of(keys):
    return {(owner, name): vars(owner).get(name, "absent") for owner, name in keys}


def test_a_patch_that_cannot_be_applied_takes_the_others_back(monkeypatch):
    from megatron_router_replay.testing import cpu

    before = torch.zeros
    broken = [(torch, "zeros", None), (object, "zeros", None)]
    monkeypatch.setattr(cpu, "patches", lambda: broken)
    with pytest.raises(TypeError), megatron_on_cpu():
        pass
    assert torch.zeros is before
    assert not is_active()


def test_only_the_outermost_block_restores():
    with megatron_on_cpu():
        with megatron_on_cpu():
            pass
        assert is_active()
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert not is_active()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 3)])
def test_a_cuda_device_means_the_cpu(device):
    with megatron_on_cpu():
        assert torch.empty(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.ones(2).to(device=device, dtype=torch.float64).dtype == torch.float64
        assert torch.ones(2).new_zeros(3, device=device).device.type == "cpu"
        assert torch.nn.Linear(2, 2).to(device).weight.device.type == "cpu"
        assert torch.tensor([1], pin_memory=True).cuda(non_blocking=True).tolist() == [1]


@pytest.mark.parametrize("device", [None, "cpu", "meta", True, torch.device("cpu"), torch.float32])
def test_other_devices_are_left_alone(device):
    assert not is_cuda_device(device)


def test_a_recompute_inside_the_backward_finds_the_cpu_too():
    devices = []

    def layer(x):
        devices.append(torch.zeros(1, device="cuda").device.type)
        return x * 2

    with megatron_on_cpu():
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert devices == ["cpu", "cpu"]


def test_random_states_of_the_gpu_are_those_of_the_cpu():
    with megatron_on_cpu():
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), first)


def test_the_meta_device_context_works_inside_and_after():
    with megatron_on_cpu(), torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


def test_a_transformers_model_loaded_inside_equals_one_loaded_outside(checkpoints_dir):
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(10)[None]

    def logits():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints_dir / "qwen3moe", dtype=torch.float32)
        return model(tokens).logits

    outside = logits()
    with megatron_on_cpu():
        inside = logits()
    assert torch.equal(inside, outside)


def test_a_norm_under_sequence_parallelism_is_marked_to_be_summed_over_tp_ranks():
    from types import SimpleNamespace

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    fields = {"layernorm_zero_centered_gamma": False, "normalization": "RMSNorm", "sequence_parallel": True}
    with megatron_on_cpu():
        norm = WrappedTorchNorm(config=SimpleNamespace(**fields), hidden_size=4, eps=1e-6)
        assert norm.weight.sequence_parallel
        with pytest.raises(ValueError, match="zero_centered_gamma"):
            WrappedTorchNorm(config=SimpleNamespace(**fields | {"layernorm_zero_centered_gamma": True}), hidden_size=4)
