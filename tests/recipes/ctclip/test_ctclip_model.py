"""The towers: sizes, what sees what, and that the losses are the written ones."""

import math

import pytest
import torch
import torch.nn.functional as F

from lockstep.errors import ConfigError
from lockstep.task import Context
from lockstep.testing import FakeWorld
from lockstep_recipes.ctclip.config import Clip, CTClipConfig, ImageEncoder, TextEncoder
from lockstep_recipes.ctclip.evaluate import measure_findings, retrieval_at_1, zero_shot_scores
from lockstep_recipes.ctclip.model import Codebook, CTClip, CTViT, PositionGenerator, WordTower
from lockstep_recipes.ctclip.task import CTClipTask
from lockstep_recipes.ctclip.text import Vocabulary

SMALL = ImageEncoder(
    image_size=24, depth=12, patch_size=6, temporal_patch_size=3, dim=16, heads=2, dim_head=8
)
WORDS = TextEncoder(dim=16, depth=2, heads=2, max_length=8)


def test_the_full_size_is_the_published_one() -> None:
    config = CTClipConfig().model
    assert config.image_encoder.dim_image == config.clip.dim_image == 294_912
    with torch.device("meta"):
        model = CTClip(CTViT(config.image_encoder), WordTower(1000, config.text_encoder), Clip())
    assert model.image_projection.weight.numel() == 294_912 * 512  # 151 million
    assert (model.image_tower.embed[1].in_features, model.image_tower.embed[1].out_features) == (
        20 * 20 * 10,
        512,
    )


def test_volumes_become_one_vector_per_place_in_the_plane() -> None:
    tower = CTViT(SMALL)
    described, apart = tower(torch.rand(2, 1, 12, 24, 24))
    assert described.shape == (2, SMALL.dim_image) == (2, 256)
    assert apart.tolist() == [0, 0]


def test_positions_see_no_deeper_slab() -> None:
    torch.manual_seed(0)
    position = PositionGenerator(4)
    x = torch.randn(1, 5, 3, 3, 4)
    deeper = x.clone()
    deeper[:, 3:] = 9
    a, b = position(x), position(deeper)
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.allclose(a[:, 3:], b[:, 3:])


