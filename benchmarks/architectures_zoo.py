"""Public architectures, small enough to train in milliseconds, with the data, the loss and the dropout they come with.

Those of the transformers library are built from a config, with random weights; the others are written out. Each entry
of ZOO says what is right for it: where a strategy cannot be equivalent and why, and whether its peak can be predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY, SAMPLES, TOKENS = 32, 8, 16
IGNORED = -100

# -- data -----------------------------------------------------------------------------------------------------------


class Data:
    """Noise of one kind, named as the architecture's forward names it. A batch follows from the step alone.

    kind: "causal" (labels are the input), "padded" (to the right, with a mask), "masked" (a fifth of the tokens is to
    be found), "pairs" (source and target), "images", "audio" (80 mel frames with a transcript), "latents" (an image
    and its class, for diffusion), "tagged" (one label per token).
    """

    version = "1"

    def __init__(self, kind: str, size: int = 16) -> None:
        self.kind, self.size = kind, size

    def describe(self) -> dict[str, str | int]:
        return {"source": f"noise: {self.kind}"}

    def train_batch(self, step: int, size: int) -> Batch:
        make = getattr(self, f"_{self.kind}")
        batch: Batch = make(size, torch.Generator().manual_seed(step))
        return batch

    def eval_batch(self, index: int, size: int) -> Batch:
        return self.train_batch(10**6 + index, size)

    def _tokens(self, size: int, g: torch.Generator) -> Tensor:
        return torch.randint(3, VOCABULARY, (size, TOKENS), generator=g)

    def _causal(self, size: int, g: torch.Generator) -> Batch:
        tokens = self._tokens(size, g)
        return {"input_ids": tokens, "labels": tokens}

    def _mask(self, size: int, g: torch.Generator) -> Tensor:
        lengths = torch.randint(TOKENS // 2, TOKENS + 1, (size, 1), generator=g)
        return (torch.arange(TOKENS) < lengths).long()

    def _padded(self, size: int, g: torch.Generator) -> Batch:
        tokens, mask = self._tokens(size, g), self._mask(size, g)
        return {
            "input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED),
        }  # fmt: skip

    def _masked(self, size: int, g: torch.Generator) -> Batch:
        tokens, mask = self._tokens(size, g), self._mask(size, g)
        hidden = (torch.rand(size, TOKENS, generator=g) < 0.2) & (mask == 1)
        return {
            "input_ids": tokens.masked_fill(hidden, 1) * mask, "attention_mask": mask,
            "labels": tokens.masked_fill(~hidden, IGNORED),
        }  # fmt: skip

    def _pairs(self, size: int, g: torch.Generator) -> Batch:
        tokens, mask = self._tokens(size, g), self._mask(size, g)
        targets = self._tokens(size, g).masked_fill(self._mask(size, g) == 0, IGNORED)
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": targets}

    def _tagged(self, size: int, g: torch.Generator) -> Batch:
        tokens = self._tokens(size, g)
        return {"inputs": tokens, "targets": tokens.roll(1, dims=1)}

    def _images(self, size: int, g: torch.Generator) -> Batch:
        pixels = torch.randn(size, 3, self.size, self.size, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(0, 10, (size,), generator=g)}

    def _audio(self, size: int, g: torch.Generator) -> Batch:
        features = torch.randn(size, 8, 2 * self.size, generator=g)
        return {"input_features": features, "labels": self._tokens(size, g)}

    def _latents(self, size: int, g: torch.Generator) -> Batch:
        latents = torch.randn(size, 4, self.size, self.size, generator=g)
        return {"inputs": latents, "classes": torch.randint(0, 10, (size,), generator=g)}


# -- losses ---------------------------------------------------------------------------------------------------------


def library_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """What the library's models return when they are given labels: a mean over samples of equal length."""
    return model(**batch).loss


