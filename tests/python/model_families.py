"""A tiny model of each family that param_groups knows: name → () → (model, inputs).

Sizes differ from each other wherever a family allows it, so that mistaking one for another shows.
"""

import torch
import transformers as hf
from torch import nn
from transformers.models.sam import modeling_sam

SMALL = dict(vocab_size=64, num_hidden_layers=2, hidden_size=48, intermediate_size=96)
HEADS = dict(**SMALL, num_attention_heads=12)
GROUPED = dict(**HEADS, num_key_value_heads=4)
GPT2 = dict(vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12)
VISION = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, intermediate_size=96
)  # fmt: skip
TYPES = ["linear_attention", "full_attention"]
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=8
)  # fmt: skip
LATENT = dict(
    **HEADS, num_key_value_heads=12, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=24,
    first_k_dense_replace=1,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
RELATIVE = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16)


def text(model, **inputs):
    generator = torch.Generator().manual_seed(3)
    return model, {"input_ids": torch.randint(3, 64, (2, 8), generator=generator), **inputs}


def image(model):
    return model, {"pixel_values": torch.randn(1, 3, 32, 32)}


def translation(model):
    return text(model, decoder_input_ids=torch.randint(3, 64, (2, 5)))


def falcon(new, multi_query):
    return hf.FalconForCausalLM(
        hf.FalconConfig(
            **HEADS,
            num_kv_heads=4 if new else 12,
            new_decoder_architecture=new,
            multi_query=multi_query,
            bias=False,
        )
    )


def bigcode(multi_query):
    return hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**GPT2, multi_query=multi_query))


def deepseek(q_lora_rank):
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT, q_lora_rank=q_lora_rank))


def gpt2(**options):
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **options))


def llama(**options):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "head_dim": 4, **options}))


def bert(**options):
    return hf.BertLMHeadModel(hf.BertConfig(**HEADS, is_decoder=True, **options))


def qwen3_next():
    config = hf.Qwen3NextConfig(
        **GROUPED, **LINEAR, **EXPERTS, head_dim=8, layer_types=TYPES, shared_expert_intermediate_size=16
    )  # fmt: skip
    return hf.Qwen3NextForCausalLM(config)


def olmo_hybrid():
    linear = {**LINEAR, "linear_num_key_heads": 4}
    config = hf.OlmoHybridConfig(
        **HEADS, num_key_value_heads=12, layer_types=TYPES, pad_token_id=0, **linear
    )
    model = hf.OlmoHybridForCausalLM(config)
    for name in ("q_norm", "k_norm"):  # they are norms over all heads, which would mix them
        setattr(model.model.layers[1].self_attn, name, nn.Identity())
    return model


def kimi_linear():
    config = hf.KimiLinearConfig(
        **LATENT, layer_types=TYPES, linear_num_heads=4, linear_head_dim=6, pad_token_id=0
    )
    return hf.KimiLinearForCausalLM(config)


def minimax():
    config = hf.MiniMaxConfig(
        **GROUPED, head_dim=4, layer_types=TYPES, num_local_experts=4, num_experts_per_tok=2, block_size=4
    )  # fmt: skip
    model = hf.MiniMaxForCausalLM(config)
    model.model.layers[0].self_attn.norm = nn.Identity()  # a norm over all heads
    return model


def gpt_oss():
    sizes = {**GROUPED, "intermediate_size": 40}
    config = hf.GptOssConfig(**sizes, head_dim=4, num_local_experts=4, num_experts_per_tok=2)
    return hf.GptOssForCausalLM(config)


def llama4():
    config = hf.Llama4TextConfig(
        **{**GROUPED, "intermediate_size": 40}, head_dim=4, intermediate_size_mlp=56, num_local_experts=4,
        pad_token_id=0, attention_chunk_size=16,
    )  # fmt: skip
    return hf.Llama4ForCausalLM(config)


def dbrx():
    config = hf.DbrxConfig(
        vocab_size=64, d_model=48, n_heads=12, n_layers=2, max_seq_len=32,
        attn_config=dict(kv_n_heads=4, clip_qkv=1e3, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, hidden_size=48),
    )  # fmt: skip
    return hf.DbrxForCausalLM(config)


def t5():
    config = hf.T5Config(vocab_size=64, d_model=48, d_kv=6, d_ff=96, num_layers=2, num_heads=4)
    return hf.T5ForConditionalGeneration(config)


