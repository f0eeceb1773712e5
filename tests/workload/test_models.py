"""The workloads' models: against torch's own layers and plain formulas, as built from conf/workload/."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from sweep.config.schema import Attention, WorkloadConf
from sweep.errors import BadInput
from sweep.workload import build_data, build_loss, build_model, build_optimizer, find_blocks
from sweep.workload.models import (
    Block,
    ResidualNet,
    SelfAttention,
    SwiGlu,
    Transformer,
    VisionTransformer,
    eager_attention,
    rope_tables,
    rotate,
)

CONF = Path(__file__).parents[2] / "conf"
PARAMETERS = {
    "gpt_tiny": 1_635_584,
    "text": 1_635_584,
    "gpt2_124m": 124_439_808 + 47 * 768,  # the published number, and the rows that pad the vocabulary
    "llama_1b": 1_235_814_400,
    "vit_digits": 674_218,
    "convnet_digits": 149_162,
}
WORKLOADS = sorted(PARAMETERS)  # those made of the models that are tested here

GPT: dict[str, Any] = {"vocab_size": 50, "max_seq_len": 12, "layers": 2, "d_model": 32, "heads": 4}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "d_ff": 48,
}  # fmt: skip
FLAVOURS = pytest.mark.parametrize("flavour", [GPT, LLAMA], ids=["gpt", "llama"])


def workload(name: str, *overrides: str) -> WorkloadConf:
    """conf/workload/NAME.yaml as its dataclass, interpolations resolved."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose(config_name=f"workload/{name}", overrides=list(overrides))
    typed = OmegaConf.merge(OmegaConf.structured(WorkloadConf), composed.workload)
    conf = OmegaConf.to_object(OmegaConf.create({"workload": typed}))["workload"]  # type: ignore[call-overload,index]
    assert isinstance(conf, WorkloadConf)
    return conf


def tokens(batch: int = 3, seq_len: int = 12, vocab_size: int = 50) -> Tensor:
    return torch.randint(vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(1))


def transformer(seed: int = 0, **kwargs: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(**kwargs)


# What the configuration gives


@pytest.mark.parametrize("name", WORKLOADS)
def test_yaml_gives_the_parameters_that_it_names(name: str) -> None:
    conf = workload(name)
    assert conf.name == name
    with torch.device("meta"):
        model = instantiate(conf.model)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_gpt2_has_its_published_size_with_its_own_vocabulary() -> None:
    with torch.device("meta"):
        model = instantiate(workload("gpt2_124m", "workload.model.vocab_size=50257").model)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


@pytest.mark.parametrize("name", WORKLOADS)
def test_blocks_are_found_and_alike(name: str) -> None:
    conf = workload(name)
    with torch.device("meta"):
        model = instantiate(conf.model)
    blocks = find_blocks(model, conf.blocks)
    assert [block.name for block in blocks] == [f"blocks.{i}" for i in range(conf.model["layers"])]
    shapes = [[p.shape for p in block.module.parameters()] for block in blocks]
    assert all(s == shapes[0] for s in shapes)


@pytest.mark.parametrize("name", ["gpt_tiny", "gpt2_124m", "llama_1b", "vit_digits"])
def test_attention_and_sequence_length_come_from_the_workload(name: str) -> None:
    kind = "workload.attention=eager"
    conf = workload(name, kind) if name == "vit_digits" else workload(name, kind, "workload.seq_len=64")
    with torch.device("meta"):
        model = instantiate(conf.model)
    assert {m.kind for m in model.modules() if isinstance(m, SelfAttention)} == {Attention.eager}
    if name != "vit_digits":
        assert model.max_seq_len == 64
        assert build_data(conf).train_batch(0, 2)["inputs"].shape == (2, 64)


@pytest.mark.parametrize(("name", "batch_size"), [("gpt_tiny", 4), ("vit_digits", 64), ("convnet_digits", 64)])
def test_the_loss_goes_down_on_real_data(name: str, batch_size: int) -> None:
    conf = workload(name, f"workload.global_batch_size={batch_size}")
    model, data, loss = build_model(conf), build_data(conf), build_loss(conf)
    optimizer = build_optimizer(conf, model)
    losses = []
    for step in range(20):
        batch = data.train_batch(step, conf.global_batch_size)
        optimizer.zero_grad()
        mean = loss(model, batch) / loss.count(batch)
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    classes = conf.model["vocab_size" if "vocab_size" in conf.model else "classes"]
    assert losses[0] == pytest.approx(math.log(classes), rel=0.2), "an untrained model guesses"
    assert sum(losses[-3:]) / 3 < 0.95 * losses[0]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters()), "every parameter takes part"


# Fake and meta tensors


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_builds_and_runs_on_fake_tensors(name: str, attention: str) -> None:
    conf = workload(name, f"++workload.attention={attention}")
    image = conf.seq_len is None
    with FakeTensorMode(allow_non_fake_inputs=False):
        model = instantiate(conf.model)
        inputs = torch.empty(2, 1, 8, 8) if image else torch.zeros(2, conf.seq_len or 0, dtype=torch.int64)
        targets = torch.zeros(2, dtype=torch.int64) if image else inputs
        build_loss(conf)(model, {"inputs": inputs, "targets": targets}).backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@FLAVOURS
