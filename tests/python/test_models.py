"""param_groups on real models: Hugging Face's classes with small configs, nanoGPT's shapes, torch's own modules."""

import io
import re

import lightning
import peft
import pytest
import torch
import transformers
from head_checks import changed_columns, check_heads, heads_of
from model_families import (
    FAMILIES,
    GROUPED,
    HEADS,
    LATENT,
    CausalSelfAttention,
    bert,
    dbrx,
    deepseek,
    diffllama,
    gpt2,
    gpt_oss,
    llama,
    llama4,
    modernbert,
    qwen3_next,
    text,
    vectors,
    xlnet,
)
from torch import nn

import group_muon
from group_muon import GroupMuon, param_groups

transformers.logging.set_verbosity_error()


def layouts_of(groups):
    """name → layout, of the weights for Muon"""
    muon = [group for group in groups if group["algorithm"] == "muon"]
    return {name: group["layout"] for group in muon for name, _ in group["params"]}


def roles_of(groups):
    return {name: group["role"] for group in groups for name, _ in group["params"]}


def adamw_of(groups):
    return [n for group in groups if group["algorithm"] == "adamw" for n, _ in group["params"]]


def partitions_of(groups):
    muon = [group for group in groups if group["algorithm"] == "muon"]
    return {n: p for g in muon for (n, _), p in zip(g["params"], g["partitions"])}


def quiet(model, *args, **options):
    return param_groups(model, *args, verbose=False, **options)


def printed(model, *args, **options):
    """The groups and the table."""
    table = io.StringIO()
    return param_groups(model, *args, file=table, **options), table.getvalue()


def line_of(table, name):
    (line,) = [line for line in table.splitlines() if line.startswith(name + " ")]
    return line


def optimizers_of(groups, **options):
    """Muon for its groups, torch's AdamW for the others."""
    kept = ("params", "layout", "partitions")
    muon = [{k: group[k] for k in kept} for group in groups if group["algorithm"] == "muon"]
    adamw = [{"params": g["params"]} for g in groups if g["algorithm"] == "adamw"]
    return [GroupMuon(muon, lr=0.01, **options), *([torch.optim.AdamW(adamw)] if adamw else [])]


def trains(model, **options):
    """Groups the model's weights, takes a step on real gradients and returns (layouts, AdamW's names, table)."""
    groups, table = printed(model, **options)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sorted(roles_of(groups)) == sorted(trainable)  # each weight once
    tokens = torch.randint(3, 64, (2, 8))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(input_ids=tokens, labels=tokens).loss.backward()
    for optimizer in optimizers_of(groups):
        optimizer.step()
    for name, p in model.named_parameters():
        if p.grad is not None and p.grad.abs().max() > 0:
            assert not torch.equal(p, before[name]), name
            assert p.isfinite().all(), name
    return layouts_of(groups), adamw_of(groups), table


# Heads, compared with the forward pass of each family.

OTHER_SEGMENTS = {
    "deepseek": {"nope", "rope", "k", "v"},
    "deepseek, one query weight": {"nope", "rope", "k", "v"},
    "kimi-linear": {"nope", "rope", "q", "k", "v"},
    "qwen3-next": {"q", "gate", "k", "v", "z"},
    "qwen3.5": {"q", "gate", "k", "v"},
}


