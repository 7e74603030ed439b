"""Tokens by layer call and expert, counted on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

logger = logging.getLogger("moe_telemetry")

KERNEL_INPUTS = 128
"""Arrays that one launch of the CUDA kernel reads."""
SHARED_EXPERTS = 8192
"""Most experts of a layer: a block of the kernel counts them in shared memory."""
_THREADS = 64

_broken = False


def on_cuda() -> bool:
    """Whether arrays are computed by CUDA here, in the stream that is the default now."""
    return mx.default_device() == mx.gpu and _has_cuda()


def token_counts(indices: Sequence[mx.array], experts: int) -> mx.array:
    """Tokens by call and expert, int32 (calls, experts + 1), lazily; the last column counts ids that are none.

    `indices` are integer arrays of one shape, a call each.
    """
    global _broken  # noqa: PLW0603
    if on_cuda() and not _broken and indices[0].size:
        try:
            return _by_kernel(indices, experts)
        except Exception:
            _broken = True
            logger.warning("the CUDA kernel that counts routed experts cannot be used", exc_info=True)
    return _by_scatter(indices, experts)


def _by_scatter(indices: Sequence[mx.array], experts: int) -> mx.array:
    number = len(indices)
    counts = mx.zeros((number * (experts + 1),), dtype=mx.int32)
    if indices[0].size:
        ids = mx.concatenate(list(indices)).reshape(number, -1).astype(mx.int64)
        # An id out of range would be written out of bounds.
        ids = mx.where((ids >= 0) & (ids < experts), ids, experts)
        ids = ids + (mx.arange(number) * (experts + 1))[:, None]
        counts = counts.at[ids.reshape(-1)].add(1)
    return counts.reshape(number, experts + 1)


def _by_kernel(indices: Sequence[mx.array], experts: int) -> mx.array:
    """One launch for KERNEL_INPUTS arrays: joined first, each costs a copy, and a copy 3 us of the host's time."""
    kernel = _kernel()
    size = mx.array([indices[0].size])
    width = experts + 1
    found = []
    for begin in range(0, len(indices), KERNEL_INPUTS):
        part = list(indices[begin : begin + KERNEL_INPUTS])
        number = len(part)
        part += part[:1] * (KERNEL_INPUTS - number)
        (counts,) = kernel(
            inputs=[*part, size],
            template=[("T", part[0].dtype), ("E", experts)],
            grid=(number * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(number, width)],
            output_dtypes=[mx.int32],
        )
        found.append(counts)
    return found[0] if len(found) == 1 else mx.concatenate(found)


@cache
def _has_cuda() -> bool:
    cuda: Any = getattr(mx, "cuda", None)
    return cuda is not None and bool(cuda.is_available())


@cache
def _kernel() -> Callable[..., list[mx.array]]:
    names = [f"ids{number}" for number in range(KERNEL_INPUTS)]
    made: Any = mx.fast.cuda_kernel(
        name="moe_telemetry_token_counts",
        input_names=[*names, "size"],
        output_names=["counts"],
        source=_SOURCE % ", ".join(names),
    )
    kernel: Callable[..., list[mx.array]] = made
    return kernel


_SOURCE = """
const T* calls[] = {%s};
__shared__ int found[E + 1];
for (int expert = threadIdx.x; expert <= E; expert += blockDim.x) found[expert] = 0;
__syncthreads();
const T* ids = calls[blockIdx.x];
for (int at = threadIdx.x; at < size[0]; at += blockDim.x) {
  long long id = static_cast<long long>(ids[at]);
  atomicAdd(&found[id >= 0 && id < E ? id : E], 1);
}
__syncthreads();
for (int expert = threadIdx.x; expert <= E; expert += blockDim.x) {
  counts[static_cast<long long>(blockIdx.x) * (E + 1) + expert] = found[expert];
}
"""
"""Body of the kernel: a block for each call, which counts in shared memory."""
