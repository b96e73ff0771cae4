"""The keys of a GGUF file's metadata that models read, by the names that `gguf.Keys` gives them.

A test compares the two. Importing `gguf.constants` takes 7 % of the time in which a small model loads and decodes its
first token. A page whose key is missing here adds it, or writes it out.
"""

from __future__ import annotations


class Keys:
    """Keys by group. `{arch}` in a key stands for the architecture."""

    class General:
        ALIGNMENT = "general.alignment"

    class LLM:
        VOCAB_SIZE = "{arch}.vocab_size"
        CONTEXT_LENGTH = "{arch}.context_length"
        EMBEDDING_LENGTH = "{arch}.embedding_length"
        BLOCK_COUNT = "{arch}.block_count"
        LEADING_DENSE_BLOCK_COUNT = "{arch}.leading_dense_block_count"
        FEED_FORWARD_LENGTH = "{arch}.feed_forward_length"
        EXPERT_FEED_FORWARD_LENGTH = "{arch}.expert_feed_forward_length"
        EXPERT_SHARED_FEED_FORWARD_LENGTH = "{arch}.expert_shared_feed_forward_length"
        EXPERT_CHUNK_FEED_FORWARD_LENGTH = "{arch}.expert_chunk_feed_forward_length"
        USE_PARALLEL_RESIDUAL = "{arch}.use_parallel_residual"
        EXPERT_COUNT = "{arch}.expert_count"
        NUM_DEEPSTACK_LAYERS = "{arch}.n_deepstack_layers"
        EXPERT_USED_COUNT = "{arch}.expert_used_count"
        EXPERT_SHARED_COUNT = "{arch}.expert_shared_count"
        EXPERT_GROUP_COUNT = "{arch}.expert_group_count"
        EXPERT_GROUP_USED_COUNT = "{arch}.expert_group_used_count"
        EXPERT_WEIGHTS_SCALE = "{arch}.expert_weights_scale"
        EXPERT_WEIGHTS_NORM = "{arch}.expert_weights_norm"
        EXPERT_GATING_FUNC = "{arch}.expert_gating_func"
        EXPERT_GROUP_SCALE = "{arch}.expert_group_scale"
        EXPERTS_PER_GROUP = "{arch}.experts_per_group"
        MOE_EVERY_N_LAYERS = "{arch}.moe_every_n_layers"
        MOE_LATENT_SIZE = "{arch}.moe_latent_size"
        NEXTN_PREDICT_LAYERS = "{arch}.nextn_predict_layers"
        POOLING_TYPE = "{arch}.pooling_type"
        LOGIT_SCALE = "{arch}.logit_scale"
        DECODER_BLOCK_COUNT = "{arch}.decoder_block_count"
        ATTN_LOGIT_SOFTCAPPING = "{arch}.attn_logit_softcapping"
        FINAL_LOGIT_SOFTCAPPING = "{arch}.final_logit_softcapping"
        RESCALE_EVERY_N_LAYERS = "{arch}.rescale_every_n_layers"
        TIME_MIX_EXTRA_DIM = "{arch}.time_mix_extra_dim"
        TIME_DECAY_EXTRA_DIM = "{arch}.time_decay_extra_dim"
        RESIDUAL_SCALE = "{arch}.residual_scale"
        EMBEDDING_SCALE = "{arch}.embedding_scale"
        INTERLEAVE_MOE_LAYER_STEP = "{arch}.interleave_moe_layer_step"
        FULL_ATTENTION_INTERVAL = "{arch}.full_attention_interval"
        ACTIVATION_SPARSITY_SCALE = "{arch}.activation_sparsity_scale"
        ALTUP_ACTIVE_IDX = "{arch}.altup.active_idx"
        ALTUP_NUM_INPUTS = "{arch}.altup.num_inputs"
        EMBD_LENGTH_PER_LAYER_INP = "{arch}.embedding_length_per_layer_input"
        SWIGLU_CLAMP_EXP = "{arch}.swiglu_clamp_exp"
        SWIGLU_CLAMP_SHEXP = "{arch}.swiglu_clamp_shexp"

    class Attention:
        HEAD_COUNT = "{arch}.attention.head_count"
        HEAD_COUNT_KV = "{arch}.attention.head_count_kv"
        MAX_ALIBI_BIAS = "{arch}.attention.max_alibi_bias"
        CLAMP_KQV = "{arch}.attention.clamp_kqv"
        KEY_LENGTH = "{arch}.attention.key_length"
        VALUE_LENGTH = "{arch}.attention.value_length"
        LAYERNORM_EPS = "{arch}.attention.layer_norm_epsilon"
        LAYERNORM_RMS_EPS = "{arch}.attention.layer_norm_rms_epsilon"
        CAUSAL = "{arch}.attention.causal"
        Q_LORA_RANK = "{arch}.attention.q_lora_rank"
        KV_LORA_RANK = "{arch}.attention.kv_lora_rank"
        DECAY_LORA_RANK = "{arch}.attention.decay_lora_rank"
        ICLR_LORA_RANK = "{arch}.attention.iclr_lora_rank"
        VALUE_RESIDUAL_MIX_LORA_RANK = "{arch}.attention.value_residual_mix_lora_rank"
        GATE_LORA_RANK = "{arch}.attention.gate_lora_rank"
        REL_BUCKETS_COUNT = "{arch}.attention.relative_buckets_count"
        SLIDING_WINDOW = "{arch}.attention.sliding_window"
        SCALE = "{arch}.attention.scale"
        OUTPUT_SCALE = "{arch}.attention.output_scale"
        TEMPERATURE_LENGTH = "{arch}.attention.temperature_length"
        KEY_LENGTH_MLA = "{arch}.attention.key_length_mla"
        VALUE_LENGTH_MLA = "{arch}.attention.value_length_mla"
        KEY_LENGTH_SWA = "{arch}.attention.key_length_swa"
        VALUE_LENGTH_SWA = "{arch}.attention.value_length_swa"
        SHARED_KV_LAYERS = "{arch}.attention.shared_kv_layers"
        SLIDING_WINDOW_PATTERN = "{arch}.attention.sliding_window_pattern"
        TEMPERATURE_SCALE = "{arch}.attention.temperature_scale"

        class Indexer:
            HEAD_COUNT = "{arch}.attention.indexer.head_count"
            KEY_LENGTH = "{arch}.attention.indexer.key_length"
            TOP_K = "{arch}.attention.indexer.top_k"

    class Rope:
        DIMENSION_COUNT = "{arch}.rope.dimension_count"
        DIMENSION_COUNT_SWA = "{arch}.rope.dimension_count_swa"
        DIMENSION_SECTIONS = "{arch}.rope.dimension_sections"
        FREQ_BASE = "{arch}.rope.freq_base"
        FREQ_BASE_SWA = "{arch}.rope.freq_base_swa"
        SCALING_TYPE = "{arch}.rope.scaling.type"
        SCALING_FACTOR = "{arch}.rope.scaling.factor"
        SCALING_ATTN_FACTOR = "{arch}.rope.scaling.attn_factor"
        SCALING_ORIG_CTX_LEN = "{arch}.rope.scaling.original_context_length"
        SCALING_FINETUNED = "{arch}.rope.scaling.finetuned"
        SCALING_YARN_LOG_MUL = "{arch}.rope.scaling.yarn_log_multiplier"
        SCALING_YARN_EXT_FACTOR = "{arch}.rope.scaling.yarn_ext_factor"
        SCALING_YARN_ATTN_FACTOR = "{arch}.rope.scaling.yarn_attn_factor"
        SCALING_YARN_BETA_FAST = "{arch}.rope.scaling.yarn_beta_fast"
        SCALING_YARN_BETA_SLOW = "{arch}.rope.scaling.yarn_beta_slow"

    class SSM:
        CONV_KERNEL = "{arch}.ssm.conv_kernel"
        INNER_SIZE = "{arch}.ssm.inner_size"
        STATE_SIZE = "{arch}.ssm.state_size"
        TIME_STEP_RANK = "{arch}.ssm.time_step_rank"
        GROUP_COUNT = "{arch}.ssm.group_count"
        DT_B_C_RMS = "{arch}.ssm.dt_b_c_rms"

    class KDA:
        HEAD_DIM = "{arch}.kda.head_dim"

    class WKV:
        HEAD_SIZE = "{arch}.wkv.head_size"

    class Classifier:
        OUTPUT_LABELS = "{arch}.classifier.output_labels"

    class ShortConv:
        L_CACHE = "{arch}.shortconv.l_cache"

    class xIELU:
        ALPHA_P = "xielu.alpha_p"
        ALPHA_N = "xielu.alpha_n"
        BETA = "xielu.beta"
        EPS = "xielu.eps"
