"""Passes of one plan added up on the device: tokens, calls by number of distinct experts, and the experts themselves
where they are asked for. By one launch of a kernel on CUDA, by MLX's own operations elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import mlx.core as mx

from . import counting

MAX_PACKED = 512
"""Ids of a call that are packed: those of 64 tokens, top-8."""
_THREADS = 128
_PACKING = 32


def nothing(layers: int, experts: int, size: int) -> mx.array:
    """What passes of so many ids a call are added to at first, lazily."""
    return mx.zeros((layers, experts + 2 + min(experts, size)), dtype=mx.int32)


def add_passes(
    before: mx.array,
    indices: Sequence[mx.array],
    called: int,
    experts: int,
    followed: tuple[int, ...],
    packed: bool = False,
) -> tuple[mx.array, mx.array | None]:
    """Add passes to `before`, lazily, from the `indices` of their calls: integer arrays of one size and type, pass by
    pass the first `called` layers; or `packed`, an array for each pass.

    Returns int32 (layers, experts + 2 + width), `width` being the most distinct experts that a call may have: tokens by
    expert; calls with an id that is none, of which nothing else counts; calls by number of distinct experts, from 0 on.
    And int32 (passes, followed, width): the distinct experts of the calls of those of the `followed` layers that were
    called, in any order, filled up with -1; None without any.
    """
    asked = tuple(layer for layer in followed if layer < called)
    if indices[0].size and called <= counting.KERNEL_INPUTS[-1] and counting.has_kernels():
        return _by_kernel(before, indices, called, experts, asked, packed)
    if packed:
        indices = [call for each in indices for call in each]
    return _by_operations(before, indices, called, experts, asked)


class Packing:
    """Puts the ids of a pass' calls side by side, for so many calls and a type of indices.

    Arrays that were evaluated one by one cost the host 1.75 us each when a kernel reads them (docs/design.md).
    """

    def __init__(self, calls: int, kind: mx.Dtype) -> None:
        self.calls = calls
        self._kind = kind
        self._kernel = _packing(calls)
        self._launch: dict[str, Any] = {
            "template": [("T", kind)],
            "grid": (calls * _PACKING, 1, 1),
            "threadgroup": (_PACKING, 1, 1),
            "output_dtypes": [kind],
            "init_value": 0,
        }

    def __call__(self, indices: list[mx.array]) -> tuple[mx.array, mx.array] | None:
        """The ids as one lazy array (calls, size), and the last call's indices as they were, with which it is computed.
        None where there are too many, not as many in each call, or of another type, for which there is no kernel."""
        first = indices[0]
        size = first.size
        if not 0 < size <= MAX_PACKED or first.dtype != self._kind:
            return None
        if list(map(_BYTES, indices)).count(first.nbytes) < self.calls:
            return None
        inputs = [*indices, counting.numbers(size)]
        packed: mx.array = self._kernel(inputs=inputs, output_shapes=[(self.calls, size)], **self._launch)[0]
        return packed, mx.depends(indices[-1], [packed])


@lru_cache(maxsize=64)
def packing(calls: int, kind: mx.Dtype) -> Packing | None:
    """How passes of so many calls with indices of this type are packed; None where there is no kernel, or it fails when
    it is tried: later it would do so in the hands of those who run the model."""
    if calls > counting.KERNEL_INPUTS[-1] or not counting.has_kernels():
        return None
    try:
        made = Packing(calls, kind)
        tried = [mx.full((1,), number % 127).astype(kind) for number in range(calls)]
        mx.eval(tried)
        packed = made(tried)
        return made if packed is not None and mx.array_equal(packed[0], mx.stack(tried)).item() else None
    except Exception:
        counting.give_up_kernels()
        return None


def _by_operations(
    before: mx.array, indices: Sequence[mx.array], called: int, experts: int, asked: tuple[int, ...]
) -> tuple[mx.array, mx.array | None]:
    counts, figures = counting.token_counts(indices, experts)
    tokens = counts[:, :-1].reshape(-1, called, experts)
    sizes, invalid = figures.reshape(2, -1, called)
    width = min(experts, indices[0].size)
    by_size = (sizes[..., None] == mx.arange(width + 1)) & (invalid == 0)[..., None]
    added = mx.concatenate([tokens.sum(0), (invalid > 0).sum(0)[:, None], by_size.sum(0)], axis=-1)
    missing = before.shape[0] - called
    found = None
    if asked:
        routed = tokens[:, mx.array(asked)] > 0
        ids = mx.sort(mx.where(routed, mx.arange(experts), experts))[..., :width]
        found = mx.where(ids < experts, ids, -1).astype(mx.int32)
    return before + mx.pad(added.astype(mx.int32), [(0, missing), (0, 0)]), found


def _by_kernel(
    before: mx.array, indices: Sequence[mx.array], called: int, experts: int, asked: tuple[int, ...], packed: bool
) -> tuple[mx.array, mx.array | None]:
    most = counting.inputs_for(len(indices))
    arrays = 1 if packed else called  # of a pass
    kernel, layers, size = _kernel(most), before.shape[0], indices[0].size // (called if packed else 1)
    width, slots = min(experts, size), _slots(layers, asked)
    step = most // arrays * arrays
    found: list[mx.array] = []
    for begin in range(0, len(indices), step):
        part = list(indices[begin : begin + step])
        passes = len(part) // arrays
        before, sets = kernel(
            inputs=[
                *(*part, *part[:1] * (most - len(part))),
                *(before, slots, counting.numbers(size, passes, called, len(asked), width)),
            ],
            template=[("T", part[0].dtype), ("E", experts), ("P", packed)],
            grid=(layers * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[before.shape, (passes, len(asked) or 1, width)],
            output_dtypes=[mx.int32, mx.int32],
            init_value=-1,
        )
        found.append(sets)
    if not asked:
        return before, None
    return before, found[0] if len(found) == 1 else mx.concatenate(found)


@lru_cache(maxsize=256)
def _slots(layers: int, asked: tuple[int, ...]) -> mx.array:
    """By layer: where in `asked` it is, -1 for those that are not."""
    return mx.array([asked.index(layer) if layer in asked else -1 for layer in range(layers)], dtype=mx.int32)


@cache
def _kernel(inputs: int) -> Any:
    names = [f"ids{number}" for number in range(inputs)]
    return mx.fast.cuda_kernel(
        name=f"moe_telemetry_add_passes_{inputs}",
        input_names=[*names, "before", "slots", "numbers"],
        output_names=["counts", "sets"],
        source=_SOURCE % ", ".join(names),
    )


@cache
def _packing(calls: int) -> Any:
    names = [f"ids{number}" for number in range(calls)]
    return mx.fast.cuda_kernel(
        name=f"moe_telemetry_pack_{calls}",
        input_names=[*names, "size"],
        output_names=["packed"],
        source=_PACKED % ", ".join(names),
    )


_PACKED = """
const T* calls[] = {%s};
for (int at = threadIdx.x; at < size[0]; at += blockDim.x) {
  packed[blockIdx.x * size[0] + at] = calls[blockIdx.x][at];
}
"""
"""Body of the kernel that puts the calls of a pass side by side: a block for each."""

_SOURCE = """
const T* calls[] = {%s};
const int size = numbers[0], passes = numbers[1], called = numbers[2], asked = numbers[3], width = numbers[4];
__shared__ int found[E + 1];
__shared__ int distinct;
const int layer = blockIdx.x, slot = slots[layer];
const int columns = E + 2 + width;
const long long row = static_cast<long long>(layer) * columns;
for (int at = threadIdx.x; at < columns; at += blockDim.x) counts[row + at] = before[row + at];
for (int expert = threadIdx.x; expert <= E; expert += blockDim.x) found[expert] = 0;
if (threadIdx.x == 0) distinct = 0;
__syncthreads();
if (layer >= called) return;
for (int pass = 0; pass < passes; pass++) {
  const T* ids = P ? calls[pass] + layer * size : calls[pass * called + layer];
  int* set = sets + (static_cast<long long>(pass) * asked + (slot < 0 ? 0 : slot)) * width;
  for (int at = threadIdx.x; at < size; at += blockDim.x) {
    long long id = static_cast<long long>(ids[at]);
    bool known = id >= 0 && id < E;
    if (atomicAdd(&found[known ? id : E], 1) == 0 && known) {
      int number = atomicAdd(&distinct, 1);
      if (slot >= 0) set[number] = static_cast<int>(id);
    }
  }
  __syncthreads();
  const bool valid = found[E] == 0;
  __syncthreads();
  for (int expert = threadIdx.x; expert <= E; expert += blockDim.x) {
    if (valid && expert < E) counts[row + expert] += found[expert];
    found[expert] = 0;
  }
  if (!valid && slot >= 0) {
    for (int at = threadIdx.x; at < width; at += blockDim.x) set[at] = -1;
  }
  if (threadIdx.x == 0) {
    counts[row + (valid ? E + 1 + distinct : E)] += 1;
    distinct = 0;
  }
  __syncthreads();
}
"""
"""Body of the kernel: a block for each layer, which goes through the passes and counts in shared memory."""

_BYTES = attrgetter("nbytes")
