"""Expert tensors of engines: names, shapes, and the Hugging Face tensor joined from what ranks have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.spec.fp8 import quantise_blocks
from roll_core.spec.multilinear import MULTILINEAR
from roll_core.spec.weights import CHUNK_BYTES, Digests, digest
from roll_modeling.engine_experts import GATE, UP, ExpertLayout, ExpertName
from roll_modeling.engine_weights import ExpertsTensor, LoadedModel
from roll_weight_transports.comparing import compare

E, H, I = 3, 4, 6  # noqa: E741 - the intermediate size, as in the module
PATH = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "matrix", "parameter", "part", "expert"),
    [
        ("gate_up_proj", "w13", "weight", None, None),
        ("down_proj", "w2", "weight", None, None),
        ("gate_up_proj_bias", "w13", "bias", None, None),
        ("down_proj_scale_inv", "w2", "weight_scale_inv", None, None),
        ("7.gate_proj.weight", "w13", "weight", GATE, 7),
        ("12.up_proj.weight_scale_inv", "w13", "weight_scale_inv", UP, 12),
        ("0.w2.weight", "w2", "weight", None, 0),
        ("0.w3.bias", "w13", "bias", UP, 0),
    ],
)
def test_names_of_expert_tensors_are_taken_apart(name, matrix, parameter, part, expert):
    found = ExpertName.parse(f"{PATH}.{name}")
    assert found == ExpertName(path=PATH, matrix=matrix, parameter=parameter, part=part, expert=expert)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.shared_experts.down_proj.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.experts.router.weight",
        "model.layers.0.mlp.experts.0.norm.weight",
    ],
)
def test_other_tensors_have_no_expert_name(name):
    assert ExpertName.parse(name) is None


def stored(layout, num_ranks):
    """Hugging Face's tensors of all experts by name, and the engine's matrices by rank: cut by hand."""
    gate, up, down = torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I)
    part = I // num_ranks
    cuts = [slice(rank * part, (rank + 1) * part) for rank in range(num_ranks)]

    def rows(gate_rows, up_rows, dim):
        if layout.interleaved:
            return torch.stack([gate_rows, up_rows], dim=dim + 1).flatten(dim, dim + 1)
        return torch.cat([gate_rows, up_rows], dim=dim)

    ranks = [{"w13": rows(gate[:, cut], up[:, cut], 1), "w2": down[:, :, cut]} for cut in cuts]
    gate_up = rows(gate, up, 1)
    tensors = {"gate_up_proj": gate_up, "down_proj": down}
    if layout.transposed:
        tensors = {name: each.transpose(1, 2) for name, each in tensors.items()}
    if not layout.interleaved:
        for expert in range(E):
            tensors |= {
                f"{expert}.gate_proj.weight": gate[expert],
                f"{expert}.up_proj.weight": up[expert],
                f"{expert}.down_proj.weight": down[expert],
            }
    return {f"{PATH}.{name}": each for name, each in tensors.items()}, ranks


LAYOUTS = {
    "usual": ExpertLayout(num_experts=E, hidden=H, intermediate=I),
    "gpt_oss": ExpertLayout(num_experts=E, hidden=H, intermediate=I, interleaved=True, transposed=True),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_tensors_are_joined_from_the_ranks_and_split_into_them(kind, num_ranks):
    layout = LAYOUTS[kind]
    tensors, ranks = stored(layout, num_ranks)
    for text, tensor in tensors.items():
        name = ExpertName.parse(text)
        assert layout.shape(name) == tensor.shape
        experts = layout.experts(name)
        joined = [layout.joined(name, [rank[name.matrix][expert] for rank in ranks]) for expert in experts]
        torch.testing.assert_close(torch.stack(joined).view(tensor.shape), tensor, rtol=0, atol=0)
    split = {
        (name.matrix, expert, part): matrix
        for text, tensor in tensors.items()
        if (name := ExpertName.parse(text)).expert is None
        for expert, part, matrix in layout.split(name, tensor)
    }
    for expert in range(E):
        one = torch.cat([rank["w2"][expert] for rank in ranks], dim=1)
        torch.testing.assert_close(split["w2", expert, None], one, rtol=0, atol=0)
        if num_ranks == 1 and kind == "usual":
            halves = torch.cat([split["w13", expert, GATE], split["w13", expert, UP]])
            torch.testing.assert_close(halves, ranks[0]["w13"][expert], rtol=0, atol=0)
        if num_ranks == 1 and kind == "gpt_oss":
            torch.testing.assert_close(split["w13", expert, None], ranks[0]["w13"][expert], rtol=0, atol=0)


def test_biases_of_down_projections_are_those_of_the_first_rank():
    layout, name = LAYOUTS["gpt_oss"], ExpertName.parse(f"{PATH}.down_proj_bias")
    assert layout.shape(name) == (E, H)
    assert layout.joined(name, [torch.arange(H), torch.zeros(H)]).tolist() == list(range(H))


@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj_scale_inv", "1.up_proj.weight_scale_inv"])
def test_scales_have_the_form_that_the_trainer_sends(name):
    layout = ExpertLayout(num_experts=E, hidden=256, intermediate=384)
    path, _, last = name.rpartition(".") if name[0].isdigit() else ("", "", name.removesuffix("_scale_inv"))
    sizes = {"gate_up_proj": (E, 768, 256), "down_proj": (E, 256, 384)}
    weight = torch.randn(sizes[last] if not path else (384, 256))
    _, scale = quantise_blocks(weight)
    found = ExpertName.parse(f"{PATH}.{name}")
    assert layout.shape(found) == scale.shape
    if path:
        return
    for expert, sent in enumerate(scale):
        if found.matrix == "w13":  # three ranks, each with a block of gate and a block of up
            shards = [torch.stack([sent[rank], sent[3 + rank]]) for rank in range(3)]
        else:
            shards = [sent[:, [rank]] for rank in range(3)]
        assert torch.equal(layout.joined(found, shards), sent), expert


class Module:
    w13_weight, w2_weight = torch.zeros(1), torch.zeros(1)


def location(text):
    name = ExpertName.parse(text)
    return ExpertsTensor(module=Module, parameter=name.stored, name=name, layout=LAYOUTS["usual"])


@pytest.mark.parametrize(
    ("dropped", "missing"),
    [
        (None, []),
        ("down_proj", ["down"]),
        ("1.up_proj.weight", ["gate_up"]),
    ],
)
def test_an_update_must_cover_every_expert_under_either_names(dropped, missing):
    held = [("gate_up", location(f"{PATH}.gate_up_proj")), ("down", location(f"{PATH}.down_proj"))]
    names = [f"{expert}.{part}_proj.weight" for expert in range(E) for part in ("gate", "up")] + ["down_proj"]
    announced = [(f"{PATH}.{name}", location(f"{PATH}.{name}").shape) for name in names if name != dropped]
    assert compare(announced, location, held) == {"unknown": [], "shapes": {}, "missing": missing}


class Experts(LoadedModel):
    """One process with all experts of a bfloat16 model, held as float32."""

    device, rank, dtype = "cpu", 0, torch.bfloat16

    def __init__(self, tensor):
        self.tensor = tensor

    def locate(self, name):
        return location(name)

    def located(self):
        return ()

    def read(self, name, at):
        raise AssertionError("experts are read one at a time")

    def adapter_buffer(self, name):
        raise KeyError(name)

    def expert_shards(self, at, expert):
        return [self.tensor[expert].float()]


def test_experts_are_digested_one_at_a_time_in_the_sent_dtype():
    sent = torch.randn(E, H, I).bfloat16()
    name = f"{PATH}.down_proj"
    assert Experts(sent).act("digest", [(name, "BF16", "")]) == {name: digest(sent)}
    assert Experts(sent[[1, 0, 2]]).act("digest", [(name, "BF16", "")]) != {name: digest(sent)}


def test_value_outside_the_sent_dtype_is_not_rounded():
    sent = torch.randn(E, H, I).bfloat16()
    wider = sent.float()
    wider[1, 2, 3] *= 1 + 2**-20
    assert Experts(wider).act("digest", [(f"{PATH}.down_proj", "BF16", "")]) != {f"{PATH}.down_proj": digest(sent)}


def test_a_model_in_float32_is_digested_in_float32():
    sent = torch.randn(E, H, I).bfloat16()
    name, experts = f"{PATH}.down_proj", Experts(sent)
    experts.dtype = torch.float32
    assert experts.act("digest", [(name, "BF16", "")]) == {name: digest(sent.float())}


@given(
    sizes=st.lists(st.integers(0, 3 * CHUNK_BYTES // 4), min_size=1, max_size=4),
    like=st.sampled_from(["", MULTILINEAR]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
@settings(max_examples=30, deadline=None)
def test_the_digest_of_pieces_is_that_of_the_whole(sizes, like, dtype):
    pieces = [torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(7)).to(dtype) for size in sizes]
    digests = Digests()
    digests.add_pieces("x", iter(pieces), like)
    assert digests.read() == {"x": digest(torch.cat(pieces), like)}
