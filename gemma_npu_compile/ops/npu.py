"""``npu::`` operators on the CPU: schemas, fake kernels and kernels that refuse what an Ascend device refuses.

They exist only where torch_npu does not: a machine with it has the real ones. Schemas are those torch_npu 2.13.0
registers (op-plugin's ``op_plugin_functions.yaml``, whose ``self`` it registers as ``input``); limits are those of
op-plugin's documents for the SoC being emulated.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gemma_npu_compile.capabilities import Platform
from gemma_npu_compile.capabilities import platform as get_platform
from gemma_npu_compile.ops.library import KERNELS, Kernel, empty_like, implement

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EMULATED = importlib.util.find_spec("torch_npu") is None
"""Whether this process has the emulated operators and not torch_npu's."""

PARAMETER, TILING = 161002, 561002
"""Codes of a refusal: a parameter is wrong; no tiling exists for the call."""


class AclnnError(RuntimeError):
    """What the device's operator library says about a call it refuses: a RuntimeError that starts with its code."""

    def __init__(self, message: str, code: int = PARAMETER) -> None:
        super().__init__(message if message.startswith(f"{code}: ") else f"{code}: {message}")
        self.code = code


_PLATFORM: ContextVar[Platform] = ContextVar("emulated_platform", default=get_platform("ascend910b"))  # noqa: B039  (frozen)


def emulated() -> Platform:
    """The platform whose limits the emulated operators enforce in this thread; ``ascend910b`` unless told otherwise."""
    return _PLATFORM.get()


@contextmanager
def emulate(platform: Platform) -> Iterator[None]:
    """Enforce the limits of ``platform`` inside the ``with`` block, in this thread."""
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def define(
    signature: str, *, check: Callable[..., None], run: Callable[..., Any], fake: Callable[..., Any] = empty_like
) -> None:
    """Define ``npu::<signature>`` and its CPU kernel, for inference only; does nothing where torch_npu is installed.

    Args:
        check: limits of the device. Not asked about fake tensors: torch_npu's meta kernels enforce none of them either,
            and a call that a pass will make legal has to be traced first.
    """
    if not EMULATED:
        return

    def limits(*args: Any, **kwargs: Any) -> None:
        if not any(isinstance(arg, FakeTensor) for arg in (*args[:1], *kwargs.values())):
            check(*args, **kwargs)

    _LIBRARY.define(signature)
    op = getattr(torch.ops.npu, signature.split("(", 1)[0]).default
    implement(_LIBRARY, op, Kernel(limits, torch.no_grad()(run), fake))
    KERNELS[op] = Kernel(limits, run, fake)  # a replay is without gradients as a whole


if EMULATED:
    _LIBRARY = torch.library.Library("npu", "FRAGMENT")
else:
    import torch_npu  # noqa: F401  (registers the operators, where torch was told not to)


# ---- norms


