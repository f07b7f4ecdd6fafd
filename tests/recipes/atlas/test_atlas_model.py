"""The network: its sizes, what it depends on, and what is frozen."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import ConfigError
from lockstep_recipes.atlas import model as model_file
from lockstep_recipes.atlas.model import (
    AtlasNet,
    ModelConfig,
    TextEncoder,
    build_geometry,
    build_language,
    build_tokenizer,
    hash_words,
)
from lockstep_recipes.atlas.vggt import (
    PRESETS,
    Aggregator,
    Geometry,
    load_aggregator,
    num_parameters,
    rope_table,
    rotate,
)


@pytest.mark.parametrize(
    ("preset", "millions"), [("micro", 0.449), ("tiny", 3.564), ("full", 604.7)]
)
def test_the_alternating_blocks_have_the_published_size(preset, millions) -> None:
    with torch.device("meta"):
        made = Aggregator(PRESETS[preset])
    blocks = num_parameters(made.frame_blocks) + num_parameters(made.global_blocks)
    assert blocks / 1e6 == pytest.approx(millions, rel=1e-3)


def test_the_fusion_has_the_published_size() -> None:
    with torch.device("meta"):
        net = AtlasNet(ModelConfig(), Aggregator(PRESETS["tiny"]), TextEncoder("tiny"))
    assert num_parameters(net.fusion) / 1e6 == pytest.approx(67.2, rel=1e-3)


def test_the_full_preset_runs_and_has_the_published_names() -> None:
    preset = type(PRESETS["full"])(width=96, depth=1, heads=3, has_dino=True)
    made = Aggregator(preset)
    seen = made(torch.rand(1, 2, 3, 28, 42))
    assert [layer.shape for layer in seen.layers] == [(1, 2, 5 + 6, 192)]
    names = set(made.state_dict())
    assert {"camera_token", "register_token", "patch_embed.pos_embed"} < names
    assert {"patch_embed.blocks.0.ls1.gamma", "frame_blocks.0.attn.q_norm.weight"} < names
    assert "global_blocks.0.mlp.fc2.bias" in names


def test_rotation_makes_attention_depend_on_distance_alone() -> None:
    cos, sin = rope_table((4, 4), 16, torch.device("cpu"), torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    at = {(r, c): 5 + r * 4 + c for r in range(4) for c in range(4)}

    def score(a, b):
        turned = [rotate(v, (cos[i], sin[i])) for v, i in ((q, at[a]), (k, at[b]))]
        return float((turned[0] * turned[1]).sum())

    assert score((0, 0), (1, 2)) == pytest.approx(score((2, 1), (3, 3)), rel=1e-9)
    assert abs(score((0, 0), (1, 2)) - score((0, 0), (2, 1))) > 1e-6, "rows are not columns"
    assert bool((cos[:5] == 1).all()), "special tokens stand at position 0"


def test_the_first_image_has_camera_and_register_tokens_of_its_own() -> None:
    torch.manual_seed(0)
    made = Aggregator(PRESETS["micro"])
    picture = torch.rand(1, 1, 3, 28, 28).expand(1, 3, 3, 28, 28)
    with torch.no_grad():
        made.camera_token.copy_(torch.randn_like(made.camera_token))
        out = made(picture).layers[-1]
    assert torch.allclose(out[:, 1], out[:, 2], atol=1e-5), "the others share theirs"
    assert not torch.allclose(out[:, 0, 0], out[:, 1, 0], atol=1e-2)


def test_every_image_sees_the_others_through_global_attention() -> None:
    made = Aggregator(PRESETS["micro"])
    pictures = torch.rand(2, 2, 3, 28, 28)
    pictures[1, 0] = pictures[0, 0]
    out = made(pictures).layers[-1]
    half = out.shape[-1] // 2
    assert not torch.allclose(out[0, 0, :, half:], out[1, 0, :, half:])


def frozen_net() -> AtlasNet:
    torch.manual_seed(0)
    config = ModelConfig(
        freeze_lang_encoder=True, vggt_preset="micro", lang_preset="micro", fusion_hidden_dim=64
    )
    return AtlasNet(config, Aggregator(PRESETS["micro"]), TextEncoder("micro"))


def test_frozen_parts_stay_in_evaluation_mode_and_out_of_the_graph() -> None:
    net = frozen_net()
    for mode in (True, False, True):
        net.train(mode)
        assert net.fusion.training == mode
        assert not any(m.training for part in net.frozen_parts() for m in part.modules())
    tokens, mask = hash_words(["go"])
    net(torch.zeros(1, 2, 3, 28, 28, dtype=torch.uint8), tokens, mask).sum().backward()
    frozen = {id(p) for part in net.frozen_parts() for p in part.parameters()}
    for name, parameter in net.named_parameters():
        assert (parameter.grad is None) == (id(parameter) in frozen), name
        assert parameter.requires_grad != (id(parameter) in frozen)


def test_the_aggregator_is_called_once_per_forward() -> None:
    net, calls = frozen_net(), []
    net.geometry.backbone.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    tokens, mask = hash_words(["go", "stop there"])
    net(torch.zeros(2, 2, 3, 28, 28, dtype=torch.uint8), tokens, mask)
    assert calls == [False]


@pytest.mark.parametrize("pooling", [True, False])
def test_padding_does_not_change_an_answer(pooling) -> None:
    config = ModelConfig(
        vggt_preset="micro",
        lang_preset="micro",
        fusion_hidden_dim=64,
        use_attention_pooling=pooling,
    )
    net = AtlasNet(config, Aggregator(PRESETS["micro"]), TextEncoder("micro")).eval()
    images = torch.randint(0, 256, (1, 2, 3, 28, 28), dtype=torch.uint8)
    tokens, mask = hash_words(["lift the cup", "lift the cup from the table, and then turn it"])
    short = hash_words(["lift the cup"])
    with torch.no_grad():
        assert torch.allclose(net(images, *short), net(images, tokens[:1], mask[:1]), atol=1e-5)
        assert not torch.allclose(net(images, *short), net(images, tokens[1:], mask[1:]), atol=1e-4)


class OtherBackbone(nn.Module):
    """A backbone with heads of its own for pose and points."""

    width, gives = 32, frozenset({"pose", "points"})

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 32)

    def forward(self, images):
        batch, count = images.shape[:2]
        pooled = nn.functional.adaptive_avg_pool2d(images.flatten(0, 1), 2)
        tokens = self.out(pooled.flatten(2).mT).unflatten(0, (batch, count))
        pose, points = images.new_ones(batch, count, 9), images.new_ones(batch, count, 2, 2, 3)
        return Geometry([tokens], patch_start=0, pose=pose, points=points)


def test_another_backbone_fits_and_leaves_no_parameter_unused() -> None:
    config = ModelConfig(freeze_vggt=False, lang_preset="micro", fusion_hidden_dim=64)
    net = AtlasNet(config, OtherBackbone(), TextEncoder("micro"))
    tokens, mask = hash_words(["go"])
    net(torch.zeros(1, 2, 3, 28, 28, dtype=torch.uint8), tokens, mask).sum().backward()
    assert [n for n, p in net.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("use_pose", [True, False])
@pytest.mark.parametrize("use_pointnet", [True, False])
def test_every_trained_parameter_is_used(use_pose, use_pointnet) -> None:
    config = ModelConfig(
        freeze_vggt=False,
        vggt_preset="micro",
        lang_preset="micro",
        fusion_hidden_dim=64,
        use_pose=use_pose,
        use_pointnet=use_pointnet,
    )
    net = AtlasNet(config, Aggregator(PRESETS["micro"]), TextEncoder("micro"), 1, num_own=3)
    tokens, mask = hash_words(["go"])
    own = torch.ones(1, 3)
    net(torch.zeros(1, 1, 3, 28, 28, dtype=torch.uint8), tokens, mask, own).sum().backward()
    assert [n for n, p in net.named_parameters() if p.grad is None] == []


# --- where backbones come from --------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("prefix", ["aggregator.", ""])
def test_a_local_checkpoint_loads_and_says_nothing(suffix, prefix, tmp_path) -> None:
    saved = Aggregator(PRESETS["micro"])
    state = {f"{prefix}{name}": value for name, value in saved.state_dict().items()}
    path = tmp_path / f"vggt.{suffix}"
    if prefix:
        state["camera_head.weight"] = torch.zeros(1)  # heads are in the published file
    if suffix == "pt":
        torch.save({"model": state}, path)
    else:
        save_file(state, path)
    notes = []
    made = build_geometry(ModelConfig(vggt_preset="micro", vggt_checkpoint=path), notes)
    assert notes == []
    assert all(
        torch.equal(a, b) for a, b in zip(made.parameters(), saved.parameters(), strict=True)
    )


def test_a_missing_checkpoint_is_one_line_and_a_frozen_random_one_a_warning(tmp_path) -> None:
    missing = ModelConfig(vggt_preset="micro", vggt_checkpoint=tmp_path / "vggt.pt")
    notes = []
    build_geometry(missing, notes)
    assert notes[0] == (
        f"vggt_checkpoint {tmp_path}/vggt.pt does not exist: random weights (vggt_preset micro) "
        "in its place"
    )
    assert notes[1].startswith("warning: freeze_vggt keeps random weights")
    with pytest.raises(ConfigError, match="does not exist"):
        build_geometry(missing.model_copy(update={"allow_random_backbone": False}), [])
    notes = []
    build_geometry(ModelConfig(vggt_preset="micro", freeze_vggt=False), notes)
    assert notes == []


def test_a_checkpoint_of_another_shape_is_refused_by_its_first_tensor(tmp_path) -> None:
    torch.save(Aggregator(PRESETS["micro"]).state_dict(), tmp_path / "vggt.pt")
    with pytest.raises(ConfigError, match="camera_token is .*96.*not .*192"):
        load_aggregator(Aggregator(PRESETS["tiny"]), tmp_path / "vggt.pt")
    (tmp_path / "vggt.pt").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"vggt\.pt holds no weights"):
        load_aggregator(Aggregator(PRESETS["micro"]), tmp_path / "vggt.pt")


def test_a_language_model_is_read_from_a_local_folder_or_not_at_all(tmp_path, monkeypatch) -> None:
    notes = []
    config = ModelConfig(lang_encoder_name="meta-llama/Llama-2-7b-hf", lang_preset="micro")
    assert isinstance(build_language(config, notes), TextEncoder)
    assert notes == [
        "lang_encoder_name meta-llama/Llama-2-7b-hf is not a local folder, and nothing is "
        "downloaded: random weights (lang_preset micro) in its place"
    ]
    with pytest.raises(ConfigError, match="not a local folder"):
        build_language(config.model_copy(update={"allow_random_backbone": False}), [])

    class Fake(nn.Module):
        config = type("Config", (), {"hidden_size": 8})

        def forward(self, input_ids, attention_mask):
            hidden = torch.ones(*input_ids.shape, 8) * attention_mask[..., None]
            return type("Out", (), {"last_hidden_state": hidden})

    class FakeTokenizer:
        pad_token, eos_token = None, "</s>"

        def __call__(self, texts, **options):
            assert self.pad_token == "</s>"
            assert options["max_length"] == 128
            ids = torch.tensor([[1, 2], [3, 0]])
            return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def load(made):
        def from_pretrained(folder, local_files_only):
            assert local_files_only, "nothing is ever downloaded"
            assert folder == str(tmp_path)
            return made()

        return type("Auto", (), {"from_pretrained": staticmethod(from_pretrained)})

    fake = type("transformers", (), {"AutoModel": load(Fake), "AutoTokenizer": load(FakeTokenizer)})
    local = ModelConfig(lang_encoder_name=str(tmp_path))
    monkeypatch.setattr(model_file.importlib, "import_module", lambda name: fake)
    tokens, mask = build_tokenizer(local)(["a b", "c"])
    made = build_language(local, [])
    assert made.hidden_size == 8
    assert made(tokens, mask).shape == (2, 2, 8)

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(model_file.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="needs transformers, which is not installed"):
        build_language(local, [])