def prepared(model):
    """Weights so large that every head makes a difference."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.15)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_of_a_family_are_those_of_its_forward_pass(family):
    model, inputs = FAMILIES[family]()
    groups, table = printed(prepared(model), 2)
    assert table.splitlines()[-1].endswith(" 0 guessed, 0 unresolved")
    segments = check_heads(lambda: model(**inputs), groups)
    assert segments == OTHER_SEGMENTS.get(family, {"q", "k", "v"})
    optimizers_of(groups)


@pytest.mark.parametrize(
    "wrong",
    [
        group_muon.interleaved_qkv(12, 4),
        group_muon.packed_qkv(6, 8),
        group_muon.packed_qkv(24, 2),
        "rows v=12x4@0+4/all q=12x4@48+4/all k=12x4@96+4/all",
    ],
)
def test_a_wrong_layout_does_not_pass_that_check(wrong):
    model, inputs = vectors(CausalSelfAttention())
    groups = quiet(prepared(model), 2, layouts={"c_attn.weight": wrong})
    with pytest.raises(AssertionError, match="head"):
        check_heads(lambda: model(**inputs), groups)


def test_gpt2_is_packed_and_stored_in_by_out():
    layouts, adamw, table = trains(gpt2(), group_size=6, rule="random")
    assert layouts["transformer.h.1.attn.c_attn.weight"] == (
        "columns transposed q=12x4@0+4/6:random k=12x4@48+4/6:random~1 v=12x4@96+4/all~2"
    )
    assert layouts["transformer.h.0.attn.c_proj.weight"] == "rows transposed o=12x4@0+4/all"
    assert layouts["transformer.h.0.mlp.c_fc.weight"] == "columns transposed"
    assert "transformer.wte.weight" in adamw and "transformer.wpe.weight" in adamw
    assert "packed QKV, 12 heads × 4 (module.num_heads), in × out" in table
    assert "transformer.h.*.attn.c_attn.weight" in table
    assert "q 12/6:random k 12/6:random v 12/all" in table


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
    model = family(config(**GROUPED, head_dim=4))
    layouts, adamw, table = trains(model, group_size=6, rule="interval")
    prefix = "model.layers.0.self_attn."
    assert layouts[prefix + "q_proj.weight"] == "rows q=12x4@0+4/6:interval"
    assert layouts[prefix + "k_proj.weight"] == "rows k=4x4@0+4/4:interval"  # fewer than 6
    assert layouts[prefix + "v_proj.weight"] == "rows v=4x4@0+4/all"
    assert "lm_head.weight" in adamw and "model.embed_tokens.weight" in adamw
    assert "UNRESOLVED" not in table


def test_groupings_of_ones_own_for_each_segment():
    layouts, _, _ = trains(
        llama(), group_size={"q": 3, "k": "2:interval", "v": "1@0,4@2000", "o": 2}, rule="random"
    )
    prefix = "model.layers.0.self_attn."
    assert layouts[prefix + "q_proj.weight"].endswith("/3:random")
    assert layouts[prefix + "k_proj.weight"].endswith("/2:interval")
    assert layouts[prefix + "v_proj.weight"].endswith("/1:random,4:random@2000")
    assert layouts[prefix + "o_proj.weight"] == "columns o=12x4@0+4/2:random"


def test_neox_is_interleaved():
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**HEADS))
    layouts, adamw, table = trains(model, group_size=6)
    assert layouts["gpt_neox.layers.0.attention.query_key_value.weight"] == (
        "rows q=12x4@0+12/6:random k=12x4@4+12/6:random~1 v=12x4@8+12/all~2"
    )
    assert "lm_head.weight" in adamw
    assert "interleaved QKV, 12 heads × 4" in table


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_deepseek_mla(q_lora_rank):
    model = deepseek(q_lora_rank)
    assert (
        model.model.layers[0].self_attn.config.head_dim == 4
    )  # the rope part, so not to be trusted
    layouts, _, table = trains(model, group_size=6)
    prefix = "model.layers.0.self_attn."
    query = prefix + ("q_proj.weight" if q_lora_rank is None else "q_b_proj.weight")
    assert layouts[query] == "rows nope=12x6@0+10/6:random rope=12x4@6+10/6:random~1"
    assert layouts[prefix + "kv_b_proj.weight"] == "rows k=12x6@0+11/6:random v=12x5@6+11/all~2"
    assert layouts[prefix + "o_proj.weight"] == "columns o=12x5@0+5/all"
    assert layouts[prefix + "kv_a_proj_with_mqa.weight"] == "rows"
    assert [name for name in layouts if ".mlp.experts." in name] and "UNRESOLVED" not in table


def test_the_output_projection_of_bert_lies_beside_its_attention():
    layouts, _, _ = trains(bert(), group_size={"q": 6, "o": 3})
    prefix = "bert.encoder.layer.0.attention."
    assert layouts[prefix + "self.query.weight"] == "rows q=12x4@0+4/6:random"
    assert layouts[prefix + "output.dense.weight"] == "columns o=12x4@0+4/3:random"
    assert layouts["bert.encoder.layer.0.output.dense.weight"] == "rows"  # the MLP's


def test_two_heads_of_diffllama_make_one_head_of_its_output():
    model, inputs = text(prepared(diffllama()))
    layouts = layouts_of(quiet(model, {"q": 1, "o": 1}))
    attention = model.model.layers[0].self_attn
    target = attention.o_proj.weight, layouts["model.layers.0.self_attn.o_proj.weight"]
    query = layouts["model.layers.0.self_attn.q_proj.weight"]
    columns = heads_of(target[1], "o")
    assert len(columns) == 6
    for head, rows in enumerate(heads_of(query, "q")):
        changed = changed_columns(
            lambda: model(**inputs), attention.q_proj.weight, query, rows, target
        )
        assert sorted(changed) == columns[head % 6], head


def test_keys_of_positions_have_heads():
    model, _ = FAMILIES["wav2vec2-conformer"]()
    layouts = layouts_of(quiet(model, 6))
    assert layouts["encoder.layers.0.self_attn.linear_pos.weight"] == "rows k=12x4@0+4/6:random"


def test_query_and_gate_of_a_head_are_separate_segments():
    layouts, _, table = trains(qwen3_next(), group_size=2)
    prefix = "model.layers.1.self_attn."
    assert layouts[prefix + "q_proj.weight"] == "rows q=12x8@0+16/2:random gate=12x8@8+16/all~3"
    assert layouts[prefix + "k_proj.weight"] == "rows k=4x8@0+8/2:random"
    assert layouts[prefix + "o_proj.weight"] == "columns o=12x8@0+8/all"
    assert "query and gate rows per head" in line_of(
        table, "model.layers.*.self_attn.q_proj.weight"
    )


def test_linear_attention_has_heads_of_its_own_number():
    layouts, adamw, _ = trains(qwen3_next(), group_size=4)  # more than the 2 key heads
    prefix = "model.layers.0.linear_attn."
    assert layouts[prefix + "in_proj_qkvz.weight"] == (
        "rows q=2x6@0+44/2:random k=2x6@6+44/2:random~1 v=4x8@12,20,56,64/all~2 z=4x8@28,36,72,80/all~3"
    )
    assert layouts[prefix + "out_proj.weight"] == "columns o=4x8@0+8/all"
    assert {prefix + "A_log", prefix + "conv1d.weight", prefix + "dt_bias"} <= set(adamw)


class GatedQuery(nn.Module):
    """A query weight with twice the rows, in an unknown order."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 12, 4
        self.q_proj, self.o_proj = nn.Linear(48, 96), nn.Linear(48, 48)
        self.k_proj, self.v_proj = nn.Linear(48, 48), nn.Linear(48, 48)


def test_an_unknown_gate_leaves_k_v_and_o_as_they_are():
    groups, table = printed(Nested(attn=GatedQuery()), 6)
    layouts = layouts_of(groups)
    assert layouts["attn.q_proj.weight"] == "rows"
    assert layouts["attn.k_proj.weight"] == "rows k=12x4@0+4/6:random"
    assert layouts["attn.o_proj.weight"] == "columns o=12x4@0+4/all"
    assert "UNRESOLVED, so plain: it has twice the rows" in line_of(table, "attn.q_proj.weight")
    assert table.endswith("8 weights: 7 known, 0 guessed, 1 unresolved\n")


# Where sizes come from.


class NanoGpt(nn.Module):
    def __init__(self, n_head=12, attention=CausalSelfAttention):
        super().__init__()
        self.wte = nn.Embedding(64, 48)
        self.attn = attention(48, n_head)
        self.mlp = nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48))
        self.lm_head = nn.Linear(48, 64, bias=False)
        self.lm_head.weight = self.wte.weight


def untied():
    model = NanoGpt()
    model.lm_head = nn.Linear(48, 64, bias=False)
    return model


class Nested(nn.Module):
    """Nests models as torch.compile, DistributedDataParallel and multimodal models do."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class WithConfig(Nested):
    def __init__(self, config, **children):
        super().__init__(**children)
        self.config = config


class OwnHeads(nn.Module):
    """Linear attention with 2 key heads of 8 and 4 value heads of 6."""

    def __init__(self, **sizes):
        super().__init__()
        for name, value in sizes.items():
            setattr(self, name, value)
        self.q_proj, self.k_proj = nn.Linear(48, 16), nn.Linear(48, 16)
        self.v_proj, self.o_proj = nn.Linear(48, 24), nn.Linear(24, 48)


class Config:
    num_attention_heads, head_dim, num_key_value_heads, model_type = 4, 4, 4, "hybrid"


def test_the_modules_own_sizes_come_before_the_configs():
    """Heads × size is the same in both, so the config's heads would be cut without an error."""
    own = OwnHeads(num_k_heads=2, head_k_dim=8, num_v_heads=4, head_v_dim=6)
    layouts = layouts_of(quiet(WithConfig(Config(), mixer=own), 2))
    assert layouts["mixer.q_proj.weight"] == "rows q=2x8@0+8/2:random"
    assert layouts["mixer.k_proj.weight"] == "rows k=2x8@0+8/2:random"
    assert layouts["mixer.v_proj.weight"] == "rows v=4x6@0+6/all"
    assert layouts["mixer.o_proj.weight"] == "columns o=4x6@0+6/all"


def test_a_config_is_not_trusted_for_a_module_that_says_something_else():
    own = OwnHeads(num_delta_heads=2)
    groups, table = printed(WithConfig(Config(), attn=own), 2)
    assert layouts_of(groups)["attn.q_proj.weight"] == "rows"
    assert "the module declares num_delta_heads = 2, which is not understood" in table