def test_the_position_generator_is_torchs_convolution_gradients_too() -> None:
    torch.manual_seed(0)
    position = PositionGenerator(4).double()
    x = torch.randn(2, 3, 4, 5, 4, dtype=torch.float64, requires_grad=True)
    padded = F.pad(x.permute(0, 4, 1, 2, 3), (1, 1, 1, 1, 2, 0))
    plain = F.conv3d(padded, position.weight[:, None], position.bias, groups=4)
    plain = plain.permute(0, 2, 3, 4, 1)
    made = position(x)
    assert torch.allclose(made, plain, atol=1e-12)
    leaves = [x, position.weight, position.bias]
    towards = torch.randn_like(made)
    ours = torch.autograd.grad((made * towards).sum(), leaves)
    theirs = torch.autograd.grad((plain * towards).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_patches_are_where_they_were() -> None:
    tower = CTViT(SMALL)
    taken: list[torch.Tensor] = []
    tower.embed.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    volume = torch.rand(1, 1, 12, 24, 24)
    tower(volume)
    block = volume[0, 0, 3:6, 12:18, 6:12]  # slab 1, row 2, column 1
    assert torch.equal(taken[0][0, 1, 2, 1], block.flatten())


def test_a_text_does_not_depend_on_how_long_its_neighbours_are() -> None:
    words = Vocabulary.build(["there is no lung nodule", "one two three four"], 100, 8)
    tower = WordTower(len(words), WORDS).double()
    alone = tower(words(["There is."]))
    beside = tower(words(["There is.", "one two three four five six"]))
    assert torch.allclose(alone[0], beside[0], atol=1e-12)
    assert not torch.allclose(tower(words(["no nodule"])), tower(words(["nodule no"])), atol=1e-3)


def test_words_that_were_never_seen_are_one_and_long_texts_are_cut() -> None:
    words = Vocabulary.build(["b a a"], 100, 4)
    assert words.words == ["a", "b"]
    assert words(["a zebra", "b b b b b b"]).tolist() == [[1, 3, 2, 0], [1, 4, 4, 4]]
    assert Vocabulary.build(["b a a"], 1, 4).words == ["a"]


def test_codes_replace_tokens_and_gradients_pass() -> None:
    torch.manual_seed(0)
    book = Codebook(8, 4)
    x = torch.randn(2, 3, 4, requires_grad=True)
    made, apart = book(x)
    codes = F.normalize(book.codes, dim=-1)
    nearest = (F.normalize(x, dim=-1) @ codes.T).argmax(-1)
    assert torch.allclose(made, codes[nearest], atol=1e-6)
    (made.sum() + apart.sum()).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert book.codes.grad is not None
    assert book.codes.grad.abs().sum() > 0


class Given(torch.nn.Module):
    """A model that has its answer ready."""

    def __init__(self, **made):
        super().__init__()
        self.made = made

    def forward(self, volume, tokens):
        return self.made


def test_the_losses_are_the_written_ones(settings) -> None:
    image, text = (F.normalize(torch.randn(5, 3, dtype=torch.float64), dim=-1) for _ in "it")
    context = Context(FakeWorld(), 0, 0, 0)
    batch = {"volume": None, "tokens": None}
    scale, apart = torch.tensor(math.e, dtype=torch.float64), torch.zeros(5)
    model = Given(image=image, text=text, scale=scale, apart=apart)
    softmax = CTClipTask(settings()).loss(model, batch, context)
    logits = (text @ image.T * math.e).tolist()
    rows = sum(math.log(sum(map(math.exp, row))) - row[i] for i, row in enumerate(logits))
    columns = sum(
        math.log(sum(math.exp(row[j]) for row in logits)) - logits[j][j] for j in range(5)
    )
    assert softmax.loss_sum.item() == pytest.approx((rows + columns) / 2, rel=1e-12)
    assert softmax.weight == 5

    scale, shift = torch.tensor(10.0, dtype=torch.float64), torch.tensor(-10.0)
    model = Given(image=image, text=text, scale=scale, shift=shift, apart=apart)
    siglip = CTClipTask(settings()).loss(model, batch, context)
    cosines = (text @ image.T).tolist()
    by_hand = sum(
        math.log1p(math.exp(-(1 if i == j else -1) * (10 * c - 10)))
        for i, row in enumerate(cosines)
        for j, c in enumerate(row)
    )
    assert siglip.loss_sum.item() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": {"dim_image": 294_912}}, ["dim_image is 294,912", "= 64", "dim_image: 64"]),
        ({"image_encoder": {"image_size": 25}}, ["image_size 25", "set image_size to 36"]),
        ({"image_encoder": {"depth": 13}}, ["depth 13", "temporal_patch_size 6"]),
        ({"clip": {"dim_text": 768}}, ["dim_text is 768", "dim is 16"]),
        ({"text_encoder": {"heads": 3}}, ["dim 16", "heads 3"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_ones_that_do(changes, words, settings) -> None:
    with pytest.raises(ConfigError) as refused:
        settings({"model": changes})
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_text_model_that_is_not_here_is_not_downloaded(settings, tmp_path) -> None:
    for path, said in ((tmp_path / "none", "nothing is downloaded"), (tmp_path, "transformers")):
        task = CTClipTask(settings({"model": {"text_encoder": {"path": str(path)}}}))
        with pytest.raises(ConfigError, match=said):
            task.build_model()


def test_findings_are_measured_where_there_is_something_to_tell_apart() -> None:
    labels = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 0], [0, 0, 0]]).float()
    scores = torch.tensor([[0.9, 0.5, 0.2], [0.1, 0.5, 0.3], [0.8, 0.5, 0.6], [0.2, 0.5, 0.7]])
    measured = measure_findings(scores, labels, 0.5)
    assert measured["auroc"] == pytest.approx(0.5)  # one of them 1, one of them 0, one unknown
    assert measured["precision"] == pytest.approx(0.5)
    assert measured["recall"] == pytest.approx(0.5)
    assert measured["f1"] == pytest.approx((1 + 2 / 3) / 2)
    assert measure_findings(scores, torch.zeros(4, 3), 0.5) == {}
    assert measure_findings(scores, labels, 0.85)["recall"] == pytest.approx(0.25)


def test_the_nearest_report_may_be_another_that_says_the_same() -> None:
    eye = torch.eye(3)
    assert retrieval_at_1(eye, eye.roll(1, 0), torch.tensor([1, 2, 3])) == 0
    assert retrieval_at_1(eye, eye.roll(1, 0), torch.tensor([1, 1, 3])) == pytest.approx(1 / 3)
    prompted = torch.tensor([[1.0, 0], [0, 1.0]])
    scores = zero_shot_scores(torch.tensor([[1.0, 0], [0, 1.0]]), prompted, torch.tensor(2.0))
    assert scores.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.e**2)])