def bart():
    config = hf.BartConfig(
        vocab_size=64, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=12,
        decoder_attention_heads=6, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=32,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def modernbert(**options):
    ends = dict(pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
    return hf.ModernBertModel(hf.ModernBertConfig(**HEADS, **ends, **options))


def longformer():
    model = hf.LongformerModel(hf.LongformerConfig(**HEADS, attention_window=4, pad_token_id=0))
    return text(model, global_attention_mask=torch.tensor([[1] + [0] * 7] * 2))


def reformer():
    config = hf.ReformerConfig(
        vocab_size=64, hidden_size=48, num_attention_heads=4, attention_head_size=12, attn_layers=["local", "lsh"],
        feed_forward_size=64, axial_pos_embds=False, is_decoder=False, max_position_embeddings=32,
        lsh_attn_chunk_length=8, local_attn_chunk_length=8, num_buckets=2, hash_seed=0,
    )  # fmt: skip
    return hf.ReformerModel(config)


def moshi():
    config = hf.MoshiConfig(
        **GROUPED, head_dim=4, ffn_dim=96, audio_vocab_size=16, num_codebooks=2, pad_token_id=0
    )
    return hf.MoshiForCausalLM(config)


def xlnet():
    return hf.XLNetModel(
        hf.XLNetConfig(vocab_size=64, d_model=48, n_layer=2, n_head=12, d_inner=96)
    )


def sam():
    sizes = {**VISION, "mlp_dim": 96, "output_channels": 16, "window_size": 2}
    del sizes["intermediate_size"]
    return hf.SamVisionModel(hf.SamVisionConfig(**sizes, global_attn_indexes=[1]))


class SamCross(nn.Module):
    """The cross-attention of SAM's mask decoder, which is narrower than the model."""

    def __init__(self):
        super().__init__()
        config = hf.SamMaskDecoderConfig(hidden_size=48, num_attention_heads=4)
        self.cross_attn = modeling_sam.SamAttention(config, downsample_rate=2)

    def forward(self, x):
        x = x[None, None]
        return self.cross_attn(x, x, x)


def internvl():
    return hf.InternVLVisionModel(hf.InternVLVisionConfig(**VISION))


def pix2struct():
    sizes = {**VISION, "d_kv": 12, "d_ff": 96, "patch_embed_hidden_size": 20, "seq_len": 16}
    del sizes["intermediate_size"], sizes["image_size"]
    model = hf.Pix2StructVisionModel(hf.Pix2StructVisionConfig(**sizes))
    rows_and_columns = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0))
    patches = torch.cat([rows_and_columns, torch.randn(6, 20)], -1)
    return model, {"flattened_patches": patches[None]}


def conformer():
    config = hf.Wav2Vec2ConformerConfig(
        **HEADS, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, position_embeddings_type="relative",
        conv_depthwise_kernel_size=3,
    )  # fmt: skip
    return hf.Wav2Vec2ConformerModel(config), {"input_values": torch.randn(1, 200)}


def parakeet():
    config = hf.ParakeetEncoderConfig(
        **HEADS,
        num_mel_bins=16,
        subsampling_conv_channels=8,
        subsampling_factor=2,
        conv_kernel_size=3,
    )
    return hf.ParakeetEncoder(config), {"input_features": torch.randn(1, 20, 16)}


def diffllama():
    return hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**GROUPED, head_dim=4))


def led():
    config = hf.LEDConfig(
        vocab_size=64, d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=12,
        decoder_attention_heads=6, encoder_ffn_dim=96, decoder_ffn_dim=96, attention_window=[4],
        max_encoder_position_embeddings=32, max_decoder_position_embeddings=32,
    )  # fmt: skip
    model, inputs = translation(hf.LEDModel(config))
    return model, {**inputs, "global_attention_mask": torch.tensor([[1] + [0] * 7] * 2)}


def attend(q, k, v):
    """tokens × heads × head_dim, three times → tokens × (heads · head_dim)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scores = (q @ k.transpose(1, 2)).softmax(-1)
    return (scores @ v).transpose(0, 1).flatten(1)


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: sizes n_head and n_embd, weights c_attn and c_proj."""

    def __init__(self, n_embd=48, n_head=12):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x):
        q, k, v = (
            part.view(len(x), self.n_head, -1) for part in self.c_attn(x).split(self.n_embd, -1)
        )
        return self.c_proj(attend(q, k, v))


class Attention(nn.Module):
    """timm's attention: sizes num_heads and head_dim, weights qkv and proj."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 6, 10
        self.qkv, self.proj = nn.Linear(48, 180), nn.Linear(60, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(len(x), 3, 6, 10).unbind(1)
        return self.proj(attend(q, k, v))


class TimmAttention(Attention):
    __module__ = "timm.layers.attention"


class LlamaReference(nn.Module):
    """The attention of Llama's own code: wq, wk, wv and wo, fewer KV heads."""

    def __init__(self):
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = 6, 2, 10
        self.wq, self.wo = nn.Linear(48, 60, bias=False), nn.Linear(60, 48, bias=False)
        self.wk, self.wv = nn.Linear(48, 20, bias=False), nn.Linear(48, 20, bias=False)

    def forward(self, x):
        q, k, v = (w(x).view(len(x), -1, 10) for w in (self.wq, self.wk, self.wv))
        return self.wo(attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)))


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, called with one input."""

    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(48, 6, **options)

    def forward(self, x):
        return self.attn(x, x[:, : self.attn.kdim], x[:, : self.attn.vdim])[0]


class Outer(nn.Module):
    """A model around an attention module."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x):
        return self.attn(x)


