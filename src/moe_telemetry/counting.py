"""Tokens by layer call and expert, counted on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

logger = logging.getLogger("moe_telemetry")

KERNEL_INPUTS = (16, 128, 384)
"""Arrays that a launch of a CUDA kernel reads: the pointers of the larger take 3 of the 4 KB that arguments may."""
SHARED_EXPERTS = 8192
"""Most experts of a layer: a block of the kernel counts them in shared memory."""
IDS_AT_ONCE = 262_144
"""Routed ids joined at a time: what that needs meanwhile stays at a few megabytes."""
_THREADS = 64

_broken = False


def on_cuda() -> bool:
    """Whether arrays are computed by CUDA here, in the stream that is the default now."""
    return mx.default_device() == mx.gpu and _has_cuda()


def token_counts(indices: Sequence[mx.array], experts: int) -> tuple[mx.array, mx.array]:
    """Counts of layer calls, lazily, from their `indices`: integer arrays of one shape and type, a call each.

    Returns tokens by call and expert, int32 (calls, experts + 1), the last column not used; and, int32 (2, calls), how
    many distinct experts a call has and, where one of its ids is none, a number above 0. Such a call has no tokens.
    """
    if indices[0].size and has_kernels():
        return _by_kernel(indices, experts)
    return _by_scatter(indices, experts)


def has_kernels() -> bool:
    """Whether kernels of our own are used."""
    return not _broken and on_cuda()


def give_up_kernels() -> None:
    """Use none from now on: to be called where what they put out could not be had, with the error at hand."""
    global _broken  # noqa: PLW0603
    if has_kernels():
        _broken = True
        logger.warning("the CUDA kernels that count routed experts cannot be used", exc_info=True)


def inputs_for(arrays: int) -> int:
    """Of KERNEL_INPUTS, that of a kernel for so many arrays, or for a part of them."""
    return next((most for most in KERNEL_INPUTS if arrays <= most), KERNEL_INPUTS[-1])


def _by_scatter(indices: Sequence[mx.array], experts: int) -> tuple[mx.array, mx.array]:
    step = max(1, IDS_AT_ONCE // max(1, indices[0].size))
    parts = [_scattered(indices[begin : begin + step], experts) for begin in range(0, len(indices), step)]
    counts = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return counts, mx.stack([(counts[:, :-1] > 0).sum(-1), counts[:, -1]])


def _scattered(indices: Sequence[mx.array], experts: int) -> mx.array:
    number = len(indices)
    counts = mx.zeros((number * (experts + 1),), dtype=mx.int32)
    if indices[0].size:
        ids = mx.concatenate(list(indices)).reshape(number, -1)
        if ids.dtype != mx.uint32:  # MLX's own sorts and partitions give that
            signed, unsigned = (mx.int64, mx.uint64) if ids.itemsize == 8 else (mx.int32, mx.uint32)
            ids = ids.astype(signed).view(unsigned)  # a negative one is large now
        known = (ids < experts).all(-1, keepdims=True)
        ids = mx.where(known, ids, experts).astype(mx.uint32)  # or one out of range would be written out of bounds
        ids = ids + (mx.arange(number, dtype=mx.uint32) * (experts + 1))[:, None]
        counts = counts.at[ids.reshape(-1)].add(1)
    return counts.reshape(number, experts + 1)


def _by_kernel(indices: Sequence[mx.array], experts: int) -> tuple[mx.array, mx.array]:
    """One launch for hundreds of arrays: joined first, each costs a copy, and a copy 3 us of the host's time."""
    most = inputs_for(len(indices))
    kernel, size = _kernel(most), numbers(indices[0].size)
    found: list[list[mx.array]] = []
    for begin in range(0, len(indices), most):
        part = list(indices[begin : begin + most])
        number = len(part)
        made = kernel(
            inputs=[*part, *part[:1] * (most - number), size],
            template=[("T", part[0].dtype), ("E", experts)],
            grid=(number * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(number, experts + 1), (2, number)],
            output_dtypes=[mx.int32, mx.int32],
            init_value=0,
        )
        found.append(made)
    counts, figures = found[0]
    if len(found) > 1:
        counts = mx.concatenate([each[0] for each in found])
        figures = mx.concatenate([each[1] for each in found], axis=-1)
    return counts, figures


@lru_cache(maxsize=256)
def numbers(*values: int) -> mx.array:
    """An argument of a kernel, int32, made once."""
    return mx.array(values, dtype=mx.int32)


@cache
def _has_cuda() -> bool:
    cuda: Any = getattr(mx, "cuda", None)
    return cuda is not None and bool(cuda.is_available())


@cache
def _kernel(inputs: int) -> Callable[..., list[mx.array]]:
    names = [f"ids{number}" for number in range(inputs)]
    made: Any = mx.fast.cuda_kernel(
        name=f"moe_telemetry_token_counts_{inputs}",
        input_names=[*names, "size"],
        output_names=["counts", "figures"],
        source=_SOURCE % ", ".join(names),
    )
    kernel: Callable[..., list[mx.array]] = made
    return kernel


_SOURCE = """
const T* calls[] = {%s};
__shared__ int found[E + 1];
__shared__ int distinct;
for (int expert = threadIdx.x; expert <= E; expert += blockDim.x) found[expert] = 0;
if (threadIdx.x == 0) distinct = 0;
__syncthreads();
const T* ids = calls[blockIdx.x];
for (int at = threadIdx.x; at < size[0]; at += blockDim.x) {
  long long id = static_cast<long long>(ids[at]);
  bool known = id >= 0 && id < E;
  if (atomicAdd(&found[known ? id : E], 1) == 0 && known) atomicAdd(&distinct, 1);
}
__syncthreads();
for (int expert = threadIdx.x; expert <= E; expert += blockDim.x) {
  counts[static_cast<long long>(blockIdx.x) * (E + 1) + expert] = found[E] ? 0 : found[expert];
}
if (threadIdx.x == 0) {
  figures[blockIdx.x] = distinct;
  figures[gridDim.x + blockIdx.x] = found[E];
}
"""
"""Body of the kernel: a block for each call, which counts in shared memory."""
