"""mlx_lm's own generation, recorded: two lines beside what a program does anyway.

    python examples/mlx_lm_generate.py                       # a tiny model with random weights, nothing to download
    python examples/mlx_lm_generate.py --model PATH_OR_NAME  # any MoE model that mlx_lm loads

Needs the extra `mlx-lm`. The figures of the run are printed at the end; http://127.0.0.1:9464/metrics has them live.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_moe

import moe_telemetry as mt
from moe_telemetry.integrations import mlx_lm as integration
from moe_telemetry.reports import lines


def tiny() -> qwen3_moe.Model:
    """A qwen3_moe of two layers with 16 experts."""
    return qwen3_moe.Model(
        qwen3_moe.ModelArgs(
            model_type="qwen3_moe",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_experts=16,
            num_experts_per_tok=4,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            rms_norm_eps=1e-5,
            vocab_size=256,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=1e4,
            tie_word_embeddings=False,
            max_position_embeddings=256,
            norm_topk_prob=True,
        )
    )


def pieces(model: str | None, prompt: str, tokens: int) -> Iterator[str]:
    """What the model says, as it says it."""
    if model is None:
        ids = mx.array(list(prompt.encode()))
        for token, _ in generate_step(ids, tiny(), max_tokens=tokens):
            yield f"{token} "
        return
    loaded, tokenizer = load(model)[:2]
    for response in stream_generate(loaded, tokenizer, prompt, max_tokens=tokens):
        yield response.text


def main() -> None:
    """Generate and print what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name; without it, a tiny model with random weights")
    parser.add_argument("--prompt", default="What is an expert?")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--port", type=int, help="of the metrics (9464)")
    options = parser.parse_args()

    integration.instrument()
    with mt.start(model=options.model or "tiny", runtime="mlx_lm", port=options.port) as telemetry:
        print(f"metrics at {telemetry.url}/metrics", flush=True)
        for piece in pieces(options.model, options.prompt, options.tokens):
            print(piece, end="", flush=True)
        print()
        print("\n".join(lines(mt.report(telemetry.snapshot()))))


if __name__ == "__main__":
    main()
