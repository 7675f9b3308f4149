"""param_groups on real models: Hugging Face's classes with small configs, nanoGPT's shapes, torch's own modules."""

import io
import re

import pytest
import torch
import transformers
from torch import nn

import group_muon
from group_muon import GroupMuon, param_groups


def layouts_of(groups):
    """name → layout"""
    return {name: group["layout"] for group in groups for name, _ in group["params"]}


def names_of(groups):
    return [name for group in groups for name, _ in group["params"]]


def trains(model, **options):
    """Groups the model's weights, takes a step on real gradients and returns (layouts, AdamW's names, table)."""
    table = io.StringIO()
    muon, adamw = param_groups(model, file=table, **options)
    layouts, adamw_names = layouts_of(muon), names_of(adamw)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted([*layouts, *adamw_names]) == sorted(trainable)  # each weight once
    optimizers = [GroupMuon(muon, lr=0.01), torch.optim.AdamW(adamw, lr=0.01)]
    tokens = torch.randint(64, (2, 8))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(input_ids=tokens, labels=tokens).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, p in model.named_parameters():
        if p.grad is not None and p.grad.abs().max() > 0:
            assert not torch.equal(p, before[name]), name
            assert p.isfinite().all(), name
    return layouts, adamw_names, table.getvalue()


SMALL = dict(vocab_size=64, num_hidden_layers=2, hidden_size=48, intermediate_size=96)


def test_gpt2_is_packed_and_stored_in_by_out():
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12)
    layouts, adamw, table = trains(
        transformers.GPT2LMHeadModel(config), group_size=6, rule="random"
    )
    assert layouts["transformer.h.1.attn.c_attn.weight"] == (
        "columns transposed q=12x4@0+4/6:random k=12x4@48+4/6:random~1 v=12x4@96+4/all~2"
    )
    assert layouts["transformer.h.0.attn.c_proj.weight"] == "rows transposed o=12x4@0+4/all"
    assert layouts["transformer.h.0.mlp.c_fc.weight"] == "columns transposed"
    assert "transformer.wte.weight" in adamw and "transformer.wpe.weight" in adamw
    assert "transformer.h.0.ln_1.weight" in adamw and "transformer.h.0.attn.c_attn.bias" in adamw
    assert "packed QKV, 12 heads × 4 (module.num_heads), in × out" in table
    assert (
        "transformer.h.*.attn.c_attn.weight" in table
        and "q 12/6:random k 12/6:random v 12/all" in table
    )


@pytest.mark.parametrize(
    "family, config",
    [
        (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        (transformers.MistralForCausalLM, transformers.MistralConfig),
        (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
        (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
    ],
)
def test_grouped_query_families(family, config):
    model = family(config(**SMALL, num_attention_heads=12, num_key_value_heads=4, head_dim=4))
    layouts, adamw, table = trains(model, group_size=6, rule="interval")
    prefix = "model.layers.0.self_attn."
    assert layouts[prefix + "q_proj.weight"] == "rows q=12x4@0+4/6:interval"
    assert (
        layouts[prefix + "k_proj.weight"] == "rows k=4x4@0+4/4:interval"
    )  # all four: fewer than 6
    assert layouts[prefix + "v_proj.weight"] == "rows v=4x4@0+4/all"
    assert "lm_head.weight" in adamw and "model.embed_tokens.weight" in adamw
    assert "UNRESOLVED" not in table


def test_groupings_of_ones_own_for_each_segment():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_attention_heads=12, num_key_value_heads=4, head_dim=4)
    )
    layouts, _, _ = trains(
        model, group_size={"q": 3, "k": "2:interval", "v": "1@0,4@2000", "o": 2}, rule="random"
    )
    prefix = "model.layers.0.self_attn."
    assert layouts[prefix + "q_proj.weight"].endswith("/3:random")
    assert layouts[prefix + "k_proj.weight"].endswith("/2:interval")
    assert layouts[prefix + "v_proj.weight"].endswith("/1:random,4:random@2000")
    assert layouts[prefix + "o_proj.weight"] == "columns o=12x4@0+4/2:random"


def test_neox_is_interleaved():
    model = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SMALL, num_attention_heads=12)
    )
    layouts, adamw, table = trains(model, group_size=6)
    assert layouts["gpt_neox.layers.0.attention.query_key_value.weight"] == (
        "rows q=12x4@0+12/6:random k=12x4@4+12/6:random~1 v=12x4@8+12/all~2"
    )
    assert "lm_head.weight" in adamw
    assert "interleaved QKV, 12 heads × 4" in table