def vectors(attention):
    return Outer(attention), {"x": torch.randn(7, 48)}


FAMILIES = {
    "gpt2": lambda: text(gpt2()),
    "gpt2, cross-attention": lambda: text(
        gpt2(add_cross_attention=True), encoder_hidden_states=torch.randn(2, 5, 48)
    ),
    "ctrl": lambda: text(
        hf.CTRLModel(
            hf.CTRLConfig(vocab_size=64, n_positions=16, n_embd=48, dff=96, n_layer=2, n_head=12)
        )
    ),
    "openai": lambda: text(hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(**GPT2))),
    "bigcode": lambda: text(bigcode(False)),
    "bigcode, multi-query": lambda: text(bigcode(True)),
    "llama": lambda: text(llama()),
    "mistral": lambda: text(hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, head_dim=4))),
    "qwen2": lambda: text(hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED))),
    "qwen3": lambda: text(hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8))),
    "gemma3": lambda: text(hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED, head_dim=8))),
    "gpt-oss": lambda: text(gpt_oss()),
    "llama4": lambda: text(llama4()),
    "phi3": lambda: text(
        hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    ),
    "neox": lambda: text(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**HEADS))),
    "bloom": lambda: text(
        hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=12))
    ),
    "falcon": lambda: text(falcon(False, False)),
    "falcon, multi-query": lambda: text(falcon(False, True)),
    "falcon, grouped": lambda: text(falcon(True, True)),
    "persimmon": lambda: text(hf.PersimmonForCausalLM(hf.PersimmonConfig(**HEADS))),
    "codegen": lambda: text(
        hf.CodeGenForCausalLM(hf.CodeGenConfig(**{**GPT2, "n_head": 8}, n_ctx=32, rotary_dim=4))
    ),
    "mpt": lambda: text(
        hf.MptForCausalLM(
            hf.MptConfig(vocab_size=64, d_model=48, n_heads=12, n_layers=2, max_seq_len=32)
        )
    ),
    "dbrx": lambda: text(dbrx()),
    "deepseek": lambda: text(deepseek(24)),
    "deepseek, one query weight": lambda: text(deepseek(None)),
    "qwen3-next": lambda: text(qwen3_next()),
    "qwen3.5": lambda: text(
        hf.Qwen3_5ForCausalLM(
            hf.Qwen3_5TextConfig(**GROUPED, **LINEAR, head_dim=8, layer_types=TYPES)
        )
    ),
    "olmo-hybrid": lambda: text(olmo_hybrid()),
    "kimi-linear": lambda: text(kimi_linear()),
    "minimax": lambda: text(minimax()),
    "moshi": lambda: text(moshi()),
    "t5": lambda: translation(t5()),
    "bart": lambda: translation(bart()),
    "bert": lambda: text(bert()),
    "albert": lambda: text(hf.AlbertModel(hf.AlbertConfig(**HEADS, embedding_size=16))),
    "distilbert": lambda: text(
        hf.DistilBertModel(
            hf.DistilBertConfig(vocab_size=64, dim=48, n_layers=2, n_heads=12, hidden_dim=96)
        )
    ),
    "deberta": lambda: text(hf.DebertaModel(hf.DebertaConfig(**HEADS, **RELATIVE))),
    "deberta-v2": lambda: text(hf.DebertaV2Model(hf.DebertaV2Config(**HEADS, **RELATIVE))),
    "modernbert": lambda: text(modernbert()),
    "longformer": longformer,
    "led": led,
    "reformer": lambda: text(reformer()),
    "xlnet": lambda: text(xlnet()),
    "sam": lambda: image(sam()),
    "sam, mask decoder": lambda: vectors(SamCross()),
    "vit": lambda: image(hf.ViTForImageClassification(hf.ViTConfig(**VISION))),
    "internvl": lambda: image(internvl()),
    "pix2struct": pix2struct,
    "wav2vec2-conformer": conformer,
    "parakeet": parakeet,
    "blip": lambda: image(hf.BlipVisionModel(hf.BlipVisionConfig(**VISION))),
    "timm": lambda: vectors(TimmAttention()),
    "nanogpt": lambda: vectors(CausalSelfAttention()),
    "llama's own code": lambda: vectors(LlamaReference()),
    "multihead attention": lambda: vectors(SelfAttention()),
    "multihead attention, separate": lambda: vectors(SelfAttention(kdim=24, vdim=30)),
}