def test_the_config_of_a_part_comes_before_that_of_the_whole():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, nn.Linear(48, 48))

    class Other(Config):
        num_attention_heads, head_dim, num_key_value_heads = 6, 8, 6

    model = WithConfig(Config(), vision=WithConfig(Other(), attn=Tower()))
    assert layouts_of(quiet(model, 2))["vision.attn.q_proj.weight"] == "rows q=6x8@0+8/2:random"


def test_head_counts_are_never_guessed():
    class Silent(CausalSelfAttention):
        def __init__(self, n_embd, n_head):
            super().__init__(n_embd, n_head)
            del self.n_head

    groups, table = printed(NanoGpt(attention=Silent), 6)
    assert layouts_of(groups)["attn.c_attn.weight"] == "rows"
    assert "UNRESOLVED, so plain: neither the module nor its config declares num_heads" in table


def test_a_stale_head_count_is_not_trusted():
    """DeepSpeed #8384: the module declares 6 heads of 4, but the weight has rows for 12."""
    model = NanoGpt()
    model.attn.n_head, model.attn.head_dim = 6, 4
    groups, table = printed(model, 6)
    assert layouts_of(groups)["attn.c_attn.weight"] == "rows"
    assert "72 rows declared (module.n_head), but the shape is (144, 48)" in table


# What is not known.


class Fused(nn.Module):
    """An attention that declares its heads but not the order of its rows."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.dim = 12, 48
        self.qkv, self.out_proj = nn.Linear(48, 144), nn.Linear(48, 48)


def test_unknown_attention_stays_plain_and_is_said():
    class OddAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.mix = nn.Linear(n_embd, n_embd)

    groups, table = printed(NanoGpt(attention=OddAttention), 6)
    assert layouts_of(groups)["attn.mix.weight"] == "rows"
    assert roles_of(groups)["attn.mix.weight"] == "attention"
    assert "UNRESOLVED, so plain: OddAttention is not a known kind of attention" in table


@pytest.mark.parametrize(
    "names",
    ["to_qkv to_out", "W_Q W_K W_V W_O", "w_qs w_ks w_vs fc", "queries keys values", "q kv"],
)
@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(48, 48), lambda: nn.Parameter(torch.zeros(4, 48, 12))]
)
def test_attention_under_other_names_is_unresolved(names, layer):
    """Whatever its class is called, and if it declares no heads."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names.split():
                setattr(self, name, layer())

    _, table = printed(Nested(mix=Mixer()), 2)
    lines = [line for line in table.splitlines() if "UNRESOLVED, so plain: Mixer is not" in line]
    made = [line.split()[0].split(".")[1] for line in lines]
    assert set(names.split()) - {"fc", "to_out", "W_O"} <= set(made)


def test_vectors_and_learned_queries_of_attention_are_no_projections():
    class PoolAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.time_mix_key = nn.Parameter(torch.zeros(1, 1, 48))
            self.query = nn.Parameter(torch.zeros(1, 4, 48))
            self.mix = nn.Linear(48, 48, bias=False)

    groups, table = printed(Nested(pool=PoolAttention()))
    roles = {"time_mix_key": "other", "query": "embedding", "mix.weight": "attention"}
    assert roles_of(groups) == {f"pool.{name}": role for name, role in roles.items()}
    assert table.endswith("3 weights: 2 known, 0 guessed, 1 unresolved\n")