def test_builds_and_runs_on_meta(flavour: dict[str, Any], attention: str) -> None:
    with torch.device("meta"):
        model = Transformer(**flavour, attention=attention, dropout=0.1)
        logits = model(torch.zeros(2, 12, dtype=torch.int64))
    assert logits.shape == (2, 12, 50)
    assert logits.is_meta
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])


# Transformer


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@FLAVOURS
def test_a_later_token_changes_no_earlier_logit(flavour: dict[str, Any], attention: str) -> None:
    model = transformer(**flavour, attention=attention).eval()
    before = tokens()
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 50
    change = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert change[:7].max() == 0
    assert change[7:].min() > 0


@FLAVOURS
def test_sdpa_equals_eager(flavour: dict[str, Any]) -> None:
    grads = []
    for kind in ("sdpa", "eager"):
        model = transformer(**flavour, attention=kind).eval()
        out = model(tokens())
        out.square().sum().backward()
        grads.append([out, *(p.grad for p in model.parameters())])
    for fused, written_out in zip(*grads, strict=True):
        torch.testing.assert_close(fused, written_out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_gpt_block_equals_torchs_own_layer(causal: bool) -> None:
    torch.manual_seed(0)
    ours = Block(32, 4, causal=causal).eval()
    theirs = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation=nn.GELU(approximate="tanh"), batch_first=True, norm_first=True
    )
    for part in (ours.attn.query, ours.attn.key, ours.attn.value, ours.attn.out, ours.mlp.up, ours.mlp.down):
        nn.init.normal_(part.weight, std=0.3)
        nn.init.normal_(part.bias, std=0.3)
    qkv = (ours.attn.query, ours.attn.key, ours.attn.value)
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([part.weight for part in qkv]),
            "self_attn.in_proj_bias": torch.cat([part.bias for part in qkv]),
            **{f"self_attn.out_proj.{k}": v for k, v in ours.attn.out.state_dict().items()},
            **{f"linear1.{k}": v for k, v in ours.mlp.up.state_dict().items()},
            **{f"linear2.{k}": v for k, v in ours.mlp.down.state_dict().items()},
            **{f"norm1.{k}": v for k, v in ours.norm1.state_dict().items()},
            **{f"norm2.{k}": v for k, v in ours.norm2.state_dict().items()},
        }
    )
    x = torch.randn(3, 9, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(9) if causal else None
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_query_attention_equals_one_head_at_a_time(kind: str, kv_heads: int) -> None:
    torch.manual_seed(0)
    heads, head_dim, seq_len = 6, 8, 7
    attention = SelfAttention(48, heads, kv_heads, attention=kind).eval()
    for part in attention.children():
        nn.init.normal_(part.weight, std=0.3)  # type: ignore[arg-type]
    cos, sin = rope_tables(seq_len, head_dim, 10000.0)
    x = torch.randn(2, seq_len, 48)

    def turned(vectors: Tensor) -> Tensor:  # (S, h) as complex numbers times exp(i angle)
        z = torch.complex(vectors[:, : head_dim // 2], vectors[:, head_dim // 2 :]) * torch.complex(cos, sin)
        return torch.cat((z.real, z.imag), dim=1)

    expected = []
    for sample in x:
        q, k, v = attention.query(sample), attention.key(sample), attention.value(sample)
        parts = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            mine = slice(head * head_dim, (head + 1) * head_dim)
            shared = slice(group * head_dim, (group + 1) * head_dim)
            rows = []
            for i in range(seq_len):
                scores = turned(k[:, shared])[: i + 1] @ turned(q[:, mine])[i] / math.sqrt(head_dim)
                rows.append(scores.softmax(0) @ v[: i + 1, shared])
            parts.append(torch.stack(rows))
        expected.append(attention.out(torch.cat(parts, dim=1)))
    torch.testing.assert_close(attention(x, cos, sin), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_rope_keeps_lengths_and_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    cos, sin = rope_tables(64, 16, 10000.0)
    q, k = torch.randn(16), torch.randn(16)

    def at(vector: Tensor, position: int) -> Tensor:
        one = slice(position, position + 1)
        return rotate(vector.view(1, 1, 1, 16), cos[one], sin[one]).flatten()

    assert torch.equal(at(q, 0), q)
    torch.testing.assert_close(at(q, 37).norm(), q.norm())
    torch.testing.assert_close(at(q, 5) @ at(k, 2), at(q, 60) @ at(k, 57))
    assert not torch.isclose(at(q, 5) @ at(k, 2), at(q, 5) @ at(k, 3))
    assert math.isclose(cos[3, 1], math.cos(3 * 10000 ** (-2 / 16)), rel_tol=1e-5)


def test_swiglu_and_rms_norm_follow_their_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    mlp = SwiGlu(16, 24, bias=False)
    gate = x @ mlp.gate.weight.T
    torch.testing.assert_close(mlp(x), (gate * torch.sigmoid(gate) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T)
    norm = transformer(**LLAMA, norm_eps=0.1).norm
    y = torch.randn(2, 5, 32)
    torch.testing.assert_close(norm(y), y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt())


def test_llama_flavour_has_no_bias_and_shares_one_rotary_table() -> None:
    model = transformer(**LLAMA)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert {name for name, _ in model.named_buffers()} == {"cos", "sin"}
    assert model.cos.shape == (12, 4)
    assert not set(model.state_dict()) & {"cos", "sin"}


@FLAVOURS
def test_tied_and_untied_output_layers(flavour: dict[str, Any]) -> None:
    tied, untied = transformer(**flavour), transformer(**flavour, tied=False)
    assert tied.head.weight is tied.tokens.weight
    difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == untied.head.weight.numel() == 50 * 32


def test_initial_weights_have_gpt2s_deviations() -> None:
    model = transformer(vocab_size=256, max_seq_len=64, layers=8, d_model=128, heads=4)
    block = model.blocks[3]
    assert isinstance(block, Block)
    for weight in (model.tokens.weight, block.attn.query.weight, block.mlp.up.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attn.out.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attn.out.bias.abs().max() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Transformer(**GPT, dropout=0.1),
        lambda: Transformer(**LLAMA, tied=False),
        lambda: VisionTransformer(8, 2, 1, 10, layers=2, d_model=32, heads=4),
        lambda: ResidualNet(1, 10, layers=2, features=8),
    ],
    ids=["gpt", "llama", "vit", "convnet"],
)
def test_weights_follow_the_seed(make: Callable[[], nn.Module]) -> None:
    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(make().state_dict().values())

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.isfinite(t).all() for t in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_is_on_in_training_alone(attention: str) -> None:
    model = transformer(**GPT, dropout=0.2, attention=attention)
    x = tokens()
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(5)
    once = model(x)
    torch.manual_seed(5)
    assert torch.equal(once, model(x)), "the masks follow torch's random state"
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_reaches_the_attentions_probabilities(attention: str) -> None:
    torch.manual_seed(0)
    layer = SelfAttention(32, 4, dropout=0.3, attention=attention)
    x = torch.randn(1, 6, 32)
    mean = torch.stack([layer(x) for _ in range(2000)]).mean(0)
    assert not torch.equal(layer(x), layer(x))
    torch.testing.assert_close(mean, layer.eval()(x), rtol=0, atol=5e-4)


def test_eager_attention_saves_probabilities_and_no_mask() -> None:
    def saved(kind: str) -> list[Tensor]:
        found: list[Tensor] = []
        layer = SelfAttention(32, 4, attention=kind)
        with saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            layer(torch.randn(2, 16, 32))
        return found

    square = 16 * 16
    assert max(t.numel() for t in saved("sdpa")) < 2 * 4 * square
    eager = saved("eager")
    assert [t for t in eager if t.numel() == 2 * 4 * square]
    assert not [t for t in eager if t.dtype is torch.bool or t.numel() == square]


def test_eager_attention_in_bf16_takes_the_softmax_in_fp32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    exact = eager_attention(q, k, v)
    rounded = eager_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.03)


@FLAVOURS
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bf16_parameters_and_autocast_stay_near_fp32(flavour: dict[str, Any], attention: str) -> None:
    model = transformer(**flavour, attention=attention).eval()
    exact = model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        amp = model(tokens())
    low = model.to(torch.bfloat16)(tokens())
    assert amp.dtype is low.dtype is torch.bfloat16
    for logits in (amp, low):
        torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.02)


def test_a_longer_sequence_than_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens are more than the model's max_seq_len=12"):
        transformer(**GPT)(tokens(seq_len=13))
    assert transformer(**GPT)(tokens(seq_len=5)).shape == (3, 5, 50)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"heads": 5}, "heads"),
        ({"heads": 0}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"norm": "batch"}, "norm"),
        ({"position": "alibi"}, "position"),
        ({"position": "rope", "d_model": 12}, "position"),
        ({"mlp": "relu"}, "mlp"),
        ({"attention": "flash"}, "attention"),
        ({"layers": 0}, "layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(BadInput) as error:
        Transformer(**(GPT | wrong))
    assert error.value.key == f"workload.model.{key}"
    assert "\n" not in str(error.value)


# Images


def test_vit_reads_every_patch_and_refuses_sizes_that_do_not_divide() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(8, 2, 1, 10, layers=1, d_model=32, heads=4).eval()
    images = torch.randn(1, 1, 8, 8, requires_grad=True)
    model(images).square().sum().backward()
    assert images.grad is not None
    assert (images.grad != 0).all()
    with pytest.raises(BadInput, match=r"workload.model.patch_size=3: does not divide image_size=8"):
        VisionTransformer(8, 3, 1, 10, layers=1, d_model=32, heads=4)


def test_convnet_counts_each_batch_once_and_starts_with_gradients_everywhere() -> None:
    torch.manual_seed(0)
    model = ResidualNet(1, 10, layers=2, features=8)
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 5
    assert all(m.num_batches_tracked == 1 and m.running_mean is not None and m.running_mean.any() for m in norms)
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