def rows_of(layout, segment):
    """The rows (or columns) of a segment, read from the layout's text."""
    count, size, first, rest = re.search(
        rf" {segment}=(\d+)x(\d+)@(\d+)([+,][^/]*)/", layout
    ).groups()
    if rest.startswith("+"):
        starts = [int(first) + i * int(rest[1:]) for i in range(int(count))]
    else:
        starts = [int(start) for start in (first + rest).split(",")]
    return [start + i for start in starts for i in range(int(size))]


HEADS = dict(num_attention_heads=12)
FUSED = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12)
    ),
    "bigcode": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(
            vocab_size=64, n_embd=48, n_layer=2, n_head=12, multi_query=False
        )
    ),
    "bigcode, multi-query": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(
            vocab_size=64, n_embd=48, n_layer=2, n_head=12, multi_query=True
        )
    ),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, **HEADS)),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=12)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SMALL, **HEADS, num_key_value_heads=4, pad_token_id=0)
    ),
    "falcon": lambda: transformers.FalconForCausalLM(falcon_config(False, False)),
    "falcon, multi-query": lambda: transformers.FalconForCausalLM(falcon_config(False, True)),
    "falcon, grouped": lambda: transformers.FalconForCausalLM(falcon_config(True, True)),
}


def falcon_config(new, multi_query):
    return transformers.FalconConfig(
        vocab_size=64,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_kv_heads=4 if new else 12,
        new_decoder_architecture=new,
        multi_query=multi_query,
        bias=False,
    )


@pytest.mark.parametrize("family", FUSED)
def test_the_rows_of_a_layout_are_those_the_model_reads(family):
    """Multiplies queries by 2 and divides keys by 2, in the layout's rows: attention must not change.
    With the queries alone it must."""
    model = FUSED[family]().eval()
    muon, _ = param_groups(model, group_size=None, verbose=False)
    fused = [
        (p, g["layout"]) for g in muon for _, p in g["params"] if {"q", "k"} <= set(segments(g))
    ]
    assert len(fused) == 2  # layers
    tokens = torch.randint(64, (1, 6))
    with torch.no_grad():
        for weight, _ in fused:
            weight.mul_(5)  # initial weights are so small that the effect would be too
        reference = model(tokens).logits
        for weight, layout in fused:
            along = weight if layout.startswith("rows") else weight.T
            along[rows_of(layout, "q")] *= 2
        assert not torch.allclose(model(tokens).logits, reference, atol=1e-4)
        for weight, layout in fused:
            along = weight if layout.startswith("rows") else weight.T
            along[rows_of(layout, "k")] /= 2
        assert torch.allclose(model(tokens).logits, reference, atol=1e-5)


def segments(group):
    return [word.split("=")[0] for word in group["layout"].split() if "=" in word]


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_deepseek_mla(q_lora_rank):
    config = transformers.DeepseekV3Config(
        **SMALL, num_attention_heads=12, num_key_value_heads=12, q_lora_rank=q_lora_rank, kv_lora_rank=16,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    assert (
        model.model.layers[0].self_attn.config.head_dim == 4
    )  # the rope part only, so it cannot be trusted
    layouts, _, table = trains(model, group_size=6)
    prefix = "model.layers.0.self_attn."
    query = prefix + ("q_proj.weight" if q_lora_rank is None else "q_b_proj.weight")
    assert layouts[query] == "rows nope=12x6@0+10/6:random rope=12x4@6+10/6:random~1"
    assert layouts[prefix + "kv_b_proj.weight"] == "rows k=12x6@0+11/6:random v=12x5@6+11/all~2"
    assert layouts[prefix + "o_proj.weight"] == "columns o=12x5@0+5/all"
    assert layouts[prefix + "kv_a_proj_with_mqa.weight"] == "rows"
    experts = [name for name in layouts if ".mlp.experts." in name]
    assert experts and "UNRESOLVED" not in table
    if q_lora_rank:
        assert "MLA, 12 heads" in table


def test_bert():
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(**SMALL, num_attention_heads=12, is_decoder=True)
    )
    layouts, _, _ = trains(model, group_size=6)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert layouts[name] == "rows q=12x4@0+4/6:random"


