"""The published models compute what they are named after, and predictions stand where the published numbers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import published
from benchmarks.published_families import Setting, build, setting_of
from benchmarks.published_models import cs336, raschka_gpt, vit
from benchmarks.published_models.course_adamw import CourseAdamW
from benchmarks.published_models.data import RandomImages, RandomTokens
from benchmarks.published_report import GOALS, Row, quantile, render, summary
from sweep.errors import BadInput

ROOT = Path(__file__).parents[1]
POINTS: dict[str, dict[str, Any]] = {
    p["id"]: p for p in json.loads((ROOT / "benchmarks" / "published_points.json").read_text())
}


# -- the models --


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 128_625_408), ("medium", 423_183_360), ("large", 969_411_840), ("xl", 3_406_809_600)],
)
def test_cs336_has_the_published_number_of_parameters(size: str, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in cs336.LanguageModel(size, 16).parameters()) == parameters


def test_the_others_have_their_published_number_of_parameters() -> None:
    with torch.device("meta"):
        # torchvision's vit_l_16 has 304,326,632; the head of 1000 classes is replaced by one of 10.
        assert sum(p.numel() for p in vit.VisionTransformer().parameters()) == 304_326_632 - 1025 * 990
        gpt = raschka_gpt.Gpt("baseline")
        # 163,009,536 in the book with qkv bias off.
        assert sum(p.numel() for p in gpt.parameters()) == 163_009_536
        assert sum(b.numel() for b in gpt.buffers()) == 12 * 1024 * 1024


def test_cs336_attention_is_causal_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    mask = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(cs336.attend(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_cs336_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = cs336.Rotary(16, 8)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotary(t.expand(1, 1, 16, 8)) for t in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(1, 1, 16))
    products = turned_q[0, 0] @ turned_k[0, 0].T
    torch.testing.assert_close(products.diagonal(3), products[0, 3].expand(13), rtol=1e-4, atol=1e-4)


def test_cs336_norm_is_rms_norm_and_silu_is_silu() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(cs336.RmsNorm(8)(x), F.rms_norm(x, (8,), eps=1e-5))
    torch.testing.assert_close(cs336.silu(x), F.silu(x))


def test_cs336_loss_is_cross_entropy_and_holds_the_logits() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cs336.HeldCrossEntropy()
    targets = torch.randint(5, (2, 3))
    value = loss(torch.nn.Identity(), {"inputs": logits, "targets": targets})
    torch.testing.assert_close(value, F.cross_entropy(logits.transpose(1, 2), targets))
    assert loss.held is logits


def test_course_adamw_is_adam_without_decay() -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    a = CourseAdamW([ours], lr=0.01, weight_decay=0.0, eps=1e-12)
    b = torch.optim.Adam([theirs], lr=0.01, eps=1e-12)
    for _ in range(4):
        for parameter, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    before = ours.detach().clone()
    ours.grad = torch.zeros_like(ours)
    CourseAdamW([ours], lr=0.01, weight_decay=0.5).step()
    torch.testing.assert_close(ours.detach(), before * (1 - 0.01 * 0.5))


def test_the_books_parts_are_torchs_parts() -> None:
    x = torch.randn(3, 16)
    torch.testing.assert_close(raschka_gpt.WrittenOutLayerNorm(16)(x), F.layer_norm(x, (16,), eps=1e-5))
    torch.testing.assert_close(raschka_gpt.WrittenOutGelu()(x), F.gelu(x, approximate="tanh"))


def test_the_books_variants_compute_the_same() -> None:
    small = {"vocabulary": 11, "context": 8, "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}
    baseline = raschka_gpt.Gpt("baseline", **small)
    on_the_fly, sdpa = raschka_gpt.Gpt("mask_on_the_fly", **small), raschka_gpt.Gpt("sdpa", **small)
    state = baseline.state_dict()
    on_the_fly.load_state_dict({k: v for k, v in state.items() if not k.endswith("mask")})
    for key in list(state):
        if key.endswith("att.query.weight"):
            stem = key.removesuffix("query.weight")
            state[f"{stem}qkv.weight"] = torch.cat([state[f"{stem}{n}.weight"] for n in ("query", "key", "value")])
    state = {k.replace("out_proj", "proj"): v for k, v in state.items()}
    state = {k.replace("scale", "weight").replace("shift", "bias"): v for k, v in state.items()}
    sdpa.load_state_dict(state, strict=False)
    tokens = torch.randint(11, (2, 8))
    torch.testing.assert_close(on_the_fly(tokens), baseline(tokens))
    torch.testing.assert_close(sdpa(tokens), baseline(tokens), rtol=1e-4, atol=1e-5)


def test_vit_attention_is_torchs_multihead_attention() -> None:
    ours, theirs = vit.SelfAttention(16, 4), torch.nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_vit_gradients_live_through_the_forward_and_are_cleared_before_backward() -> None:
    model = torch.nn.Linear(3, 2)
    alive_in_forward: list[bool] = []
    model.register_forward_hook(lambda *_: alive_in_forward.append(model.weight.grad is not None))
    loss = vit.LateClearing()
    optimizer = vit.LateAdam(model.parameters(), lr=0.1)
    batch = {"inputs": torch.randn(4, 3), "targets": torch.tensor([0, 1, 0, 1])}
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model, batch)
        assert model.weight.grad is None
        value.backward()
        optimizer.step()
    assert alive_in_forward == [False, True]


def test_random_data_has_the_asked_shapes_and_repeats() -> None:
    tokens = RandomTokens(100, 7)
    batch = tokens.train_batch(0, 3)
    assert batch["inputs"].shape == batch["targets"].shape == (3, 7)
    assert torch.equal(batch["inputs"], tokens.train_batch(5, 3)["inputs"])
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    same = RandomTokens(100, 7, targets_are_inputs=True).train_batch(0, 3)
    assert torch.equal(same["inputs"], same["targets"])
    images = RandomImages(side=8, classes=4).eval_batch(0, 2)
    assert images["inputs"].shape == (2, 3, 8, 8) and int(images["targets"].max()) < 4


# -- from points and flags to configs --


def test_every_point_is_understood() -> None:
    settings = {id: setting_of(p) for id, p in POINTS.items()}
    assert len(settings) == 45
    for setting in settings.values():
        build(setting)
    expected = {
        "p02": {
            "size": "medium",
            "amp": "bf16",
            "checkpoint_group": 2,
            "optimizer": "course_adamw",
            "limit_mib": 23552.0,
        },
        "p09": {"checkpoint_group": 2, "optimizer": "adamw_foreach", "what": "train"},
        "p20": {"size": "xl", "seq": 2048, "what": "forward", "amp": "none", "limit_mib": None},
        "p39": {"size": "small", "what": "forward_backward", "batch": 4, "device": "rtx_4090_48gb"},
        "p53": {"family": "qwen2_5_0_5b", "strategy": "offload", "seq": 768, "eval_batches": 1},
        "p58": {"strategy": "checkpoint", "amp": "bf16", "seq": 1024},
        "p60": {"family": "gpt_124m", "variant": "mask_on_the_fly", "batch": 8},
        "p65": {"family": "vit_l_16", "dtype": "amp_fp16", "batch": 64},
        "p66": {"dtype": "bf16"},
    }
    for id, values in expected.items():
        assert {name: getattr(settings[id], name) for name in values} == values, id


def test_accumulation_multiplies_the_batch() -> None:
    config = build(Setting("vit_l_16", "a100_80gb", batch=4, accumulation=4, dtype="bf16")).config
    assert (config.workload.global_batch_size, config.strategy.micro_batch_size) == (16, 4)
    assert config.workload.optimizer.target is None  # this loop clears gradients right after the optimizer's step


def test_a_limit_of_the_process_is_what_the_allocator_may_reserve() -> None:
    from sweep.config.device import allocator_capacity

    job = build(Setting("cs336", "rtx_4090", limit_mib=5000.0))
    assert allocator_capacity(job.config.device) == 5000 * 2**20


def test_unknown_family_is_bad_input() -> None:
    with pytest.raises(BadInput, match="--family=resnet: is not known; give one of cs336, "):
        build(Setting("resnet", "a100_80gb"))


def test_command_prints_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--family cs336 --size small --pass forward --batch 4 --seq 512 --device rtx_4090_48gb"
    assert published.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    printed = json.loads(out)
    assert printed["evidence"] == "predicted" and printed["pass"] == "forward" and printed["fits"] is True
    assert printed["allocated_mib"] == pytest.approx(728.7, abs=0.1)
    assert "variant" not in printed  # a flag of another family


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--family cs336 --device gtx_9", "error: device=gtx_9: is no device profile"),
        ("--family cs336 --batch 0", "error: --batch=0: is below 1"),
        ("--family cs336 --checkpoint-group -1", "error: --checkpoint-group=-1: is below 0"),
        ("--family cs336 --size small --checkpoint-group 13 --seq 8", "error: strategy.checkpoint.segment_size=13"),
        ("--points missing.json", "error: --points=missing.json: cannot be read"),
    ],
)
def test_bad_flags_give_one_line_and_exit_code_2(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main(flags.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(message) and printed.err.count("\n") == 1 and printed.out == ""


def test_all_points_of_a_file_are_compared_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = tmp_path / "points.json"
    points.write_text(json.dumps([POINTS["p38"], POINTS["p42"]]))
    assert published.main(["--points", str(points), "--out", str(tmp_path / "out")]) == 0
    kept = json.loads((tmp_path / "out" / "published.json").read_text())
    assert [row["id"] for row in kept["rows"]] == ["p38", "p42"]
    assert abs(kept["rows"][0]["allocated_error"]) < 1e-5
    assert kept["summary"]["cs336"]["points"] == 2
    page = (tmp_path / "out" / "published.md").read_text()
    assert page.startswith("# Predicted and published peak memory") and "| p42 | CS336 small" in page
    assert "## Open questions" in page and "p38 CS336 small" in capsys.readouterr().out


# -- the yardstick --


@pytest.mark.parametrize("id", ["p20", "p21", "p23", "p38", "p42"])
def test_forward_passes_are_predicted_to_the_published_digit(id: str) -> None:
    point = POINTS[id]
    p = published.predicted(setting_of(point))
    assert p.allocated_mib == pytest.approx(point["allocated_mib"], abs=0.005)
    assert p.reserved_mib == point["reserved_mib"]


@pytest.mark.parametrize("id", ["p39", "p43", "p46", "p32"])
def test_training_is_predicted_within_a_tenth_of_a_permille(id: str) -> None:
    point = POINTS[id]
    p = published.predicted(setting_of(point))
    assert p.allocated_mib == pytest.approx(point["allocated_mib"], rel=2e-4)
    assert p.reserved_mib == pytest.approx(point["reserved_mib"], rel=0.015)


def test_after_checkpointing_the_optimizer_holds_the_peak() -> None:
    pytest.importorskip("transformers")
    p = published.predicted(setting_of(POINTS["p52"]))
    assert (p.peak_phase, p.peak_operator) == ("optimizer", "aten._foreach_sqrt")
    assert p.allocated_mib == pytest.approx(POINTS["p52"]["allocated_mib"], rel=5e-4)


def test_the_evaluation_explains_the_peak_that_training_cannot() -> None:
    """Under autocast the evaluation holds gradients, 16-bit weights and three copies of the logits at once."""
    pytest.importorskip("transformers")
    setting = setting_of(POINTS["p58"])
    with_evaluation = published.predicted(setting).allocated_mib
    setting.eval_batches = 0
    assert published.predicted(setting).allocated_mib < POINTS["p58"]["allocated_mib"] - 500
    assert with_evaluation == pytest.approx(POINTS["p58"]["allocated_mib"], rel=1e-3)


@pytest.mark.slow
def test_goals_hold_over_all_points_of_high_confidence() -> None:
    pytest.importorskip("transformers")
    rows = []
    for point in POINTS.values():
        setting = setting_of(point)
        rows.append(Row.of(point, setting.family, published.predicted(setting)))
    high = summary(rows)["confidence high"]
    assert high["allocated"]["median"] <= GOALS["allocated"][0] and high["allocated"]["worst"] <= GOALS["allocated"][1]
    assert high["reserved"]["median"] <= GOALS["reserved"][0]
    over = {r.id for r in rows if r.confidence == "high" and abs(r.reserved_error or 0.0) > GOALS["reserved"][1]}
    assert over <= {"p53"}  # results/published.md leaves it as an open question
    assert not any(r.surely_oom for r in rows)


def _row(id: str, published_mib: tuple[float | None, float | None], predicted_mib: tuple[float, float]) -> Row:
    allocated, reserved = published_mib
    return Row(id, "f", id, "high", allocated, predicted_mib[0], reserved, predicted_mib[1], 0.0, True, "", "", 0.0)


def test_summary_of_hand_made_rows() -> None:
    rows = [
        _row("a", (100.0, 120.0), (101.0, 126.0)),  # +1 %, +5 %
        _row("b", (100.0, 120.0), (98.0, 117.0)),  # -2 %, -2.5 %: 117 would not hold the 120 that were reserved
        _row("c", (None, 100.0), (90.0, 90.0)),  # not published, -10 %
        _row("d", (100.0, None), (97.0, 99.0)),  # -3 %; 99 would not even hold the 100 that were allocated
    ]
    group = summary(rows)["all"]
    assert group["points"] == 4
    assert group["allocated"]["points"] == 3 and group["allocated"]["worst"] == pytest.approx(0.03)
    assert group["allocated"]["median"] == pytest.approx(0.02)
    assert group["reserved"]["median"] == pytest.approx(0.05) and group["reserved"]["worst"] == pytest.approx(0.10)
    assert group["reserved_predicted_too_low"] == 2 and group["surely_out_of_memory"] == 1
    assert "| a | a | high | 100.0 | 101.0 | +1.000 % |" in render(rows)


def test_quantiles_lie_between_the_nearest_two() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([5.0], 0.9) == 5.0
