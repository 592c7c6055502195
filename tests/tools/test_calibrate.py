"""`coli convert --calibrate`: what is measured, what it changes, and that it comes whole or not at all."""

import os
from pathlib import Path

import numpy as np
import pytest
from containers import ORACLE, container
from convert.checkpoints import read_tensors, stored_expert, stored_matrix

from coli.convert import ConvertOptions, conversion
from coli.errors import ColiError
from coli.llm import LLM
from coli.options import EngineOptions
from coli.tools import calibrate

DENSE, SPARSE, LATENT = "llama-bias-sharded", "olmoe-base", "glm_moe_dsa-sparse"
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 60, 700)]


def measured(path: Path, **options: object) -> dict[str, np.ndarray]:
    with LLM.open(path, EngineOptions(usage_save=False, kv="f32", **options), lambda line: None) as llm:  # type: ignore[arg-type]
        return calibrate.mean_squares(llm, IDS)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    words = ["one", "two", "three", "of", "the", "and", "a", "river", "stone"]
    picks = np.random.default_rng(3).integers(0, len(words), 900)
    path.write_text(" ".join(words[i] for i in picks))
    return path


def calibrated(source: str, target: Path, text: Path, **options: object) -> Path:
    chosen = ConvertOptions(**({"quant": "q4"} | options))  # type: ignore[arg-type]
    return calibrate.convert_calibrated(ORACLE / source, target, chosen, text, lambda line: None).path


def test_the_first_layer_s_columns_are_those_of_the_normed_embedding():
    path = container(DENSE, "f32")
    found = measured(path)["model.layers.0.self_attn.q_proj.weight"]
    tensors = read_tensors(path)
    window = calibrate.WINDOW
    with LLM.open(path, EngineOptions(usage_save=False), lambda line: None) as llm:
        prefix, eps = list(llm.tokenizer.prefix_ids), llm.spec.rms_norm_eps
        window = min(window, llm.spec.max_position_embeddings)
    body = window - len(prefix)
    counted = [i for at in range(0, len(IDS), body) for i in [*prefix, *IDS[at : at + body]][calibrate.SINK_ROWS :]]
    rows = stored_matrix(path, "model.embed_tokens.weight")[counted].astype(np.float64)
    normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps)
    squares = ((normed * tensors["model.layers.0.input_layernorm.weight"]) ** 2).mean(axis=0)
    np.testing.assert_allclose(found, np.maximum(squares / squares.mean(), calibrate.FLOOR), rtol=1e-4)


@pytest.mark.parametrize("name", [SPARSE, LATENT])
def test_every_matrix_that_multiplies_has_columns(name):
    found = measured(container(name, "f32"))
    names = read_tensors(container(name, "f32"))
    ends = ("_proj.weight", "_with_mqa.weight", "_up.weight", "wq_b.weight", "wk.weight", "lm_head.weight")
    matrices = {n for n in names if n.endswith(ends)}
    assert len(matrices) > 8
    assert matrices <= found.keys()
    for layer_idx in (1, 2) if name == LATENT else (0, 1):
        for part in ("gate", "up", "down"):
            assert found[f"layers.{layer_idx}.experts.{part}"].min() > 0


@pytest.mark.parametrize("name", [DENSE, SPARSE, LATENT])
def test_chunks_and_threads_do_not_change_a_bit(monkeypatch, name):
    path = container(name, "f32")
    whole = measured(path, threads=1)
    monkeypatch.setattr(calibrate, "CHUNK", 13)
    assert same(measured(path, threads=2), whole)


def test_streamed_experts_do_not_change_a_bit():
    path = container(SPARSE, "f32")
    assert same(measured(path, cap=2, io="pread"), measured(path))