def test_keys_and_values_alone_are_not_attention():
    """RWKV's channel mixing."""

    class ChannelMix(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("key", "receptance", "value"):
                setattr(self, name, nn.Linear(48, 48))

    _, table = printed(Nested(ffn=ChannelMix()))
    assert table.endswith(" 0 guessed, 0 unresolved\n")


def test_a_fused_weight_in_an_unknown_order_is_unresolved():
    groups, table = printed(Nested(mix=Fused()), 6)
    assert layouts_of(groups)["mix.qkv.weight"] == "rows"
    assert "UNRESOLVED, so plain: the row order of fused weights in Fused is unknown" in table
    assert table.endswith("4 weights: 2 known, 0 guessed, 2 unresolved\n")


def test_the_lines_for_unresolved_weights_can_be_pasted():
    model = Nested(layers=nn.ModuleList([Nested(mix=Fused()), Nested(mix=Fused())]))
    _, table = printed(model, 6)
    code = re.search(r"layouts=(\{.*?^\})", table, re.DOTALL | re.MULTILINE)[1]
    pasted = eval(code, {"group_muon": group_muon})
    assert list(pasted) == ["mix.qkv.weight", "mix.out_proj.weight"]
    groups, table = printed(model, 6, layouts=pasted)
    assert table.endswith("8 weights: 8 known, 0 guessed, 0 unresolved\n")
    packed = group_muon.packed_qkv(12, 4, q="6:random", k="6:random")
    assert layouts_of(groups)["layers.1.mix.qkv.weight"] == packed
    assert layouts_of(groups)["layers.0.mix.out_proj.weight"] == "columns o=12x4@0+4/all"


def test_layers_that_differ_have_lines_of_their_own():
    model = Nested(layers=nn.ModuleList([Nested(mix=Fused()), Nested(mix=Fused())]))
    model.layers[1].mix.n_heads = 6
    _, table = printed(model, 6)
    assert '"layers.0.mix.qkv.weight": group_muon.packed_qkv(12, 4, 12,' in table
    assert '"layers.1.mix.qkv.weight": group_muon.packed_qkv(6, 8, 6,' in table


def test_linear_attention_of_an_unknown_kind_is_unresolved():
    class DeltaNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_v_heads = 4
            self.in_proj_qkvz, self.out_proj = nn.Linear(48, 96), nn.Linear(24, 48)

    groups, table = printed(Nested(mixer=DeltaNet()), 2)
    assert set(layouts_of(groups).values()) == {"rows"}
    assert table.count("UNRESOLVED, so plain") == 2


def test_projections_that_no_rule_covers_are_unresolved():
    class Two(CausalSelfAttention):
        def __init__(self):
            super().__init__()
            self.extra_query, self.gate = nn.Linear(48, 48), nn.Linear(48, 12)

    groups, table = printed(Nested(attn=Two()), 2)
    why = "UNRESOLVED, so plain: the purpose of 'extra_query' is unknown"
    assert why in line_of(table, "attn.extra_query.weight")
    assert roles_of(groups)["attn.gate.weight"] == "matrix"
    assert layouts_of(groups)["attn.c_attn.weight"].startswith("rows q=12x4@0+4/2:random")


def test_what_makes_queries_further_inside_attention_is_unresolved():
    """DeepSeek V3.2 selects tokens by an indexer with heads of its own."""
    config = transformers.DeepseekV32Config(
        **LATENT, q_lora_rank=24, index_n_heads=2, index_head_dim=8, index_topk=4
    )
    groups, table = printed(transformers.DeepseekV32ForCausalLM(config), 2)
    indexer = "model.layers.*.self_attn.indexer."
    why = "UNRESOLVED, so plain: DeepseekV32Indexer is not a known kind of attention"
    for name in ("wq_b", "wk", "weights_proj"):
        assert why in line_of(table, f"{indexer}{name}.weight")
    assert layouts_of(groups)["model.layers.0.self_attn.q_b_proj.weight"].startswith("rows nope=")
    assert table.endswith(" 0 guessed, 6 unresolved\n")


def test_keys_further_inside_attention_are_unresolved():
    """DeepSeek V4 compresses keys and values in a module of its own."""

    class WithCompressor(CausalSelfAttention):
        def __init__(self):
            super().__init__()
            self.compressor = Nested(kv_proj=nn.Linear(48, 8), up=nn.Linear(8, 8))

    groups, table = printed(Nested(attn=WithCompressor()), 2)
    why = "UNRESOLVED, so plain: the purpose of 'kv_proj' is unknown"
    assert why in line_of(table, "attn.compressor.kv_proj.weight")
    assert roles_of(groups)["attn.compressor.up.weight"] == "matrix"


def test_experts_of_attention_are_unresolved():
    """Those of JetMoE make queries and outputs."""
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=48, num_hidden_layers=1, num_key_value_heads=4, kv_channels=6,
        intermediate_size=40, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    groups, table = printed(transformers.JetMoeForCausalLM(config), 2)
    for name in ("input_linear", "output_linear"):
        line = line_of(table, f"model.layers.*.self_attention.experts.{name}.weight")
        assert "UNRESOLVED, so plain: experts of attention (JetMoeParallelExperts)" in line
    assert layouts_of(groups)["model.layers.0.mlp.input_linear.weight"] == (
        "rows stack gate=1x40@0+40/all up=1x40@40+40/all~1"
    )
    code = re.search(r"layouts=(\{.*?^\})", table, re.DOTALL | re.MULTILINE)[1]
    eval(code.replace("HEADS, HEAD_DIM", "4, 12"), {"group_muon": group_muon})


def test_an_output_projection_further_inside_is_unresolved():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.o_proj = nn.Linear(48, 60), nn.Linear(60, 48)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = 12, 5
            self.q_proj, self.k_proj = nn.Linear(48, 60), nn.Linear(48, 60)
            self.v_proj, self.result = nn.Linear(48, 60), Gated()

    groups, table = printed(Nested(attn=Attention()), 6)
    why = "UNRESOLVED, so plain: it may be the output projection, by its name"
    assert why in line_of(table, "attn.result.o_proj.weight")
    assert roles_of(groups)["attn.result.gate_proj.weight"] == "matrix"
    assert '"attn.result.o_proj.weight": group_muon.output_projection(12, 5, "all"),' in table


def test_output_projections_in_lists_and_beside_attention():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.head_dim = 12, 4
            self.to_q, self.to_k, self.to_v = (nn.Linear(48, 48) for _ in range(3))
            self.to_out = nn.ModuleList([nn.Linear(48, 48), nn.Dropout()])

    layouts = layouts_of(quiet(Nested(attn=Listed()), 6))
    assert layouts["attn.to_out.0.weight"] == "columns o=12x4@0+4/all"

    config = transformers.LxmertConfig(
        vocab_size=64, hidden_size=48, num_attention_heads=12, l_layers=1, x_layers=1, r_layers=1,
        intermediate_size=96, visual_feat_dim=8,
    )  # fmt: skip
    layouts = layouts_of(quiet(transformers.LxmertModel(config), 6))
    for name in ("layer.0.attention", "x_layers.0.visual_attention", "x_layers.0.lang_self_att"):
        assert layouts[f"encoder.{name}.output.dense.weight"] == "columns o=12x4@0+4/all"
    assert layouts["encoder.layer.0.output.dense.weight"] == "rows"  # the MLP's


def test_guesses_are_marked_and_counted():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_head, self.n_embd = 12, 48
            self.c_attn = nn.Linear(48, 144, bias=False)
            self.transform = nn.Parameter(torch.zeros(24, 48))

    _, table = printed(Nested(mix=Mixer(), head=nn.Linear(48, 10, bias=False)), 6)
    assert "guess: packed QKV, 12 heads × 4" in line_of(table, "mix.c_attn.weight")
    assert "guess: matrix out × in (Mixer.transform)" in line_of(table, "mix.transform")
    assert "guess: output head, by the name 'head'" in line_of(table, "head.weight")
    assert table.endswith("3 weights: 0 known, 3 guessed, 0 unresolved\n")


def test_a_weight_that_makes_queries_and_keys_is_grouped_as_queries():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = 12, 4
            self.q_proj, self.v_proj = nn.Linear(48, 48), nn.Linear(48, 48)
            self.k_proj = self.q_proj

    layouts = layouts_of(quiet(Nested(attn=Shared()), {"q": 6, "k": 2}))
    assert layouts["attn.q_proj.weight"] == "rows q=12x4@0+4/6:random"
    model, _ = FAMILIES["reformer"]()
    layouts = layouts_of(quiet(model, {"q": 2, "k": 4}))
    (shared,) = [layout for name, layout in layouts.items() if "query_key" in name]
    assert shared == "rows q=4x12@0+12/2:random"


# Roles.


def test_every_role_has_a_group_of_its_own():
    groups = quiet(gpt2(), 6)
    adamw = [group["role"] for group in groups if group["algorithm"] == "adamw"]
    assert adamw == ["embedding", "gain", "bias"]  # the head is tied to the embedding
    muon = [group["role"] for group in groups if group["algorithm"] == "muon"]
    assert muon == ["attention", "attention", "matrix"]
    for group in groups:
        expected = {"params", "algorithm", "role", "model_weights"}
        expected |= {"layout", "partitions"} if group["algorithm"] == "muon" else set()
        assert set(group) == expected
    roles = roles_of(groups)
    assert roles["transformer.h.0.ln_1.weight"] == "gain"
    assert roles["transformer.h.0.attn.c_attn.bias"] == "bias"
    assert roles_of(quiet(llama(), 6))["lm_head.weight"] == "head"


def test_every_group_knows_how_many_weights_the_model_trains():
    model = NanoGpt()  # its head is tied
    groups = quiet(model, 6)
    assert {group["model_weights"] for group in groups} == {len(list(model.parameters()))}
    model.attn.requires_grad_(False)
    trained = sum(p.requires_grad for p in model.parameters())
    assert {group["model_weights"] for group in quiet(model, 6)} == {trained}


def test_nanogpt_and_its_tied_head():
    groups = quiet(NanoGpt(), 6)
    assert layouts_of(groups)["attn.c_attn.weight"] == (
        "rows q=12x4@0+4/6:random k=12x4@48+4/6:random~1 v=12x4@96+4/all~2"
    )
    assert layouts_of(groups)["mlp.0.weight"] == "rows"
    assert adamw_of(groups) == ["wte.weight", "mlp.0.bias", "mlp.1.bias"]


@pytest.mark.parametrize(
    "model, head",
    [
        ("RobertaForSequenceClassification", "classifier.out_proj.weight"),
        ("BertForQuestionAnswering", "qa_outputs.weight"),
        ("BertForPreTraining", "cls.seq_relationship.weight"),
        ("BertForSequenceClassification", "classifier.weight"),
        ("ElectraForTokenClassification", "classifier.weight"),
        ("ElectraForPreTraining", "discriminator_predictions.dense_prediction.weight"),
    ],
)
def test_output_heads_of_hugging_face(model, head):
    family = re.match("[A-Z][a-z]+", model)[0]
    config = getattr(transformers, family + "Config")(**HEADS, num_labels=3)
    roles = roles_of(quiet(getattr(transformers, model)(config), 6))
    assert roles[head] == "head"
    # What comes before the last matrix of a head is a matrix like others.
    assert roles.get("classifier.dense.weight", "matrix") == "matrix"


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(48, 24), nn.Linear(24, 10)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(48, 24)
        self.classifier = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))