class TokenSum:
    """Cross-entropy over the tokens that are not ignored, as a sum with its count. shift: labels are the input."""

    def __init__(self, shift: bool = False) -> None:
        self.shift = shift

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(**batch).logits
        logits = logits[:, :-1] if self.shift else logits
        return F.cross_entropy(
            logits.flatten(0, -2).float(), self._labels(batch).flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return int((self._labels(batch) != IGNORED).sum())

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"][:, 1:] if self.shift else batch["labels"]


def denoising_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Noise at a random time is to be predicted: DDPM's loss with a cosine schedule."""
    clean = batch["inputs"]
    time = torch.randint(0, 1000, (len(clean),), device=clean.device)
    noise = torch.randn_like(clean)
    signal = torch.cos(time / 1000 * math.pi / 2)[:, None, None, None]
    noisy = signal * clean + (1 - signal.square()).sqrt() * noise
    return F.mse_loss(model(noisy, time, batch["classes"]), noise)


# -- models ---------------------------------------------------------------------------------------------------------


def transformer(kind: str, **config: Any) -> nn.Module:
    """A class of the transformers library, from values of its config."""
    import transformers

    cls = getattr(transformers, kind)
    return cls(cls.config_class(**config))


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained correction of low rank, zero at first."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))


def lora(kind: str, rank: int = 4, dropout: float = 0.05, **config: Any) -> nn.Module:
    """A frozen model of the transformers library whose query and value projections have a LoRA."""
    model = transformer(kind, **config).requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if isinstance(child := getattr(module, name, None), nn.Linear):
                setattr(module, name, LoraLinear(child, rank, dropout))
    return model


class Lstm(nn.Module):
    """Two layers with dropout between them, over token ids (B, S); gives logits (B, S, V)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with its defaults: dropout, post-norm and the batch in dimension 1."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 2 * width), layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens).transpose(0, 1)).transpose(0, 1))


def _sinusoid(time: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=time.device) / (width // 2))
    angles = time[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResidualBlock(nn.Module):
    """Two convolutions with the time added between them, then attention over the pixels where asked for."""

    def __init__(self, given: int, width: int, time: int, *, attention: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, given), nn.Conv2d(given, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, width), nn.Dropout(0.1)
        self.skip = nn.Conv2d(given, width, 1) if given != width else nn.Identity()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True) if attention else None
        self.norm3 = nn.GroupNorm(4, width) if attention else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        x = self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(inner))))
        if self.attention is None or self.norm3 is None:
            return x
        pixels = self.norm3(x).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(pixels, pixels, pixels, need_weights=False)
        return x + mixed.transpose(1, 2).reshape_as(x)


class UNet(nn.Module):
    """A diffusion U-Net: (B, 4, H, W), times (B,) and classes (B,) to the noise. Every block down is met by one up."""

    def __init__(self, width: int = 16, levels: int = 2) -> None:
        super().__init__()
        time, widths = 4 * width, [width * min(2**i, 2) for i in range(levels)]
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.classes = nn.Embedding(10, time)
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.width, given = width, width
        self.down_blocks, self.downsamplers = nn.ModuleList(), nn.ModuleList()
        for level, w in enumerate(widths):
            self.down_blocks.append(ResidualBlock(given, w, time, attention=level > 0))
            self.downsamplers.append(nn.Conv2d(w, w, 3, stride=2, padding=1) if level < levels - 1 else nn.Identity())
            given = w
        self.middle = ResidualBlock(given, given, time, attention=True)
        self.up_blocks = nn.ModuleList()
        for level, w in reversed(list(enumerate(widths))):
            self.up_blocks.append(ResidualBlock(given + w, w, time, attention=level > 0))
            given = w
        self.leave_norm, self.leave = nn.GroupNorm(4, given), nn.Conv2d(given, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, classes: Tensor) -> Tensor:
        when = F.silu(self.time(_sinusoid(time, self.width)) + self.classes(classes))
        x, skips = self.enter(x), []
        for block, smaller in zip(self.down_blocks, self.downsamplers, strict=True):
            x = block(x, when)
            skips.append(x)
            x = smaller(x)
        x = self.middle(x, when)
        for block in self.up_blocks:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1), when)
        return self.leave(F.silu(self.leave_norm(x)))


class DiTBlock(nn.Module):
    """Attention and MLP, each scaled, shifted and gated by the condition; the gates are zero at first (adaLN-zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self._attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiT(nn.Module):
    """A diffusion transformer: gates and output are zero at first, and a tenth of the classes is dropped."""

    def __init__(self, size: int = 8, width: int = 32, layers: int = 2, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.register_buffer("positions", _sinusoid(torch.arange((size // patch) ** 2), width), persistent=False)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, 4 * patch * patch)
        for layer in (self.modulation[1], self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, time: Tensor, classes: Tensor) -> Tensor:
        classes = torch.where(torch.rand(len(classes), device=x.device) < 0.1, 10, classes)
        condition = self.time(_sinusoid(time, self.width)) + self.classes(classes)
        side = x.shape[-1] // self.patch
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        x = self.out(self.norm(x) * (1 + scale) + shift)
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (side, side)), self.patch)


# -- the zoo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A workload, and what is right for it."""

    workload: dict[str, Any]
    quick: bool = False  # in the suite that runs every time
    #: Strategies that cannot be equivalent: a pattern that the stated reason matches.
    refused: dict[str, str] = field(default_factory=dict)
    unpredictable: str = ""  # a pattern that the reason matches, where the peak depends on values
    has_blocks: bool = True  # modules that a strategy can treat
    gaps: dict[str, str] = field(default_factory=dict)  # a strategy or "blocks" -> what is not right yet


_NO_BLOCKS = r"no (repeated )?blocks"
_ROUTED = "depends? on|reads? a value|data-dependent"
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_HERE = "benchmarks.architectures_zoo"


def _workload(model: dict[str, Any] | str, data: str, loss: str | dict[str, Any], **more: Any) -> dict[str, Any]:
    """model: arguments of `transformer`, or a class of this file."""
    if isinstance(model, str):
        model = {"_target_": f"{_HERE}.{model}"}
    kind, _, size = data.partition(" ")
    return {
        "model": {"_target_": f"{_HERE}.transformer"} | model,
        "data": {"_target_": f"{_HERE}.Data", "kind": kind} | ({"size": int(size)} if size else {}),
        "loss": {"_target_": f"{_HERE}.{loss}"} if isinstance(loss, str) else loss,
        "global_batch_size": SAMPLES,
        "seq_len": TOKENS if "image" not in kind and "latent" not in kind else None,
        "optimizer": {"lr": 1e-3},
    } | more


_SUM = {"_target_": f"{_HERE}.TokenSum"}
_SHIFTED = {"_target_": f"{_HERE}.TokenSum", "shift": True}
_CROSS_ENTROPY = {"_target_": "sweep.workload.loss.CrossEntropy"}

ZOO: dict[str, Architecture] = {
    "gpt2": Architecture(
        _workload(
            {"kind": "GPT2LMHeadModel", "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2,
             "n_head": 4},
            "causal", "library_loss", grad_clip_norm=1.0,
        ),
        quick=True,
    ),
    "llama": Architecture(
        _workload({"kind": "LlamaForCausalLM"} | _LLAMA, "causal", "library_loss"), quick=True,
    ),
    "qwen2": Architecture(
        _workload({"kind": "Qwen2ForCausalLM"} | _LLAMA, "padded", _SHIFTED),
    ),
    "gemma": Architecture(
        _workload({"kind": "GemmaForCausalLM", "head_dim": 8} | _LLAMA, "causal", "library_loss"),
    ),
    "mixtral": Architecture(
        _workload(
            {"kind": "MixtralForCausalLM", "num_local_experts": 4, "output_router_logits": True} | _LLAMA,
            "causal", "library_loss",
        ),
        quick=True, unpredictable=_ROUTED,
        # Load balancing multiplies two means over the tokens of the whole batch.
        refused={"micro_batch": "loss_is_no_mean_over_samples: .*library_loss"},
    ),
    "qwen_moe": Architecture(
        _workload(
            {"kind": "Qwen2MoeForCausalLM", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
             "shared_expert_intermediate_size": 32} | _LLAMA,
            "causal", "library_loss",
        ),
        unpredictable=_ROUTED,
    ),
    "deepseek": Architecture(
        _workload(
            {"kind": "DeepseekV3ForCausalLM", "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
             "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "q_lora_rank": 16,
             "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
            | _LLAMA | {"num_key_value_heads": 4},
            "causal", "library_loss",
        ),
        unpredictable=_ROUTED,
    ),
    "t5": Architecture(
        _workload(
            {"kind": "T5ForConditionalGeneration", "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64,
             "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
            "pairs", _SUM,
        ),
        quick=True,
    ),
    "bert": Architecture(
        _workload({"kind": "BertForMaskedLM"} | _BERT, "masked", _SUM), quick=True,
    ),
    "whisper": Architecture(
        _workload(
            {"kind": "WhisperForConditionalGeneration", "vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": 32,
             "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16, "max_target_positions": 32,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.1},
            "audio 16", "library_loss",
        ),
    ),
    "vit": Architecture(
        _workload(
            {"kind": "ViTForImageClassification", "image_size": 16, "patch_size": 4, "num_labels": 10,
             "hidden_dropout_prob": 0.1} | {k: _BERT[k] for k in (
                 "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
            "images", "library_loss",
        ),
    ),
    "swin": Architecture(
        _workload(
            {"kind": "SwinForImageClassification", "image_size": 16, "patch_size": 2, "window_size": 4,
             "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "num_labels": 10},
            "images", "library_loss",
        ),
    ),
    "convnext": Architecture(
        _workload(
            {"kind": "ConvNextForImageClassification", "image_size": 32, "hidden_sizes": [8, 16, 24, 32],
             "depths": [1, 1, 2, 1], "num_labels": 10},
            "images 32", "library_loss",
        ),
    ),
    "resnet": Architecture(
        _workload(
            {"kind": "ResNetForImageClassification", "embedding_size": 8, "hidden_sizes": [16, 32],
             "depths": [2, 2], "layer_type": "bottleneck", "num_labels": 10},
            "images 32", "library_loss", optimizer={"name": "sgd", "lr": 0.1, "kwargs": {"momentum": 0.9}},
        ),
        quick=True, refused={"micro_batch": r"batch_statistics: resnet\..*normalization"},
    ),
    "unet": Architecture(_workload("UNet", "latents 8", "denoising_loss")),
    "dit": Architecture(_workload("DiT", "latents 8", "denoising_loss"), quick=True),
    "albert": Architecture(
        _workload(
            {"kind": "AlbertForMaskedLM", "embedding_size": 16, "hidden_dropout_prob": 0.1,
             "attention_probs_dropout_prob": 0.1} | _BERT,
            "masked", _SUM,
        ),
        quick=True,
    ),
    "mamba": Architecture(
        _workload(
            {"kind": "MambaForCausalLM", "vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4,
             "num_hidden_layers": 2},
            "causal", "library_loss",
        ),
    ),
    "lstm": Architecture(
        _workload("Lstm", "tagged", _CROSS_ENTROPY), has_blocks=False,
        refused=dict.fromkeys(("checkpoint", "checkpoint_selective", "offload", "hybrid"), _NO_BLOCKS),
    ),
    "torch_encoder": Architecture(
        _workload("TorchEncoder", "tagged", _CROSS_ENTROPY), quick=True,
    ),
    "lora_llama": Architecture(
        _workload(
            {"_target_": f"{_HERE}.lora", "kind": "LlamaForCausalLM"} | _LLAMA, "causal", "library_loss",
        ),
    ),
}  # fmt: skip