def test_an_expert_that_saw_little_follows_its_layer():
    totals, prior = np.array([[0.0, 0.0], [3000.0, 1000.0]]), calibrate.PRIOR_ROWS
    sums = calibrate._Sums.__new__(calibrate._Sums)
    sums._dense, sums._seen = {}, {0: np.array([0, 1000])}
    sums._experts = {"layers.0.experts.down": totals}
    never, often = sums.means()["layers.0.experts.down"]
    np.testing.assert_allclose(never, [1.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(often, [1.5, 0.5], rtol=1e-6)
    sums._experts = {"layers.0.experts.down": np.array([[2.0, 6.0], [3000.0, 1000.0]])}
    sums._seen = {0: np.array([2, 1000])}
    layer = np.array([3002.0, 1006.0]) / 1002
    few = (np.array([2.0, 6.0]) + prior * layer) / (2 + prior)
    np.testing.assert_allclose(sums.means()["layers.0.experts.down"][0], few / few.mean(), rtol=1e-6)


def test_weighted_errors_shrink_and_the_same_call_gives_the_same_bytes(tmp_path, text):
    plain, ours = container(SPARSE, "q4"), calibrated(SPARSE, tmp_path / "a", text)
    again = calibrated(SPARSE, tmp_path / "b", text, threads=1)
    for name in ("dense.safetensors", "experts-00001.safetensors", "coli.json"):
        assert (ours / name).read_bytes() == (again / name).read_bytes()
        assert (ours / name).read_bytes() != (plain / name).read_bytes()
    q8 = container(SPARSE, "q8")
    with LLM.open(q8, EngineOptions(usage_save=False, kv="f32"), lambda line: None) as llm:
        importance = calibrate.mean_squares(llm, llm.tokenizer.encode(text.read_text()))

    def error(model: Path, name: str) -> float:
        exact = stored_matrix(container(SPARSE, "f32"), name)
        return float((importance[name] * (stored_matrix(model, name) - exact) ** 2).sum())

    names = [name for name in importance if not name.startswith("layers.")]
    assert sum(error(ours, name) for name in names) < sum(error(plain, name) for name in names)

    def expert_error(model: Path) -> float:
        exact, columns = container(SPARSE, "f32"), importance["layers.1.experts.down"]
        return float(
            sum(
                (columns[e] * (stored_expert(model, 1, e, "down") - stored_expert(exact, 1, e, "down")) ** 2).sum()
                for e in range(len(columns))
            )
        )

    assert expert_error(ours) < expert_error(plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "text.txt"]


def test_matrices_per_head_are_weighted_head_by_head(tmp_path, text):
    """k_up and v_up of latent attention: each head's columns by what that head reads."""
    plain, ours = container(LATENT, "q4"), calibrated(LATENT, tmp_path / "a", text)
    with LLM.open(container(LATENT, "q8"), EngineOptions(usage_save=False, kv="f32"), lambda line: None) as llm:
        importance = calibrate.mean_squares(llm, llm.tokenizer.encode(text.read_text()))
        heads = llm.spec.num_attention_heads
    for part in ("k_up", "v_up"):
        errors = np.zeros(2)
        for layer_idx in range(3):
            name = f"model.layers.{layer_idx}.self_attn.{part}.weight"
            columns = importance[name]
            assert len(columns) == heads
            assert not np.allclose(columns[0], columns[1], rtol=0.1)
            exact = stored_matrix(container(LATENT, "f32"), name)
            for i, model in enumerate((plain, ours)):
                error = (stored_matrix(model, name) - exact) ** 2
                errors[i] += (error.reshape(heads, -1, error.shape[1]) * columns[:, None]).sum()
        assert errors[1] < errors[0], part


def test_an_interrupted_calibration_goes_on_and_measures_once(tmp_path, text, monkeypatch):
    whole = calibrated(SPARSE, tmp_path / "whole", text)
    write = conversion._write

    def stop_at_experts(portion, *rest):
        if portion.file.layers and getattr(portion.steps[0].step, "importance", None) is not None:
            raise KeyboardInterrupt
        return write(portion, *rest)

    monkeypatch.setattr(conversion, "_write", stop_at_experts)
    with pytest.raises(KeyboardInterrupt):
        calibrated(SPARSE, tmp_path / "model", text)
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(conversion, "_write", write)
    monkeypatch.setattr(calibrate, "mean_squares", None)  # whoever calls it fails
    resumed = calibrated(SPARSE, tmp_path / "model", text)
    for name in ("dense.safetensors", "experts-00001.safetensors", "coli.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt", "whole"]


def test_another_text_is_measured_anew(tmp_path, text, monkeypatch):
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "mean_squares", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrated(SPARSE, tmp_path / "model", text)
    monkeypatch.undo()
    text.write_text(text.read_text()[::-1])
    other = calibrated(SPARSE, tmp_path / "model", text)
    fresh = calibrated(SPARSE, tmp_path / "fresh", text)
    assert (other / "dense.safetensors").read_bytes() == (fresh / "dense.safetensors").read_bytes()


def _missing(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_missing, "No such file"),
        (_folder, "Is a directory"),
        (lambda path: path.write_bytes(b""), "no text in it"),
        (lambda path: path.write_bytes(b" \n\t"), "no text in it"),
        (lambda path: path.write_bytes(b"good \xff\xfe bad"), "not UTF-8 at byte 5"),
        (lambda path: path.write_bytes("cut: é".encode()[:-1]), "not UTF-8 at byte 5"),
        (lambda path: path.write_text("too short"), "at least 512 are needed"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path, text, spoil, words):
    spoil(text)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ColiError, match=words) as caught:
        calibrated(SPARSE, tmp_path / "model", text)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(("source", "options"), [(SPARSE, {"quant": "q8"}), (DENSE, {"quant": None})])
def test_without_q4_scales_to_choose_it_is_refused_before_anything_runs(tmp_path, text, source, options, monkeypatch):
    monkeypatch.setattr(calibrate, "mean_squares", None)
    with pytest.raises(ColiError, match="add --quant q4") as caught:
        calibrated(source, tmp_path / "model", text, **options)
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_foreign_folder_in_the_way_is_not_removed(tmp_path, text):
    folder = tmp_path / ".model.calibration"
    folder.mkdir()
    (folder / "precious").write_text("x")
    with pytest.raises(ColiError, match="File exists") as caught:
        calibrated(SPARSE, tmp_path / "model", text)
    assert "\n" not in str(caught.value)
    assert os.listdir(folder) == ["precious"]


def test_reading_ends_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "MAX_TEXT_BYTES", 4)
    path = tmp_path / "text"
    path.write_text("abcé")
    assert calibrate.read_text(path) == "abc"