class Lit(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net, self.loss = net, nn.CrossEntropyLoss()


@pytest.mark.parametrize("net", [ConvNet, Classifier, untied, NanoGpt])
def test_a_lightning_module_is_split_like_the_net_inside(net):
    net = net()
    inside = {"net." + name: role for name, role in roles_of(quiet(net, 6)).items()}
    assert roles_of(quiet(Lit(net), 6)) == inside
    assert "head" in inside.values() or isinstance(net, NanoGpt)


def test_output_heads_in_the_middle_of_a_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.out = nn.Linear(24, 24), nn.Linear(24, 24)

    model = Nested(
        body=Nested(head=nn.Linear(24, 10), blocks=nn.ModuleList([Block(), Block()])),
        ctc_head=nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 5)),
        heads=nn.ModuleList([nn.Linear(24, 2), nn.Linear(24, 3)]),
        seg=Nested(classifier=nn.Conv2d(24, 7, 1)),
    )
    roles = roles_of(quiet(model, None))
    heads = sorted(name for name, role in roles.items() if role == "head")
    assert heads == [
        "body.head.weight",
        "ctc_head.1.weight",
        "heads.0.weight",
        "heads.1.weight",
        "seg.classifier.weight",
    ]


@pytest.mark.parametrize("name", ["module", "_orig_mod", "language_model"])
def test_a_nested_head_is_still_a_head(name):
    groups = quiet(Nested(**{name: untied()}), 6)
    assert roles_of(groups)[f"{name}.lm_head.weight"] == "head"
    assert f"{name}.attn.c_attn.weight" in layouts_of(groups)


def test_a_model_that_is_itself_called_attention_keeps_its_head():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 4)

    assert roles_of(quiet(OddAttention(), 2))["lm_head.weight"] == "head"


def test_what_comes_before_an_output_head_is_a_matrix():
    config = transformers.DistilBertConfig(
        vocab_size=64, dim=48, n_layers=1, n_heads=12, hidden_dim=96
    )
    roles = roles_of(quiet(transformers.DistilBertForSequenceClassification(config), 6))
    assert roles["pre_classifier.weight"] == "matrix" and roles["classifier.weight"] == "head"

    ends = dict(pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
    config = transformers.ModernBertDecoderConfig(**HEADS, **ends, tie_word_embeddings=False)
    roles = roles_of(quiet(transformers.ModernBertDecoderForCausalLM(config), 6))
    assert roles["lm_head.dense.weight"] == "matrix" and roles["decoder.weight"] == "head"


def test_a_decoder_stack_is_not_a_head():
    class EncoderDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 6, 48), 1)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 6, 48), 1)
            self.out = nn.Linear(24, 64)

    roles = roles_of(quiet(EncoderDecoder(), 3))
    assert roles["decoder.layers.0.linear1.weight"] == "matrix"
    assert roles["decoder.layers.0.self_attn.in_proj_weight"] == "attention"
    assert roles["out.weight"] == "head"


def test_what_is_no_matrix_goes_to_adamw_whatever_its_shape():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
            self.position_embeddings = nn.Parameter(torch.zeros(1, 17, 48))
            self.rel_pos_h = nn.Parameter(torch.zeros(15, 8))
            self.relative_position_bias_table = nn.Parameter(torch.zeros(49, 4))
            self.latents = nn.Parameter(torch.zeros(16, 48))
            self.query_tokens = nn.Parameter(torch.zeros(1, 8, 48))
            self.queries = nn.Parameter(torch.zeros(8, 48))
            self.pos_bias_u = nn.Parameter(torch.zeros(4, 12))
            self.A_log = nn.Parameter(torch.zeros(96, 16))
            self.conv_weight = nn.Parameter(torch.zeros(96, 1, 4))
            self.conv1d = nn.Conv1d(96, 96, 4, groups=96, bias=False)
            self.layer_scale = nn.Parameter(torch.zeros(48, 1, 1))
            self.gate = nn.Linear(48, 1, bias=False)

    groups, table = printed(Odd())
    assert layouts_of(groups) == {}
    assert roles_of(groups) == {
        **dict.fromkeys(
            [
                "cls_token",
                "position_embeddings",
                "rel_pos_h",
                "relative_position_bias_table",
                "latents",
            ],
            "embedding",
        ),
        **dict.fromkeys(["query_tokens", "queries"], "embedding"),
        "layer_scale": "gain",
        "pos_bias_u": "bias",
        **dict.fromkeys(["A_log", "conv_weight", "gate.weight", "conv1d.weight"], "other"),
    }
    assert " 0 guessed, 0 unresolved" in table


def test_gains_with_two_dimensions():
    """Cohere normalizes the queries and keys of each head with gains of its own."""
    config = transformers.CohereConfig(**GROUPED, use_qk_norm=True, pad_token_id=0)
    groups, table = printed(transformers.CohereForCausalLM(config), 2)
    norm = "model.layers.0.self_attn.q_norm.weight"
    assert roles_of(groups)[norm] == "gain"
    assert line_of(table, norm.replace("0", "*")).split()[2] == "12×4"
    assert table.endswith(" 0 guessed, 0 unresolved\n")
    roles = roles_of(quiet(Nested(norm=nn.LayerNorm((12, 4)), up=nn.Linear(4, 4, bias=False))))
    assert roles == {"norm.weight": "gain", "norm.bias": "bias", "up.weight": "matrix"}


def test_tables_in_a_list():
    """Reformer's positions are two tables whose vectors are put together."""
    config = transformers.ReformerConfig(
        vocab_size=64, hidden_size=48, num_attention_heads=4, attention_head_size=12, attn_layers=["local"],
        feed_forward_size=64, axial_pos_embds_dim=(16, 32), axial_pos_shape=(4, 8), is_decoder=False,
    )  # fmt: skip
    groups, table = printed(transformers.ReformerModel(config), 1)
    roles = roles_of(groups)
    tables = {role for name, role in roles.items() if "position_embeddings.weights" in name}
    assert tables == {"embedding"}
    assert table.endswith(" 0 guessed, 0 unresolved\n")


def test_state_space_models():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=48, num_hidden_layers=1)
    _, adamw, table = trains(transformers.MambaForCausalLM(config), group_size=None)
    mixer = "backbone.layers.0.mixer."
    assert {mixer + "A_log", mixer + "D", mixer + "conv1d.weight"} <= set(adamw)
    assert "state-space constant, not a matrix" in line_of(table, "backbone.layers.*.mixer.A_log")


