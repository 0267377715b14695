"""Eager operators of the real torch_npu on the software ACL: equal to the CPU, or failing by name."""

import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.software_acl
SCRIPTS = Path(__file__).parent / "scripts"


def test_every_operator_equals_the_cpu(software_acl: Any) -> None:
    result = software_acl.run(SCRIPTS / "eager.py")
    assert result.last["wrong"] == {}
    assert result.last["cases"] >= 160
    assert result.trace.launches["aclnnMatmul"] >= 4
    assert not result.trace.captures
    assert not result.trace.error_codes


def test_fused_operators_equal_their_formulas(software_acl: Any) -> None:
    result = software_acl.run(SCRIPTS / "fused.py")
    assert result.last["wrong"] == []
    names = {"aclnnRmsNorm", "aclnnAddRmsNorm", "aclnnRotaryPositionEmbedding", "aclnnGeGluV3", "aclnnScatterPaKvCache"}
    assert names <= set(result.trace.launches)


MISSING = {
    "aclnnSwiGlu": "torch.ops.npu.npu_swiglu(torch.ones(4, 8).npu())",
    "UniqueWithCountsAndSorting": "torch.ones(4).npu().unique()",
    "operator Cross": "torch.linalg.cross(torch.ones(4, 3).npu(), torch.ones(4, 3).npu())",
}
REFUSED = {
    "even and below 896": "torch_npu.npu_rotary_mul(*[torch.ones(1, 1, 1, 896).npu()] * 3)",
    "type of x or float32": "torch_npu.npu_rms_norm(torch.ones(2, 8).npu().half(), torch.ones(8).npu().bfloat16())",
    "may be strided": "scatter(key=torch.ones(3, 16, 2).npu().transpose(1, 2))",
    "one slot for each token": "scatter(slots=[5, 1])",
    "cache_mode Norm": "scatter(cache_mode='PA_NZ')",
}
FAILING = {
    "is out of range": ["scatter(slots=[0, 1, 64])", "scatter(slots=[0, 1, -1])"],
    "names a slot twice": ["scatter(slots=[5, 1, 5])"],
}
SCATTER = """
import torch, torch_npu
def scatter(key=None, slots=(0, 1, 2), cache_mode="Norm"):
    key = torch.ones(3, 2, 16).npu() if key is None else key
    caches = [torch.zeros(8, 8, 2, 16).npu() for _ in range(2)]
    value, slots = torch.ones(3, 2, 16).npu(), torch.tensor(slots, dtype=torch.int32).npu()
    torch_npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode=cache_mode)
def attempt(function):
    try:
        function()
        torch.npu.current_stream().synchronize()
        print("no error")
    except RuntimeError as error:
        print(" ".join(str(error).split()))
"""


def test_what_cannot_run_fails_at_once_and_says_why(software_acl: Any) -> None:
    """Missing operators name themselves, others refuse what their documents exclude."""
    expected = {**MISSING, **REFUSED}
    script = SCATTER + "\n".join(f"attempt(lambda: {call})" for call in expected.values())
    result = software_acl.run(script, env={"TASK_QUEUE_ENABLE": "0"})
    lines = result.stdout.strip().splitlines()[-len(expected) :]
    for reason, line in zip(expected, lines, strict=True):
        assert reason in line


@pytest.mark.parametrize(("reason", "call"), [(reason, call) for reason, calls in FAILING.items() for call in calls])
def test_wrong_slots_are_found(software_acl: Any, reason: str, call: str) -> None:
    result = software_acl.run(f"{SCATTER}\nattempt(lambda: {call})")
    assert reason in result.stdout
    assert "507015" in result.stdout
    assert result.trace.of("kernel_failed")[0]["op"] == "aclnnScatterPaKvCache"


def test_a_host_dereference_of_device_memory_faults(software_acl: Any) -> None:
    script = """
        import ctypes, torch, torch_npu
        x = torch.ones(8, device="npu")
        torch.npu.synchronize()
        print("read", ctypes.string_at(x.data_ptr(), 4))
    """
    result = software_acl.run(script, check=False)
    assert result.returncode == -signal.SIGSEGV
    assert "read" not in result.stdout


def test_device_memory_is_counted_and_bounded(software_acl: Any) -> None:
    script = """
        import json, torch, torch_npu, software_acl
        torch.ones(1, device="npu")
        torch.npu.synchronize(); torch.npu.empty_cache()
        before = software_acl.device_bytes()
        x = torch.zeros(64 << 20, dtype=torch.uint8, device="npu")
        torch.npu.synchronize()
        during = software_acl.device_bytes()
        del x
        torch.npu.empty_cache()
        after = software_acl.device_bytes()
        try:
            torch.zeros(600 << 20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError:
            print(json.dumps([during - before, after - before]))
    """
    result = software_acl.run(script, env={"SOFTWARE_ACL_MEMORY_MB": "512"})
    assert result.last[0] >= 64 << 20
    assert result.last[1] == 0


@pytest.mark.parametrize(("soc", "name"), [("Ascend910B3", "Ascend910B3"), ("Ascend910_9391", "Ascend910_9391")])
def test_the_soc_is_chosen_by_environment(software_acl: Any, soc: str, name: str) -> None:
    result = software_acl.run(
        "import torch, torch_npu; print(torch.npu.get_device_name(0))", env={"SOFTWARE_ACL_SOC": soc}
    )
    assert result.stdout.strip().splitlines()[-1] == name