@pytest.mark.parametrize("new, multi_query", [(True, True), (False, True), (False, False)])
def test_falcon_has_three_orders(new, multi_query):
    config = falcon_config(new, multi_query)
    layouts, _, table = trains(transformers.FalconForCausalLM(config), group_size=6)
    layout = layouts["transformer.h.0.self_attention.query_key_value.weight"]
    assert "UNRESOLVED" not in table
    if new:
        assert "k=4x4@12+20/" in layout
    elif multi_query:
        assert "q=12x4@0+4/" in layout and "k=1x4@48+4/" in layout
    else:
        assert "q=12x4@0+12/" in layout


def test_phi3_is_packed_with_fewer_kv_heads():
    config = transformers.Phi3Config(
        **SMALL,
        num_attention_heads=12,
        num_key_value_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    layouts, _, _ = trains(transformers.Phi3ForCausalLM(config), group_size=6)
    assert "k=4x4@48+4/" in layouts["model.layers.0.self_attn.qkv_proj.weight"]


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention: sizes n_head and n_embd, weights c_attn and c_proj."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.n_head, self.n_embd = n_head, n_embd


class NanoGpt(nn.Module):
    def __init__(self, n_head=12, attention=CausalSelfAttention):
        super().__init__()
        self.wte = nn.Embedding(64, 48)
        self.attn = attention(48, n_head)
        self.mlp = nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48))
        self.lm_head = nn.Linear(48, 64, bias=False)
        self.lm_head.weight = self.wte.weight


def test_nanogpt_and_its_tied_head():
    muon, adamw = param_groups(NanoGpt(), 6, verbose=False)
    assert layouts_of(muon)["attn.c_attn.weight"] == (
        "rows q=12x4@0+4/6:random k=12x4@48+4/6:random~1 v=12x4@96+4/all~2"
    )
    assert layouts_of(muon)["mlp.0.weight"] == "rows"
    assert names_of(adamw) == ["wte.weight", "mlp.0.bias", "mlp.1.bias"]


def test_q_and_k_can_share_a_partition():
    muon, _ = param_groups(NanoGpt(), 6, share_qk=True, verbose=False)
    assert "k=12x4@48+4/6:random v" in layouts_of(muon)["attn.c_attn.weight"]


def test_separate_q_and_k_can_share_a_partition_too():
    def llama(kv_heads):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SMALL, num_attention_heads=12, num_key_value_heads=kv_heads, head_dim=4
            )
        )

    muon, _ = param_groups(llama(12), 6, share_qk=True, verbose=False)
    partitions = {name: p for g in muon for (name, _), p in zip(g["params"], g["partitions"])}
    prefix = "model.layers.1.self_attn"
    assert partitions[prefix + ".q_proj.weight"] == partitions[prefix + ".k_proj.weight"] == prefix
    assert partitions["model.layers.0.self_attn.q_proj.weight"] != prefix
    GroupMuon(muon)
    with pytest.raises(ValueError, match="12 query heads and 4 KV heads cannot share"):
        param_groups(llama(4), 6, share_qk=True, verbose=False)


def test_head_counts_are_never_guessed():
    class Silent(CausalSelfAttention):
        def __init__(self, n_embd, n_head):
            super().__init__(n_embd, n_head)
            del self.n_head

    table = io.StringIO()
    muon, _ = param_groups(NanoGpt(attention=Silent), 6, file=table)
    assert layouts_of(muon)["attn.c_attn.weight"] == "rows"
    assert (
        "UNRESOLVED, so plain: neither the module nor its config declares num_heads"
        in table.getvalue()
    )