def test_tables_of_swin():
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=12, depths=[1, 1], num_heads=[2, 3], window_size=4
    )
    groups, table = printed(transformers.SwinForImageClassification(config), 1)
    roles = roles_of(groups)
    tables = {role for name, role in roles.items() if "bias_table" in name}
    assert tables == {"embedding"} and roles["classifier.weight"] == "head"
    assert table.endswith(" 0 guessed, 0 unresolved\n")


def test_convolutions_and_multihead_attention():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 24, 4)
            self.grouped = nn.Conv2d(24, 32, 3, groups=4, bias=False)
            self.up = nn.ConvTranspose2d(4, 6, 3)
            self.attn = nn.MultiheadAttention(24, 6, kdim=12, vdim=12)
            self.head = nn.Linear(24, 10)

    groups = quiet(Vision(), group_size=3)
    layouts = layouts_of(groups)
    assert layouts["patch.weight"] == "rows flatten"
    assert layouts["grouped.weight"] == "rows flatten group=4x8@0+8/1"  # four matrices 8 × 54
    assert layouts["up.weight"] == "columns transposed flatten"
    assert layouts["attn.k_proj_weight"] == "rows k=6x4@0+4/3:random"
    assert roles_of(groups)["head.weight"] == "head"


# Experts, gates and up-projections.


def update(weight, gradient, layout, **options):
    """What a step changes."""
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    group = {"params": [("w", parameter)], "layout": layout}
    GroupMuon([group], lr=1.0, base_scale="mup", precision="float64", **options).step()
    return parameter.detach() - weight


@pytest.mark.parametrize("build", [gpt_oss, llama4])
def test_experts_stored_in_by_out_step_like_their_transposes(build):
    groups, table = printed(build(), 2, gate_up="one")
    layouts = layouts_of(groups)
    assert "experts × in × out" in table
    for name in ("gate_up_proj", "down_proj"):
        (kind,) = {layout for n, layout in layouts.items() if n.endswith("experts." + name)}
        assert kind == "columns transposed stack"
    gradient = torch.randn(2, 16, 48, dtype=torch.float64)
    weight = torch.zeros_like(gradient)
    mine = update(weight, gradient, kind)
    theirs = update(weight.mT.contiguous(), gradient.mT.contiguous(), "rows stack").mT
    assert torch.allclose(mine, theirs, atol=1e-9)
    # With mup the other reading is 3 times too small: √(16/48) instead of √(48/16).
    assert torch.allclose(update(weight, gradient, "rows stack"), mine / 3, atol=1e-9)


def test_experts_stored_out_by_in_are_known_too():
    groups, table = printed(qwen3_next(), 2, gate_up="one")
    names = [n for n in layouts_of(groups) if ".experts." in n]
    assert {layouts_of(groups)[name] for name in names} == {"rows stack"}
    line = line_of(table, "model.layers.*.mlp.experts.down_proj")
    assert "experts × out × in, module.is_transposed" in line and "guess" not in line


def test_experts_that_do_not_say_how_they_are_stored():
    class Experts(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.hidden_size = hidden
            self.w1 = nn.Parameter(torch.zeros(4, 48, 32))
            self.w2 = nn.Parameter(torch.zeros(4, 32, 48))

    def layouts(hidden):
        groups, table = printed(Nested(experts=Experts(hidden)))
        return list(layouts_of(groups).values()), table

    assert layouts(48)[0] == ["columns transposed stack"] * 2
    assert layouts(32)[0] == ["rows stack"] * 2
    guess, table = layouts(7)
    assert guess == ["rows stack"] * 2 and "2 guessed" in table
    assert "guess: experts × out × in, by default" in table


def test_experts_in_one_matrix_are_blocks_of_their_own():
    layouts, _, table = trains(dbrx(), group_size=2)
    prefix = "transformer.blocks.0.ffn.experts.mlp."
    assert layouts[prefix + "w1"] == layouts[prefix + "v1"] == "rows expert=4x32@0+32/1"
    assert layouts[prefix + "w2"] == "rows transposed expert=4x32@0+32/1"
    assert "UNRESOLVED" not in table
    gradient = torch.randn(4, 32, 48, dtype=torch.float64)
    packed = gradient.flatten(0, 1)
    mine = update(torch.zeros_like(packed), packed, layouts[prefix + "w2"], reference="segment")
    stacked = update(torch.zeros_like(gradient), gradient, "columns transposed stack")
    assert torch.allclose(mine, stacked.flatten(0, 1), atol=1e-9)


def test_unknown_experts_in_one_matrix_are_unresolved():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.w1 = 4, nn.Parameter(torch.zeros(128, 48))

    groups, table = printed(Nested(experts=Experts()))
    assert layouts_of(groups) == {"experts.w1": "rows"}
    assert "UNRESOLVED, so plain: it may hold 4 experts of 32 rows" in table
    assert '"experts.w1": group_muon.pattern(1, expert=(4, 32, 1)),' in table


@pytest.mark.parametrize("gate_up", ["one", "two"])
def test_gate_and_up_in_one_weight_are_one_block_or_two(gate_up):
    phi3, _ = FAMILIES["phi3"]()
    groups, table = printed(phi3, 6, gate_up=gate_up)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    two = "rows gate=1x96@0+96/all up=1x96@96+96/all~1"
    assert layouts_of(groups)[name] == (two if gate_up == "two" else "rows")
    assert f'(gate_up="{gate_up}")' in line_of(table, "model.layers.*.mlp.gate_up_proj.weight")
    assert (
        "gate=" in layouts_of(quiet(modernbert(), 6, gate_up=gate_up))["layers.0.mlp.Wi.weight"]
    ) == (gate_up == "two")
    with pytest.raises(ValueError, match="gate_up should be 'one' or 'two', not 'three'"):
        param_groups(phi3, 6, gate_up="three")


def test_a_gate_in_the_decoder_alone():
    config = transformers.MoonshineConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, encoder_num_hidden_layers=1, pad_token_id=0,
        decoder_num_hidden_layers=1, encoder_num_attention_heads=6, decoder_num_attention_heads=6,
    )  # fmt: skip
    layouts = layouts_of(quiet(transformers.MoonshineModel(config), 6))
    assert layouts["encoder.layers.0.mlp.fc1.weight"] == "rows"
    assert layouts["decoder.layers.0.mlp.fc1.weight"] == (
        "rows gate=1x80@0+80/all up=1x80@80+80/all~1"
    )


