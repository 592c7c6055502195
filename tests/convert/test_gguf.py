"""A model from GGUF is the model from its Hugging Face folder; quantized tensors keep their bits."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from convert.checkpoints import FIXTURES, ORACLE, Tensors, read_tensors, stored_expert, stored_matrix
from convert.gguf_models import ARCHITECTURES, Encode, gguf_tensors, metadata_of, permute, write, write_fixture
from gguf import GGMLQuantizationType as Type

from coli.convert import ConvertReport
from coli.errors import CheckpointError, ColiError, OptionError, UnsupportedModelError
from coli.model.families import spec_from_config
from coli.model.tensors import container_spec
from coli.store.container import Container

Run = Callable[..., ConvertReport]
MOE = "qwen3_moe-padvocab"


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def each(kind: Type) -> Encode:
    """`kind` for matrices whose rows it can hold, float32 for the rest and for what is always float32."""

    def choose(name: str, values: np.ndarray) -> Type:
        block = gguf.GGML_QUANT_SIZES[kind][0]
        return kind if values.ndim > 1 and "inp" not in name and values.shape[-1] % block == 0 else Type.F32

    return choose


def wide_moe() -> tuple[dict[str, object], Tensors]:
    """A qwen3moe whose expert matrices divide into blocks: inter 64."""
    rng = np.random.default_rng(5)
    metadata, tensors = metadata_of(MOE), gguf_tensors(MOE)
    metadata["qwen3moe.expert_feed_forward_length"] = 64
    for layer in range(2):
        for part, shape in (("gate", (8, 64, 64)), ("up", (8, 64, 64)), ("down", (8, 64, 64))):
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = rng.standard_normal(shape).astype(np.float32)
    return metadata, tensors


@pytest.mark.parametrize("fixture", FIXTURES)
def test_weights_are_those_of_the_hugging_face_folder_bit_for_bit(fixture: str, tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", fixture), tmp_path / "ours")
    run(ORACLE / fixture, tmp_path / "theirs")
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_spec_is_that_of_the_hugging_face_folder(fixture: str, tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", fixture), tmp_path / "ours")
    path = ORACLE / fixture / "config.json"
    assert container_spec(Container.load(tmp_path / "ours")) == spec_from_config(json.loads(path.read_text()), path)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16])
def test_half_precision_is_exact_in_float32(kind: Type, tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base", each(kind)))
    expected = gguf_tensors("qwen3-base")["blk.1.ffn_down.weight"]
    rounded = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
    assert np.array_equal(stored_matrix(tmp_path / "model", "model.layers.1.mlp.down_proj.weight"), rounded)


@pytest.mark.parametrize(("kind", "label"), [(Type.Q4_0, "q4"), (Type.Q8_0, "q8")])
def test_native_matrices_keep_every_weight(kind: Type, label: str, tmp_path: Path, run: Run):
    fixture = "mixtral-base"
    run(write_fixture(tmp_path / "m.gguf", fixture, each(kind)), quant=None)
    tensors = gguf_tensors(fixture)
    manifest = json.loads((tmp_path / "model" / "coli.json").read_text())["tensors"]
    for name, ours in (
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        stored = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        if heads:  # back from neighbours to halves: the permutation with the two axes the other way round
            stored = stored.reshape(heads, -1, 2, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
        assert manifest[ours]["kind"] == label
        assert np.array_equal(stored_matrix(tmp_path / "model", ours), stored)


@pytest.mark.parametrize(("kind", "label"), [(Type.Q4_0, "q4"), (Type.Q8_0, "q8")])
def test_native_experts_keep_every_weight(kind: Type, label: str, tmp_path: Path, run: Run):
    metadata, tensors = wide_moe()
    run(write(tmp_path / "m.gguf", metadata, tensors, each(kind)), quant=None)
    quantization = json.loads((tmp_path / "model" / "coli.json").read_text())["quantization"]
    assert quantization["experts"] == quantization["dense"] == label
    for part in ("gate", "up", "down"):
        for expert_id in (0, 3, 7):
            values = tensors[f"blk.1.ffn_{part}_exps.weight"][expert_id]
            stored = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            assert np.array_equal(stored_expert(tmp_path / "model", 1, expert_id, part), stored)


def test_every_nibble_byte_and_scale_survives(tmp_path: Path, run: Run):
    """Bit patterns that no quantizer makes: all nibbles, int8 -128, negative, zero and subnormal scales."""
    rng = np.random.default_rng(9)
    metadata, tensors = metadata_of("qwen3-base"), gguf_tensors("qwen3-base")
    raw: dict[str, np.ndarray] = {}
    for name, nbytes in (("blk.0.ffn_gate.weight", 18), ("blk.0.ffn_up.weight", 34)):
        blocks = rng.integers(0, 256, (144, 2, nbytes), dtype=np.uint8)
        scales = np.array([-0.5, 0.0, 6e-8, 1.25, -0.0, 3e-5, 100.0, 0.0078], np.float16)
        blocks[:, :, :2] = rng.choice(scales, (144, 2, 1)).view(np.uint8)
        raw[name] = blocks.reshape(144, -1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value) if key != "general.architecture" else None
        else:
            writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for name, values in tensors.items():
        kind = {"blk.0.ffn_gate.weight": Type.Q4_0, "blk.0.ffn_up.weight": Type.Q8_0}.get(name, Type.F32)
        writer.add_tensor(name, raw.get(name, values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    run(tmp_path / "m.gguf", quant=None)
    gate = gguf.quants.dequantize(raw["blk.0.ffn_gate.weight"], Type.Q4_0)
    up = gguf.quants.dequantize(raw["blk.0.ffn_up.weight"], Type.Q8_0)
    assert np.array_equal(stored_matrix(tmp_path / "model", "model.layers.0.mlp.gate_proj.weight"), gate)
    assert np.array_equal(stored_matrix(tmp_path / "model", "model.layers.0.mlp.up_proj.weight"), up)
    scales = read_tensors(tmp_path / "model")["model.layers.0.mlp.up_proj.weight.scales"]
    expected = np.ascontiguousarray(raw["blk.0.ffn_up.weight"].reshape(144, 2, 34)[:, :, :2]).view(np.uint16)[:, :, 0]
    assert np.array_equal(scales.transpose(0, 2, 1).reshape(144, 2).view(np.uint16), expected)


def test_options_override_what_the_file_holds(tmp_path: Path, run: Run):
    metadata, tensors = wide_moe()
    path = write(tmp_path / "m.gguf", metadata, tensors, each(Type.Q4_0))
    run(path, quant=None, dense="q8")
    quantization = json.loads((tmp_path / "model" / "coli.json").read_text())["quantization"]
    assert (quantization["dense"], quantization["experts"]) == ("q8", "q4")


def test_layers_may_hold_their_experts_differently(tmp_path: Path, run: Run):
    metadata, tensors = wide_moe()

    def kind(name: str, values: np.ndarray) -> Type:
        wanted = Type.Q8_0 if name.startswith("blk.1") and ("down" in name or "up" in name) else Type.Q4_0
        return each(wanted)(name, values)

    run(write(tmp_path / "m.gguf", metadata, tensors, kind), quant=None)
    layers = json.loads((tmp_path / "model" / "coli.json").read_text())["experts"]["layers"]
    assert [part["kind"] for part in layers["0"]["parts"]] == ["q4", "q4", "q4"]
    assert [part["kind"] for part in layers["1"]["parts"]] == ["q4", "q8", "q8"]
    values = tensors["blk.1.ffn_down_exps.weight"][2]
    stored = gguf.quants.dequantize(gguf.quants.quantize(values, Type.Q8_0), Type.Q8_0)
    assert np.array_equal(stored_expert(tmp_path / "model", 1, 2, "down"), stored)


def test_other_types_are_quantized_again_with_one_notice(tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base", each(Type.Q5_1)), quant=None)
    assert len([line for line in run.notices if "Q5_1" in line]) == 1  # type: ignore[attr-defined]


def test_other_types_are_exact_in_float32_without_a_notice(tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base", each(Type.Q5_1)))
    assert run.notices == []  # type: ignore[attr-defined]
    values = gguf_tensors("qwen3-base")["blk.0.ffn_gate.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, Type.Q5_1), Type.Q5_1)
    assert np.array_equal(stored_matrix(tmp_path / "model", "model.layers.0.mlp.gate_proj.weight"), expected)


@pytest.mark.parametrize("fixture", ["mixtral-base", "olmoe-base"])
def test_experts_in_one_tensor_each_are_found(fixture: str, tmp_path: Path, run: Run):
    run(write(tmp_path / "m.gguf", metadata_of(fixture), gguf_tensors(fixture, per_expert=True)), tmp_path / "ours")
    run(ORACLE / fixture, tmp_path / "theirs")
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")


def test_fused_gate_and_up_experts_are_found(tmp_path: Path, run: Run):
    tensors = gguf_tensors(MOE)
    for layer in range(2):
        parts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    run(write(tmp_path / "m.gguf", metadata_of(MOE), tensors), tmp_path / "ours")
    run(ORACLE / MOE, tmp_path / "theirs")
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")


@pytest.mark.parametrize("fixture", ["llama-bias-sharded", "qwen2_moe-sparse-step"])
def test_fused_query_key_and_value_are_found(fixture: str, tmp_path: Path, run: Run):
    tensors = gguf_tensors(fixture)
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    run(write(tmp_path / "m.gguf", metadata_of(fixture), tensors), tmp_path / "ours")
    run(ORACLE / fixture, tmp_path / "theirs")
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")


def test_a_split_model_is_read_from_any_of_its_files(tmp_path: Path, run: Run):
    fixture = "llama-bias-sharded"
    out = tmp_path / "m.gguf"
    write(out, metadata_of(fixture), gguf_tensors(fixture), split_max_tensors=10, split_max_size=0)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) > 2
    run(files[1], tmp_path / "ours")
    run(ORACLE / fixture, tmp_path / "theirs")
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")


def test_missing_files_of_a_split_model_are_listed(tmp_path: Path, run: Run):
    fixture = "llama-bias-sharded"
    write(tmp_path / "m.gguf", metadata_of(fixture), gguf_tensors(fixture), split_max_tensors=10, split_max_size=0)
    files = sorted(tmp_path.glob("m-*.gguf"))
    for path in files[1:3]:
        path.unlink()
    refuse(run, files[0], CheckpointError, "2 of", files[1].name, files[2].name)


def test_a_renamed_file_of_a_split_model_is_not_taken_for_the_whole(tmp_path: Path, run: Run):
    fixture = "llama-bias-sharded"
    write(tmp_path / "m.gguf", metadata_of(fixture), gguf_tensors(fixture), split_max_tensors=10, split_max_size=0)
    path = sorted(tmp_path.glob("m-*.gguf"))[0].rename(tmp_path / "model.gguf")
    refuse(run, path, CheckpointError, "split.count")


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_down_exps.weight",
     "blk.1.ffn_gate_inp.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_named_as_the_file_would(name: str, tmp_path: Path, run: Run):
    tensors = gguf_tensors("mixtral-base")
    del tensors[name]
    refuse(run, write(tmp_path / "m.gguf", metadata_of("mixtral-base"), tensors), CheckpointError, name, "missing")


def test_a_tensor_nobody_asked_for_is_named(tmp_path: Path, run: Run):
    tensors = gguf_tensors("qwen3-base") | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    refuse(run, write(tmp_path / "m.gguf", metadata_of("qwen3-base"), tensors), CheckpointError, "self_attn.sinks")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, run: Run):
    tensors = gguf_tensors("qwen3-base")
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"][:32]
    refuse(run, write(tmp_path / "m.gguf", metadata_of("qwen3-base"), tensors), CheckpointError, "blk.0.ffn_up.weight")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number_names_its_tensor(value: float, tmp_path: Path, run: Run):
    path = write_fixture(tmp_path / "m.gguf", "qwen3-base", each(Type.Q8_0))
    info = gguf.GGUFReader(path).tensors
    (tensor,) = [tensor for tensor in info if tensor.name == "blk.1.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    at = int(tensor.data_offset) + 34 * 2 * 5
    raw[at : at + 2] = np.float16(value).tobytes()
    path.write_bytes(raw)
    refuse(run, path, CheckpointError, "blk.1.ffn_up.weight", "row 5", quant=None)


def test_an_integer_tensor_is_refused_by_type(tmp_path: Path, run: Run):
    path = tmp_path / "m.gguf"
    write_fixture(path, "qwen3-base")
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 16
    raw[at : at + 4] = int(Type.I32).to_bytes(4, "little")
    path.write_bytes(raw)
    refuse(run, path, UnsupportedModelError, "blk.0.ffn_up.weight", "I32")


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        ({"general__architecture": "mamba"}, UnsupportedModelError, "'mamba'"),
        ({"qwen3__block_count": None}, CheckpointError, "qwen3.block_count is missing"),
        ({"qwen3__block_count": "many"}, CheckpointError, "qwen3.block_count"),
        ({"qwen3__attention__head_count": 0}, CheckpointError, "qwen3.attention.head_count"),
        ({"qwen3__embedding_length": 2**32 - 1}, CheckpointError, "qwen3.embedding_length: expected 1..2147483647"),
        ({"qwen3__attention__head_count_kv": [2, 2, 1]}, UnsupportedModelError, "differs from layer to layer"),
        ({"qwen3__attention__value_length": 64}, UnsupportedModelError, "qwen3.attention.value_length"),
        ({"qwen3__attention__sliding_window": 128}, UnsupportedModelError, "qwen3.attention.sliding_window"),
        ({"qwen3__attention__scale": 0.5}, UnsupportedModelError, "qwen3.attention.scale"),
        ({"qwen3__final_logit_softcapping": 30.0}, UnsupportedModelError, "qwen3.final_logit_softcapping"),
        ({"qwen3__rope__scaling__type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"qwen3__rope__dimension_count": 16}, UnsupportedModelError, "qwen3.rope.dimension_count"),
        ({"qwen3__expert_count": 4}, CheckpointError, "qwen3.expert_count"),
        ({"tokenizer__ggml__pre": "viking"}, UnsupportedModelError, "'viking'"),
        ({"tokenizer__ggml__pre": None}, UnsupportedModelError, "tokenizer.ggml.pre"),
    ],
)
def test_what_the_metadata_asks_for_and_coli_cannot_is_named(
    changes: dict[str, object], error: type[ColiError], expected: str, tmp_path: Path, run: Run
):
    refuse(run, write_fixture(tmp_path / "m.gguf", "qwen3-base", **changes), error, expected)


@pytest.mark.parametrize("fixture", ["qwen3_moe-padvocab", "qwen2_moe-sparse-step"])
def test_absurd_layer_counts_are_refused_at_once(fixture: str, tmp_path: Path, run: Run):
    arch = ARCHITECTURES[fixture.split("-")[0]]
    path = write_fixture(tmp_path / "m.gguf", fixture, **{f"{arch}__block_count": 2**32 - 1})
    refuse(run, path, CheckpointError, f"{arch}.block_count: expected 1..1024, found 4294967295")


def test_metadata_of_any_length_makes_short_lines_and_names(tmp_path: Path, run: Run):
    keys = {f"qwen3__{'k' * 500}{number}": number for number in range(500)}
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base", general__name="n" * 100_000, **keys))
    (line,) = run.notices  # type: ignore[attr-defined]
    assert len(line) < 2500
    assert json.loads((tmp_path / "model" / "coli.json").read_text())["source"]["name"] == "n" * 200


def test_a_name_that_is_no_text_is_not_used(tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base", general__name=["a"] * 1000))
    assert json.loads((tmp_path / "model" / "coli.json").read_text())["source"]["name"] == "m"


def test_unknown_keys_are_told_once(tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base", qwen3__magic=1, qwen3__vocab_size=330))
    (line,) = run.notices  # type: ignore[attr-defined]
    assert "qwen3.magic" in line
    assert "vocab_size" not in line


def test_the_source_is_described_without_its_folder(tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "m.gguf", "qwen3-base"))
    text = (tmp_path / "model" / "coli.json").read_text()
    assert json.loads(text)["source"]["files"] == ["m.gguf"]
    assert str(tmp_path) not in text


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path, run: Run):
    run(write_fixture(tmp_path / "sha256-1234", "qwen3-base"))
    assert json.loads((tmp_path / "model" / "coli.json").read_text())["source"]["format"] == "gguf"


def test_a_folder_of_gguf_files_asks_for_one_of_them(tmp_path: Path, run: Run):
    folder = tmp_path / "files"
    folder.mkdir()
    write_fixture(folder / "m.gguf", "qwen3-base")
    refuse(run, folder, OptionError, "give one of them: m.gguf")


def test_a_file_that_is_not_there(tmp_path: Path, run: Run):
    refuse(run, tmp_path / "m.gguf", OptionError, "no such file")


def refuse(run: Run, path: Path, error: type[ColiError], *expected: str, **options: object) -> None:
    with pytest.raises(error) as caught:
        run(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message
    assert not (path.parent / "model").exists()


def test_permutation_of_the_test_writer_is_the_inverse_of_ours():
    rows = np.arange(24).reshape(24, 1)
    again = permute(rows, 2).reshape(2, 6, 2, 1).swapaxes(1, 2).reshape(24, 1)
    assert np.array_equal(again, rows)