def test_a_stale_head_count_is_not_trusted():
    """DeepSpeed #8384: the module declares 6 heads of 4, but the weight has rows for 12."""
    model = NanoGpt()
    model.attn.n_head, model.attn.head_dim = 6, 4
    table = io.StringIO()
    muon, _ = param_groups(model, 6, file=table)
    assert layouts_of(muon)["attn.c_attn.weight"] == "rows"
    assert "72 rows declared (module.n_head), but the shape is (144, 48)" in table.getvalue()


def test_unknown_attention_stays_plain_and_is_said():
    class OddAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.mix = nn.Linear(n_embd, n_embd)

    table = io.StringIO()
    muon, _ = param_groups(NanoGpt(attention=OddAttention), 6, file=table)
    assert layouts_of(muon)["attn.mix.weight"] == "rows"
    assert "UNRESOLVED, so plain: OddAttention is not a known kind of attention" in table.getvalue()


def test_tall_projections_are_pointed_out():
    class Tall(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = 12, 8
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, nn.Linear(48, 96))

    table = io.StringIO()
    param_groups(Tall(), 6, file=table)
    assert "ungrouped, its heads share 48 directions" in table.getvalue()


def test_convolutions_and_multihead_attention():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 24, 4)
            self.attn = nn.MultiheadAttention(24, 6, kdim=12, vdim=12)
            self.head = nn.Linear(24, 10)

    muon, adamw = param_groups(Vision(), group_size=3, verbose=False)
    layouts = layouts_of(muon)
    assert layouts["patch.weight"] == "rows flatten"
    assert layouts["attn.k_proj_weight"] == "rows k=6x4@0+4/3:random"
    assert "head.weight" in names_of(adamw)


def test_frozen_weights_are_left_out():
    model = NanoGpt()
    model.attn.requires_grad_(False)
    muon, adamw = param_groups(model, 6, verbose=False)
    assert not any("attn" in name for name in names_of(muon) + names_of(adamw))


def test_a_group_size_that_does_not_divide_names_the_weight():
    with pytest.raises(
        ValueError,
        match="parameter 'attn.c_attn.weight', segment 'q': group size 5 does not divide 12 heads",
    ):
        param_groups(NanoGpt(), 5)


def test_unknown_segments_are_refused():
    with pytest.raises(ValueError, match="unknown segment 'x': use q, k, v or o"):
        param_groups(NanoGpt(), group_size={"x": 2})
    assert group_muon.__version__