def test_two_blocks_are_the_gate_and_the_up_projection():
    """gpt-oss alternates their columns, others store two halves."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    in_turn = layouts_of(quiet(gpt_oss(), 2))[name]
    halves = layouts_of(quiet(qwen3_next(), 2))[name]
    gradient = torch.randn(4, 48, 80, dtype=torch.float64)
    zero = torch.zeros_like(gradient)
    mine = update(zero, gradient, in_turn)
    for first in (0, 1):
        part = gradient[:, :, first::2].contiguous()
        alone = update(torch.zeros_like(part), part, "columns transposed stack")
        assert torch.allclose(mine[:, :, first::2], alone, atol=1e-9)
    assert halves == "rows stack gate=1x16@0+16/all up=1x16@16+16/all~1"


# Adapters and wrappers.


def lora(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))


def test_lora_adapters_have_the_heads_of_their_weights():
    model = lora(llama(), target_modules=["q_proj", "k_proj", "o_proj", "up_proj"])
    layouts, adamw, table = trains(model, group_size=6)
    prefix = "base_model.model.model.layers.0."
    assert layouts[prefix + "self_attn.q_proj.lora_B.default.weight"] == "rows q=12x4@0+4/6:random"
    assert layouts[prefix + "self_attn.k_proj.lora_B.default.weight"] == "rows k=4x4@0+4/4:random"
    assert layouts[prefix + "self_attn.q_proj.lora_A.default.weight"] == "rows"
    assert layouts[prefix + "self_attn.o_proj.lora_A.default.weight"] == "columns o=12x4@0+4/all"
    assert layouts[prefix + "self_attn.o_proj.lora_B.default.weight"] == "rows"
    assert layouts[prefix + "mlp.up_proj.lora_B.default.weight"] == "rows"
    assert adamw == [] and table.endswith(" 0 guessed, 0 unresolved\n")
    line = line_of(table, "base_model.model.model.layers.*.self_attn.q_proj.lora_B.default.weight")
    assert "LoRA B of Q, 12 heads × 4" in line


def test_adalora_adapters_have_the_heads_of_their_weights():
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=["q_proj", "o_proj", "up_proj"]
    )
    groups, table = printed(peft.get_peft_model(llama(), config), 6)
    layouts, prefix = layouts_of(groups), "base_model.model.model.layers.0."
    assert layouts[prefix + "self_attn.q_proj.lora_B.default"] == "rows q=12x4@0+4/6:random"
    assert layouts[prefix + "self_attn.o_proj.lora_A.default"] == "columns o=12x4@0+4/all"
    assert layouts[prefix + "mlp.up_proj.lora_B.default"] == "rows"
    assert table.endswith(" 0 guessed, 0 unresolved\n")


def test_lora_of_experts_has_a_block_for_each_expert():
    """All experts' A are one weight, and so are all their B."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(gpt_oss(), peft.LoraConfig(r=3, target_parameters=experts))
    groups, table = printed(model, 2)
    assert table.endswith(" 0 guessed, 0 unresolved\n")
    wrapped = model.base_model.model.model.layers[0].mlp.experts
    layouts, prefix = layouts_of(groups), "base_model.model.model.layers.0.mlp.experts."
    name_a, name_b = prefix + "lora_A.default.weight", prefix + "lora_B.default.weight"
    a, b = wrapped.lora_A["default"].weight.data, wrapped.lora_B["default"].weight.data
    b.normal_()
    before = wrapped.get_delta_weight("default")
    for expert in range(4):
        for weight, lines in ((a, a[3 * expert : 3 * expert + 3]), (b, b[:, expert::4])):
            saved = weight.clone()
            lines.add_(1)
            changed = (wrapped.get_delta_weight("default") != before).flatten(1).any(1)
            assert changed.nonzero().flatten().tolist() == [expert]
            weight.copy_(saved)
    for layout, kind, line in ((layouts[name_a], "rows", a), (layouts[name_b], "columns", b.T)):
        gradient = torch.randn_like(line, dtype=torch.float64)
        whole = gradient if kind == "rows" else gradient.T.contiguous()
        mine = update(torch.zeros_like(whole), whole, layout)
        mine = mine if kind == "rows" else mine.T
        for expert in range(4):
            part = slice(3 * expert, 3 * expert + 3) if kind == "rows" else slice(expert, None, 4)
            block = gradient[part] if kind == "rows" else gradient[part].T.contiguous()
            alone = update(torch.zeros_like(block), block, "rows")
            alone = alone if kind == "rows" else alone.T
            assert torch.allclose(mine[part], alone, atol=1e-9), (kind, expert)


def test_lora_of_weights_stored_in_by_out():
    model = lora(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    layouts, _, _ = trains(model, group_size=6)
    prefix = "base_model.model.transformer.h.0.attn."
    assert layouts[prefix + "c_attn.lora_B.default.weight"] == (
        "rows q=12x4@0+4/6:random k=12x4@48+4/6:random~1 v=12x4@96+4/all~2"
    )
    assert layouts[prefix + "c_proj.lora_A.default.weight"] == "columns o=12x4@0+4/all"


def test_lora_of_unknown_attention_is_unresolved():
    model = lora(Nested(mix=Fused()), target_modules=["qkv"])
    groups, table = printed(model, 6)
    name = "base_model.model.mix.qkv.lora_B.default.weight"
    assert layouts_of(groups)[name] == "rows"
    assert "UNRESOLVED" in line_of(table, name) and "packed_qkv(12, 4" in table


def test_peft_with_a_head_and_magnitudes():
    config = transformers.RobertaConfig(**HEADS)
    model = transformers.RobertaForSequenceClassification(config)
    roles = roles_of(quiet(lora(model, task_type="SEQ_CLS", use_dora=True), 6))
    saved = "base_model.model.classifier.modules_to_save.default."
    assert roles[saved + "out_proj.weight"] == "head" and roles[saved + "dense.weight"] == "matrix"
    query = "base_model.model.roberta.encoder.layer.0.attention.self.query."
    assert roles[query + "lora_magnitude_vector.default.weight"] == "gain"
    assert roles[query + "lora_B.default.weight"] == "attention"


def test_a_compiled_model_draws_the_partitions_of_the_plain_one():
    compiled = quiet(torch.compile(untied()), 6)
    assert list(partitions_of(compiled).values()) == list(
        partitions_of(quiet(untied(), 6)).values()
    )


def test_weights_behind_a_weight_norm_are_those_of_their_layers():
    model = untied()
    model.conv = nn.Conv1d(8, 8, 3, bias=False)
    plain = quiet(model, 6)
    for layer in (model.attn.c_attn, model.mlp[0], model.lm_head, model.conv):
        nn.utils.parametrizations.weight_norm(layer)
    groups = quiet(model, 6)
    v = "parametrizations.weight.original1"
    assert layouts_of(groups)[f"attn.c_attn.{v}"] == layouts_of(plain)["attn.c_attn.weight"]
    assert layouts_of(groups)[f"conv.{v}"] == "rows flatten"
    assert roles_of(groups)[f"mlp.0.{v}"] == "matrix"
    assert roles_of(groups)[f"lm_head.{v}"] == "head"
    assert roles_of(groups)["attn.c_attn.parametrizations.weight.original0"] == "gain"


def test_a_config_that_refuses_to_answer_leaves_attention_unresolved():
    class Refusing:
        @property
        def num_attention_heads(self):
            raise RuntimeError("it depends on the layer")

    class TowerAttention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, nn.Linear(48, 48))

    _, table = printed(WithConfig(Refusing(), attn=TowerAttention()), 2)
    assert table.count("UNRESOLVED, so plain: neither the module nor its config declares") == 3