def _check_norm(name: str, x: Tensor, gamma: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not 1 <= x.dim() <= 8 or x.dtype not in FLOATS:
        raise AclnnError(f"{name}: x is {x.dtype} {tuple(x.shape)}, it must be floating point of 1 to 8 dimensions")
    if not 1 <= gamma.dim() <= x.dim() or gamma.shape != x.shape[x.dim() - gamma.dim() :]:
        raise AclnnError(f"{name}: gamma {tuple(gamma.shape)} must be the last dimensions of x {tuple(x.shape)}")
    if gamma.dtype not in dtypes:
        raise AclnnError(f"{name}: gamma is {gamma.dtype} for x of {x.dtype}, it must be {dtypes[0]}")


def _check_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> None:
    _check_norm("npu_rms_norm", x, gamma, (x.dtype, torch.float32))


def _check_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> None:
    _check_norm("npu_add_rms_norm", x1, gamma, (x1.dtype,))
    if x2.shape != x1.shape or x2.dtype != x1.dtype:
        raise AclnnError(f"npu_add_rms_norm: x2 is {x2.dtype} {tuple(x2.shape)}, x1 {x1.dtype} {tuple(x1.shape)}")
    if x1.numel() == 0:
        raise AclnnError(f"npu_add_rms_norm: x1 {tuple(x1.shape)} is empty")


def _rstd_like(x: Tensor, gamma: Tensor) -> Tensor:
    kept = x.dim() - gamma.dim()
    return x.new_empty((*x.shape[:kept], *[1] * gamma.dim()), dtype=torch.float32)


def _normalise(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    axes = list(range(-gamma.dim(), 0))
    exact = x.dtype == torch.float32
    # At these sizes calls and allocations cost more than arithmetic: the result's memory holds the squares first.
    wide = x if exact else x.float()
    torch.mean(torch.mul(wide, wide, out=y) if exact else wide * wide, axes, keepdim=True, out=rstd)
    rstd.add_(epsilon).rsqrt_()
    normed = torch.mul(wide, rstd, out=y) if exact else wide.mul_(rstd)
    normed.mul_(gamma)
    if not exact:
        y.copy_(normed)


def _rms_norm(
    x: Tensor, gamma: Tensor, epsilon: float = 1e-06, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    out = (empty_like(x), _rstd_like(x, gamma)) if out is None else out
    _normalise(x, gamma, epsilon, *out)
    return out


def _add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    epsilon: float = 1e-06,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    out = (empty_like(x1), _rstd_like(x1, gamma), empty_like(x1)) if out is None else out
    _normalise(torch.add(x1, x2, out=out[2]), gamma, epsilon, out[0], out[1])
    return out


define(
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    check=_check_rms_norm,
    run=_rms_norm,
    fake=lambda x, gamma, epsilon=1e-06: (empty_like(x), _rstd_like(x, gamma)),
)
define(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    check=_check_add_rms_norm,
    run=_add_rms_norm,
    fake=lambda x1, x2, gamma, epsilon=1e-06: (empty_like(x1), _rstd_like(x1, gamma), empty_like(x1)),
)


# ---- rotary

_ROTARY = {
    # axes of x: axes along which the tables may be broadcast, by mode
    "BNSD": {"half": ("BN", "N", ""), "interleave": ("BN",)},
    "BSND": {"half": ("BN", "N", ""), "interleave": ("BN",)},
    "SBND": {"half": ("BN", "N"), "interleave": ("BN",)},
    "TND": {"half": ("N", ""), "interleave": ("N",)},
}


def _rotary_fits(x: tuple[int, ...], table: tuple[int, ...], mode: str) -> bool:
    """Whether there is a layout of ``x`` in which the document allows tables of this shape."""
    for axes, broadcast in _ROTARY.items():
        if len(axes) != len(x):
            continue
        sizes = dict(zip(axes, x, strict=True))
        batch, heads = sizes.get("B", 1), sizes["N"]
        small = batch < 1000 and heads < 1000 if mode == "half" else batch * heads < 1000
        shapes = [tuple(1 if axis in ones else sizes[axis] for axis in axes) for ones in broadcast[mode]]
        if small and table in shapes:
            return True
    return False


def _check_rotary(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> None:
    name, shape, table = "npu_rotary_mul", tuple(x.shape), tuple(r1.shape)
    if rotary_mode not in ("half", "interleave"):
        raise AclnnError(f"{name}: rotary_mode is {rotary_mode!r}, it must be 'half' or 'interleave'")
    if rotate is not None:
        raise AclnnError(f"{name}: rotate is not emulated")
    if any(each.dtype not in FLOATS for each in (x, r1, r2)):
        raise AclnnError(f"{name}: {x.dtype}, {r1.dtype} and {r2.dtype} must be floating point")
    if r2.shape != r1.shape:
        raise AclnnError(f"{name}: r1 is {table}, r2 {tuple(r2.shape)}")
    if len(shape) not in (3, 4) or shape[-1] % 2 or shape[-1] >= 896:
        raise AclnnError(f"{name}: x is {shape}, it must have 3 or 4 dimensions, the last even and below 896")
    if not _rotary_fits(shape, table, rotary_mode):
        raise AclnnError(
            f"{name}: r1 and r2 of {table} do not fit x {shape}: BNSD takes 11SD, B1SD or BNSD, BSND 1S1D, BS1D or "
            "BSND, SBND S11D or SB1D, TND T1D or TND (the first of each when interleaved), with B and N below 1000"
        )


def _rotary_mul(
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    out = empty_like(x) if out is None else out
    cos, sin, into = r1, r2, out
    if not x.dtype == cos.dtype == sin.dtype == torch.float32:
        # Tables of another dtype are rounded to that of x, as the operator's adapter does.
        cos, sin = cos.to(x.dtype).float(), sin.to(x.dtype).float()
        x, into = x.float(), torch.empty(x.shape)
    if rotary_mode == "half":
        left, right = x.chunk(2, -1)
        turned = torch.cat((right.neg(), left), -1)
    else:
        turned = torch.stack((x[..., 1::2].neg(), x[..., ::2]), -1).flatten(-2)
    torch.mul(x, cos, out=into).add_(turned.mul_(sin))
    return out if into is out else out.copy_(into)


define(
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    check=_check_rotary,
    run=_rotary_mul,
    fake=lambda x, *args, **kwargs: empty_like(x),
)


# ---- gated GELU


def _geglu_results(
    x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    shape = list(x.shape)
    if not -len(shape) <= dim < len(shape):
        raise AclnnError(f"npu_geglu: dim is {dim}, x has {len(shape)} dimensions")
    shape[dim] //= 2
    return x.new_empty(shape), x.new_empty(shape)


def _check_geglu(x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> None:
    shape = tuple(x.shape)
    if not 1 <= len(shape) <= 8 or x.dtype not in FLOATS:
        raise AclnnError(f"npu_geglu: x is {x.dtype} {shape}, it must be floating point of 1 to 8 dimensions")
    if not -len(shape) <= dim < len(shape) or shape[dim] % 2:
        raise AclnnError(f"npu_geglu: dim {dim} of x {shape} must exist and be even")
    if approximate not in (0, 1):
        raise AclnnError(f"npu_geglu: approximate is {approximate}, it must be 0 (none) or 1 (tanh)")


def _geglu(
    x: Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    y, gelu = out = _geglu_results(x, dim) if out is None else out
    left, right = x.chunk(2, dim)
    gate, other = (left, right) if activate_left else (right, left)
    how = "tanh" if approximate else "none"
    if x.dtype == torch.float32:
        torch.ops.aten.gelu.out(gate, approximate=how, out=gelu)
        torch.mul(gelu, other, out=y)
    else:  # one rounding for each result
        wide = torch.ops.aten.gelu.default(gate.float(), approximate=how)
        gelu.copy_(wide)
        y.copy_(wide.mul_(other))
    return out


define(
    "npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)",
    check=_check_geglu,
    run=_geglu,
    fake=_geglu_results,
)


# ---- cache writes


def _check_scatter(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
    **compress: Tensor | None,
) -> None:
    name = "npu_scatter_pa_kv_cache"
    if cache_mode not in (None, "Norm"):
        raise AclnnError(f"{name}: cache_mode {cache_mode!r} is not emulated, only 'Norm'")
    for operand, given in compress.items():
        if given is not None:
            raise AclnnError(f"{name}: {operand} is not emulated")
    operands = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    for operand, tensor in (*operands.items(), ("slot_mapping", slot_mapping)):
        if not tensor.is_contiguous():
            raise AclnnError(f"{name}: {operand} {tuple(tensor.shape)} must be contiguous, it has {tensor.stride()}")
    if len({tensor.dtype for tensor in operands.values()}) > 1:
        raise AclnnError(f"{name}: dtypes differ: {', '.join(f'{k} {t.dtype}' for k, t in operands.items())}")
    if slot_mapping.dtype not in (torch.int32, torch.int64) or slot_mapping.shape != key.shape[:1]:
        raise AclnnError(
            f"{name}: slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)} for key {tuple(key.shape)}, it "
            "must be int32 or int64, one slot per token"
        )
    if key.dim() != 3 or value.shape[:-1] != key.shape[:-1]:
        raise AclnnError(f"{name}: key {tuple(key.shape)} and value {tuple(value.shape)} must be (tokens, heads, size)")
    for new, cache in ((key, key_cache), (value, value_cache)):
        if cache.dim() != 4 or cache.shape[2:] != new.shape[1:] or cache.shape[:2] != key_cache.shape[:2]:
            raise AclnnError(
                f"{name}: caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} must be (blocks, block_size, "
                f"heads, size) for tokens of {tuple(new.shape[1:])}"
            )


def _scatter(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    slots = slot_mapping.long()
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value)


define(
    "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
    "str? cache_mode='PA_NZ') -> ()",
    check=_check_scatter,
    run=_scatter,
    fake=lambda *args, **kwargs: None,
)

# Attention is a file of its own, which needs what is above.
import gemma_npu_compile.ops.npu_attention  # noqa: E402, F401
