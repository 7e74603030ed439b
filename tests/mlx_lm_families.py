"""Tiny configurations of every MoE model family of mlx_lm, and the models they make, with random weights."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import models

EXPERTS = 8
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE = {"rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}

# Families name their fields differently, and each takes those it knows: one set of fields is right for most.
BASE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_attention_groups": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layernorm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5},
    **{"max_position_embeddings": 128, "model_max_length": 128, "rope_theta": 10000.0, "rope_scaling": None},
    **{"partial_rotary_factor": 0.5, "rotary_dim": 8, "sliding_window": 4, "layer_types": MIXED},
    **{"attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True},
    "tie_word_embeddings": False,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "share_expert_dim"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **{"n_group": 4, "num_expert_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    **{"moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1},
    # latent attention, and indices into it
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    # granite's scales
    **{"logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    # linear attention and state spaces
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 16},
    **{"linear_conv_kernel_dim": 4, "full_attention_interval": 2, "layer_group_size": 2, "group_norm_size": 1},
    **{"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_proj_bias": False, "mamba_conv_bias": True},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 16, "conv_kernel": 4, "n_groups": 1, "use_conv_bias": True},
}
GEMMA4 = {
    **{"enable_moe_block": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
}
KIMI = {
    **{"head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2]},
}
LONGCAT = {
    **{"attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 4, "num_layers": 3},
    **{"ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
}
MISTRAL4 = {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}}
PRISM = {
    **{"tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"}},
    "modules": [{"path": "model.layers.1.self_attn.o_proj", "embedding": False, "dtype": "float16", "block": 0}],
}

# What a family has besides the fields above, by the name of its file. Those that read a text_config say so.
FAMILIES: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afmoe": {},
    "bailing_hybrid": {},
    "bailing_moe": {},
    "bailing_moe_linear": {},
    "bailing_moe_v3": {},
    "deepseek": {},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "rope_scaling": YARN},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {"is_moe_layer": [False, True, True]},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"rope_parameters": ROPE},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan": {
        **{"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2},
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0, "expert_layer_period": 2},
    "kimi_k25": {"text_config": {}},
    "kimi_k3": {
        "text_config": {"linear_attn_config": KIMI, "routed_expert_hidden_size": 16, "attn_res_block_size": 2},
    },
    "kimi_linear": {"linear_attn_config": KIMI},
    "kimi_vl": {"text_config": {}},
    "laguna": {},
    "lfm2_moe": {"use_expert_bias": True, "conv_bias": False, "conv_L_cache": 3},
    "llama4": {
        "text_config": {
            **{"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
            **{"attention_chunk_size": 4, "intermediate_size_mlp": 32},
        },
    },
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 2, "emb_split_num": 2},
    "mellum": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "mimo_v2_flash": {
        **{"moe_layer_freq": [0, 1, 1], "hybrid_layer_pattern": [1, 0, 1], "sliding_window_size": 4},
        **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "swa_rope_theta": 10000.0},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16},
    },
    "minimax": {},
    "minimax_m3_vl": {
        "text_config": {
            **{"moe_layer_freq": [0, 1, 1], "dense_intermediate_size": 32},
            **{"index_block_size": 2, "index_topk_blocks": 2},
        },
    },
    "mistral3": {"text_config": {"model_type": "mistral4", **MISTRAL4}},
    "mistral4": MISTRAL4,
    "mixtral": {},
    "muse_spark": {
        "text_config": {
            **{"rope_parameters": ROPE, "layer_rope_theta": [10000.0, 0, 10000.0], "post_norm_eps": 1e-5},
            **{"moe_hidden_size": 32, "num_shared_experts": 0},
            **{"final_logit_softcapping": 30.0, "output_multiplier": 1.0},
        },
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "E", "*", "E", "-", "E"]},
    "olmoe": {},
    "phimoe": {},
    "phixtral": {"num_vocab": 64, "model_dim": 32, "num_heads": 4, "num_layers": 3},
    "prism_hadamard_qwen35": {**PRISM, "text_config": {"num_attention_heads": 8}},
    "qwen2_moe": {},
    "qwen3_5": {"text_config": {}},
    "qwen3_5_moe": {"text_config": {}},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_vl_moe": {"text_config": {}},
    "solar_open": {},
    "step3p5": {},
}
NOT_RUN: dict[str, str] = {}
"""Families that cannot be run here, and why."""
if not mx.metal.is_available():
    NOT_RUN["muse_spark"] = "its attention, norms and routing are kernels that exist for Metal only"
RUN = sorted(set(FAMILIES) - set(NOT_RUN))


def build(family: str, **fields: Any) -> Any:
    """A model of the family as a checkpoint without weights would make it, the weights random and none of them zero."""
    own = {**FAMILIES[family], **fields}
    config = {**BASE, "model_type": family, **own}
    if "text_config" in own:
        config["text_config"] = {**BASE, "model_type": family, **own["text_config"]}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_random_if_zero, model.parameters()))
    return model


def _random_if_zero(weight: mx.array) -> mx.array:
    # Routers that wait for a checkpoint are zero, and would send every token to the same experts.
    if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating) or mx.any(weight).item():
        return weight
    return mx.random.normal(weight.shape).astype(weight.dtype)


def in_mlx_lm() -> set[str]:
    """Names of mlx_lm's model files that use its modules with experts, or a file that does."""
    imported = {path.stem: set(_imports(ast.parse(path.read_text()))) for path in Path(models.__path__[0]).glob("*.py")}
    found = {"SwitchGLU", "SwitchMLP"}
    while more := {name for name, names in imported.items() if names & found} - found:
        found |= more
    return found & imported.keys()


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield (node.module or "").rpartition(".")[2]
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[2] for alias in node.names)