@pytest.fixture
def two_processes():
    """The first of two processes. The other one does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_weights_are_refused_in_words(two_processes, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrapped(strategy):
        return FullyShardedDataParallel(
            untied(), sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )  # fmt: skip

    with pytest.raises(
        TypeError, match="'NanoGpt' as one flat vector.*Use DistributedDataParallel"
    ):
        param_groups(wrapped(ShardingStrategy.FULL_SHARD), 6)
    if use_orig_params:
        whole = quiet(wrapped(ShardingStrategy.NO_SHARD), 6)
        assert next(iter(partitions_of(whole).items())) == (
            "_fsdp_wrapped_module.attn.c_attn.weight",
            "attn.c_attn.weight",
        )
        assert sorted(partitions_of(whole).values()) == sorted(
            partitions_of(quiet(untied(), 6)).values()
        )


# What the caller says.


def test_q_and_k_can_share_a_partition():
    layouts = layouts_of(quiet(NanoGpt(), 6, share_qk=True))
    assert "k=12x4@48+4/6:random v" in layouts["attn.c_attn.weight"]


def test_separate_q_and_k_can_share_a_partition_too():
    groups = quiet(llama(num_key_value_heads=12), dict.fromkeys("qkvo", 6), share_qk=True)
    partitions = partitions_of(groups)
    prefix = "model.layers.1.self_attn"
    assert partitions[prefix + ".q_proj.weight"] == partitions[prefix + ".k_proj.weight"] == prefix
    assert partitions["model.layers.0.self_attn.q_proj.weight"] != prefix
    for name in (prefix + ".v_proj.weight", prefix + ".o_proj.weight"):
        assert partitions[name] == name
    optimizers_of(groups)
    with pytest.raises(ValueError, match="12 query heads and 4 KV heads cannot share"):
        quiet(llama(), 6, share_qk=True)


def test_tall_projections_are_pointed_out():
    class Tall(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = 12, 8
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, nn.Linear(48, 96))

    assert "ungrouped, its heads share 48 directions" in printed(Tall(), 6)[1]


def test_frozen_weights_are_left_out():
    model = NanoGpt()
    model.attn.requires_grad_(False)
    assert not any("attn" in name for name in roles_of(quiet(model, 6)))


def test_a_group_size_that_does_not_divide_names_the_weight():
    message = "parameter 'attn.c_attn.weight', segment 'q': group size 5 does not divide 12 heads"
    with pytest.raises(ValueError, match=message):
        param_groups(NanoGpt(), 5)
    with pytest.raises(ValueError, match="group size 24 does not divide 12 heads"):
        param_groups(NanoGpt(), 24)


def test_unknown_segments_are_refused():
    with pytest.raises(ValueError, match="unknown segment 'x': use q, k, v or o"):
        param_groups(NanoGpt(), group_size={"x": 2})


def test_further_weights_can_be_given_to_adamw():
    groups = quiet(untied(), 6, adamw=("mlp.1.weight", "mlp.0.bias"))
    assert roles_of(groups)["mlp.1.weight"] == "other" and roles_of(groups)["mlp.0.bias"] == "bias"
    assert "mlp.0.weight" in layouts_of(groups)


def test_a_segment_that_no_weight_has_is_said():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = 12, 4
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, nn.Linear(48, 48))

    _, table = printed(Queries(), {"q": 6, "o": 6})
    assert "note: no weight has the segment 'o'" in table


def test_layouts_of_ones_own():
    layout = group_muon.packed_qkv(12, 4, q="6:random")
    groups = quiet(Nested(mix=Fused()), 6, layouts={"qkv.weight": layout})
    assert layouts_of(groups)["mix.qkv.weight"] == layout
    assert roles_of(groups)["mix.qkv.weight"] == "attention"
    with pytest.raises(ValueError, match="no weight's name ends with 'kqv.weight'"):
        param_groups(Nested(mix=Fused()), 6, layouts={"kqv.weight": layout})
    with pytest.raises(ValueError, match="no weight's name ends with 'x.weight'"):
        param_groups(NanoGpt(), 6, adamw=["x.weight"])
    with pytest.raises(TypeError, match="adamw should be a list of names"):
        param_groups(NanoGpt(), 6, adamw="x.weight")


def test_the_rule_is_for_texts_without_one():
    def query(group_size):
        layouts = layouts_of(quiet(NanoGpt(), group_size, "random"))
        return re.search(r"q=[^/]*/(\S+)", layouts["attn.c_attn.weight"])[1]

    assert query(6) == query("6") == query({"q": "6"}) == "6:random"
    assert query("1@0, 6@2000") == "1:random,6:random@2000"
    assert (
        query("6*0.5~all*1.5/5@0, 1~2/3@2000") == "6:random*0.5~all*1.5/5,1:random~2:random/3@2000"
    )
    assert query("1, 6*2@0.5lr") == "1:random,6:random*2@0.5lr"
    assert query("2:interval~6/5") == "2:interval~6:random/5"
    assert query({"q": "2:interval"}) == "2:interval"


# Layouts that are written in Python.


def test_patterns_are_what_the_core_would_write():
    pattern = group_muon.pattern
    parts = dict(q=(6, 4, "6:random"), k=(2, 4, "all"), v=(2, 5, "all"))
    packed = group_muon.packed_qkv(6, 4, 2, 5, q="6:random")
    assert pattern(1, **parts) == packed
    parts = dict(q=(3, 4, "6:random"), k=(1, 4, "all"), v=(1, 4, "all"))
    assert pattern(2, **parts) == group_muon.interleaved_qkv(6, 4, 2, q="6:random")
    parts = dict(q=(1, 4, "2:random"), k=(1, 4, "2:random"), v=(1, 4, "all"))
    shared = group_muon.interleaved_qkv(6, 4, q="2:random", k="2:random", share_qk=True)
    assert pattern(6, share_qk=True, **parts) == shared
    assert pattern(6, nope=(1, 4, 2), rope=(1, 3, 2)) == group_muon.mla_query(6, 4, 3, 2)
    for text_form in (packed, shared, pattern(4, q=(2, 3, 1), v=(2, 3, "all"), k=(2, 3, 1))):
        assert group_muon.transposed(group_muon.transposed(text_form)) == text_form


def test_flattened_layouts_are_what_the_core_would_write():
    for layout in (group_muon.plain(), group_muon.output_projection(6, 4)):
        assert group_muon.flattened(group_muon.transposed(layout)) == group_muon.transposed(
            group_muon.flattened(layout)
        )
    assert group_muon.flattened(group_muon.plain()) == group_muon.convolution()
    assert layouts_of(quiet(xlnet(), 6))["layer.0.rel_attn.q"] == (
        "columns transposed flatten q=12x4@0+4/6:random"
    )
    assert layouts_of(quiet(xlnet(), 6))["layer.0.rel_attn.o"] == "columns flatten o=12x4@0+4/all"