class Nested(nn.Module):
    """Nests models as torch.compile, DistributedDataParallel and multimodal models do."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def untied():
    model = NanoGpt()
    model.lm_head = nn.Linear(48, 64, bias=False)
    return model


@pytest.mark.parametrize("name", ["module", "_orig_mod", "language_model"])
def test_a_nested_head_is_still_a_head(name):
    muon, adamw = param_groups(Nested(**{name: untied()}), 6, verbose=False)
    assert f"{name}.lm_head.weight" in names_of(adamw)
    assert f"{name}.attn.c_attn.weight" in names_of(muon)


def test_a_compiled_model_draws_the_partitions_of_the_plain_one():
    def partitions(model):
        return [
            p for group in param_groups(model, 6, verbose=False)[0] for p in group["partitions"]
        ]

    assert partitions(torch.compile(untied())) == partitions(untied())


def test_further_weights_can_be_given_to_adamw():
    _, adamw = param_groups(untied(), 6, adamw=("mlp.1.weight",), verbose=False)
    assert "mlp.1.weight" in names_of(adamw) and "mlp.0.weight" not in names_of(adamw)


def test_tokens_positions_and_biases_of_any_shape_go_to_adamw():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
            self.position_embeddings = nn.Parameter(torch.zeros(1, 17, 48))
            self.experts_bias = nn.Parameter(torch.zeros(4, 48))
            self.experts = nn.Parameter(torch.zeros(2, 4, 8, 16))
            self.up = nn.ConvTranspose2d(4, 6, 3)

    muon, adamw = param_groups(Odd(), None, verbose=False)
    assert names_of(adamw) == ["cls_token", "position_embeddings", "experts_bias", "up.bias"]
    assert layouts_of(muon)["experts"] == "rows stack"
    assert layouts_of(muon)["up.weight"] == "columns transposed flatten"


def test_share_qk_is_for_q_and_k_alone():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL, num_attention_heads=12, num_key_value_heads=12, head_dim=4
        )
    )
    muon, _ = param_groups(model, dict.fromkeys("qkvo", 6), share_qk=True, verbose=False)
    partitions = {name: p for g in muon for (name, _), p in zip(g["params"], g["partitions"])}
    prefix = "model.layers.0.self_attn."
    assert partitions[prefix + "q_proj.weight"] == partitions[prefix + "k_proj.weight"]
    assert partitions[prefix + "v_proj.weight"] == prefix + "v_proj.weight"
    assert partitions[prefix + "o_proj.weight"] == prefix + "o_proj.weight"


def test_a_segment_that_no_weight_has_is_said():
    table = io.StringIO()
    model = transformers.BertLMHeadModel(transformers.BertConfig(**SMALL, **HEADS, is_decoder=True))
    param_groups(model, {"q": 6, "o": 6}, file=table)
    assert "note: no weight has the segment 'o'" in table.getvalue()


def test_a_model_that_is_itself_called_attention_keeps_its_head():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 4)

    _, adamw = param_groups(OddAttention(), 2, verbose=False)
    assert "lm_head.weight" in names_of(adamw)


def test_a_decoder_stack_is_not_a_head():
    class EncoderDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 6, 48), 1)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 6, 48), 1)
            self.out = nn.Linear(24, 64)

    muon, adamw = param_groups(EncoderDecoder(), 3, verbose=False)
    assert "decoder.layers.0.linear1.weight" in names_of(muon)
    assert "decoder.layers.0.self_attn.in_proj_weight" in names_of(muon)
    assert "out.weight" in names_of(adamw) and "decoder.layers.0.linear1.weight" not in names_of(
        adamw
    )


class Fused(nn.Module):
    """An attention that declares its heads but not the order of its rows."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.qkv = 12, nn.Linear(48, 144)


def test_a_module_that_declares_heads_is_not_passed_over():
    table = io.StringIO()
    param_groups(Nested(mix=Fused()), 6, file=table)
    assert "UNRESOLVED, so plain: Fused is not a known kind of attention" in table.getvalue()


def test_layouts_of_ones_own():
    layout = group_muon.packed_qkv(12, 4, q="6:random")
    muon, _ = param_groups(Nested(mix=Fused()), 6, layouts={"qkv.weight": layout}, verbose=False)
    assert layouts_of(muon)["mix.qkv.weight"] == layout
    with pytest.raises(ValueError, match="no weight's name ends with 'kqv.weight'"):
        param_groups(Nested(mix=Fused()), 6, layouts={"kqv.weight": layout})
    with pytest.raises(ValueError, match="no weight's name ends with 'x.weight'"):
        param_groups(NanoGpt(), 6, adamw=["x.weight"])
    with pytest.raises(TypeError, match="adamw should be a list of names"):
        param_groups(NanoGpt(), 6, adamw="x.weight")


def test_the_rule_is_for_texts_without_one():
    def query(group_size):
        muon, _ = param_groups(NanoGpt(), group_size, "random", verbose=False)
        return re.search(r"q=\S*/(\S+)", layouts_of(muon)["attn.c_attn.weight"])[1]

    assert query(6) == query("6") == query({"q": "6"}) == "6:random"
    assert query("1@0, 6@2000") == "1:random,6:random@2000"
    assert query({"q": "2:interval"}) == "2:interval"


def test_a_group_larger_than_the_queries_is_refused():
    with pytest.raises(ValueError, match="group size 24 does not divide 12 heads"):
        param_groups(NanoGpt(), 24)
