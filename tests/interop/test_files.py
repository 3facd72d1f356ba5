"""What we write, read with the libraries that others use: safetensors, h5py, tokenizers. docs/checkpoint_format.md and
data/README.md are followed to the letter."""

import hashlib
import json
import math
import pathlib
import re
import struct
import zlib

import h5py
import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support import GOLDEN, MACHINE, SOURCE, assert_close, bifocal, export, load, logits_of, our_logits, random_ids

SIZES = {"F32": 4, "BF16": 2}


def header_of(file):
    """The header as the format describes it: its length in 8 bytes, then JSON."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), len(data) - 8 - length, (8 + length) % 8


def check_weight_file(file):
    """Offsets cover the data exactly once and fit the shapes; the safetensors package reads every tensor."""
    header, data_bytes, misaligned = header_of(file)
    assert misaligned == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        begin, until = entry["data_offsets"]
        assert begin == end and until - begin == SIZES[entry["dtype"]] * math.prod(entry["shape"])
        end = until
    assert end == data_bytes
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == set(header)
        for name, entry in header.items():
            assert list(opened.get_tensor(name).shape) == entry["shape"]
    return set(header)


def test_exports_are_whole(students):
    for directory in sorted(students.iterdir()):
        names = check_weight_file(directory / "model.safetensors")
        assert ("lm_head.weight" in names) == ("untied" in directory.name)
        assert not (directory / "model.safetensors.index.json").exists()
        assert names == expected_names(json.loads((directory / "config.json").read_text()))


def expected_names(config):
    """The tensors of a student: those of its base model, and what its mixers add."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names.add("lm_head.weight")
    per_layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    per_layer += [f"self_attn.{projection}_proj" for projection in "qkvo"]
    if config["base_model_type"] == "qwen3":
        per_layer += ["self_attn.q_norm", "self_attn.k_norm"]
    for layer, mixer in enumerate(config["mixers"]):
        prefix = f"model.layers.{layer}."
        names |= {f"{prefix}{name}.weight" for name in per_layer}
        if config["base_model_type"] == "qwen2":
            names |= {f"{prefix}self_attn.{projection}_proj.bias" for projection in "qkv"}
        added = ["sink"] if mixer["sink"] == "learned" else []
        if mixer["states"] != "none":
            added += ["feature_q", "feature_k", "i_gate.weight", "f_gate.weight", "f_gate.bias"]
            if mixer["window"] != 0 and mixer["mix"] == "gate":
                added += ["o_gate.weight", "o_gate.bias"]
        names |= {f"{prefix}mixer.{name}" for name in added}
    return names


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-tiny-untied"])
def test_shards_and_index_agree(tmp_path, name):
    arguments = ["--teacher.path", GOLDEN / name, "--student.budget", 80, "--dtype", "float32"]
    directory = export(tmp_path / "sharded", *arguments, "--shard-bytes", 50_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert set(index["weight_map"].values()) == set(files)
    total = 0
    for file in files:
        names = check_weight_file(directory / file)
        assert names == {tensor for tensor, place in index["weight_map"].items() if place == file}
        total += sum(tensor.numel() * tensor.element_size() for tensor in load_file(directory / file).values())
    assert index["metadata"]["total_size"] == total
    assert ("lm_head.weight" in index["weight_map"]) == name.endswith("untied")
    # The same weights in one file give the same bits, and our reader follows the index.
    whole = load_file(export(tmp_path / "whole", *arguments) / "model.safetensors")
    assert set(whole) == set(index["weight_map"])
    for tensor, file in index["weight_map"].items():
        assert torch.equal(load_file(directory / file)[tensor], whole[tensor])
    ids = random_ids(60, 1)
    assert_close(logits_of(load(directory), ids), our_logits(directory, {"a": ids}, tmp_path)["a"])


def test_tokenizer_of_an_export_loads(tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    directory = export(tmp_path / "export", "--teacher.path", MACHINE / "teacher", "--student.budget", 144)
    words = "<problem> r0 4 r1 7"
    wanted = Tokenizer.from_file(str(MACHINE / "teacher/tokenizer.json")).encode(words).ids
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer(words)["input_ids"] == wanted and len(wanted) == 5
    assert tokenizer.decode(wanted) == words


# ---- HDF5 ---------------------------------------------------------------------------------------------------------


def check_manifest(directory):
    """The check by hand of docs/checkpoint_format.md."""
    text = (directory / "manifest.json").read_bytes()
    rest, field = re.fullmatch(rb'(.*),\n "checksum": "([0-9a-f]{64})"\n}\n', text, re.S).groups()
    assert hashlib.sha256(rest + b"\n}\n").hexdigest() == field.decode()
    manifest = json.loads(text)
    assert manifest["format"] == "bifocal checkpoint" and manifest["format_version"] == 1
    configuration = manifest["configuration"].encode()
    assert hashlib.sha256(configuration).hexdigest() == manifest["configuration_sha256"]
    assert manifest["ranks"] == len(manifest["files"])
    for file in manifest["files"]:
        assert pathlib.PurePath(file["name"]).name == file["name"]
        data = (directory / file["name"]).read_bytes()
        assert len(data) == file["bytes"] and hashlib.sha256(data).hexdigest() == file["sha256"]
    return manifest


def check_chunks(data, part, flat):
    """The chunks lie where the manifest says, each with Fletcher32 at its end."""
    begin, end, chunks = part["begin"], part["end"], part["chunks"]
    size = math.ceil((end - begin) / len(chunks))
    for number, chunk in enumerate(chunks):
        stored = data[chunk["offset"] :][: chunk["bytes"]]
        assert len(stored) == size * flat.itemsize + 4 and zlib.crc32(stored) == chunk["crc32"]
        wanted = flat[begin + number * size : min(end, begin + (number + 1) * size)].tobytes()
        assert stored[: len(wanted)] == wanted


def read_tensor(directory, manifest, tensor):
    """A tensor put together from the ranges of the rank files, with every attribute checked."""
    flat = numpy.full(math.prod(tensor["shape"]), numpy.nan, dtype=tensor["dtype"])
    covered = numpy.zeros(flat.size, dtype=int)
    for part in tensor["parts"]:
        begin, end = part["begin"], part["end"]
        with h5py.File(directory / manifest["files"][part["file"]]["name"]) as file:
            assert file.attrs["format_version"] == 1 and file.attrs["step"] == manifest["step"]
            assert file.attrs["rank"] == part["file"]
            dataset = file[f"/tensors/{tensor['name']}/{begin}"]
            assert dataset.attrs["shape"].tolist() == tensor["shape"]
            assert (dataset.attrs["begin"], dataset.attrs["end"]) == (begin, end)
            assert dataset.dtype == numpy.dtype(tensor["dtype"]).newbyteorder("<") and dataset.shape == (end - begin,)
            assert dataset.fletcher32 and math.prod(dataset.chunks) * dataset.dtype.itemsize <= 10_000_000
            flat[begin:end] = dataset[:]
        if "chunks" in part:  # older manifests have none
            check_chunks((directory / manifest["files"][part["file"]]["name"]).read_bytes(), part, flat)
        covered[begin:end] += 1
    assert (covered == 1).all()
    return flat.reshape(tensor["shape"])


def check_checkpoint(directory):
    """Every tensor by name, the same from the rank files and from the view over them."""
    manifest = check_manifest(directory)
    tensors = {tensor["name"]: read_tensor(directory, manifest, tensor) for tensor in manifest["tensors"]}
    assert tensors
    with h5py.File(directory / "checkpoint.h5") as view:
        for name, values in tensors.items():
            if values.size == 0:  # these stand in the manifest alone
                continue
            dataset = view[name]
            assert dataset.is_virtual
            assert dataset.shape == (values.shape or (1,))
            numpy.testing.assert_array_equal(dataset[:].reshape(values.shape), values)
    return manifest, tensors


def test_the_kept_checkpoints_of_version_1_read_as_documented():
    check_checkpoint(SOURCE / "tests/checkpoint/version_1/step_7")
    check_checkpoint(SOURCE / "tests/checkpoint/version_1_run/run/checkpoints/step_4")


@pytest.fixture(scope="module")
def training_run(tmp_path_factory):
    """Problems, token shards, and a student trained for a few steps."""
    folder = tmp_path_factory.mktemp("run")
    bifocal("synth", "register-machine", "--count", 60, "--max-steps", 10, "--seed", 3, "--output",
            folder / "problems.jsonl")  # fmt: skip
    bifocal("tokenize", folder / "problems.jsonl", "--tokenizer", MACHINE / "teacher/tokenizer.json", "--output",
            folder / "data", "--held-out", 0.2)  # fmt: skip
    bifocal("train", "--config", SOURCE / "configs/tiny/bifocal.toml", "--run.directory", folder / "run",
            "--data.train", folder / "data", "--data.row_tokens", 256, "--align.steps", 2,
            "--distill.steps", 2)  # fmt: skip
    return folder


def test_a_fresh_checkpoint_reads_as_documented_and_is_what_export_writes(training_run, tmp_path):
    checkpoints = training_run / "run/checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text().removesuffix("\n")
    assert newest.name == "step_4"
    manifest, tensors = check_checkpoint(newest)
    assert manifest["step"] == 4
    directory = export(tmp_path / "export", training_run / "run", "--dtype", "float32")
    exported = load_file(directory / "model.safetensors")
    assert set(exported) == set(expected_names(json.loads(manifest["model_config"])))
    for name, values in exported.items():
        numpy.testing.assert_array_equal(values.numpy(), tensors[name])


def test_token_shards_read_as_documented(training_run):
    problems = [json.loads(line) for line in (training_run / "problems.jsonl").read_text().splitlines()]
    wanted = sorted(problem["prompt_ids"] + problem["answer_ids"] for problem in problems)
    prompts = {tuple(problem["prompt_ids"] + problem["answer_ids"]): len(problem["prompt_ids"]) for problem in problems}
    documents = []
    for split in ("train", "held_out"):
        files = sorted((training_run / "data").glob(f"{split}-*.h5"))
        assert files and files[0].name == f"{split}-00000.h5"
        for name in files:
            with h5py.File(name) as shard:
                text = {key: shard.attrs[key] for key in ("format", "split", "vocabulary_hash")}
                text = {key: value.decode() if isinstance(value, bytes) else value for key, value in text.items()}
                assert (text["format"], text["split"]) == ("bifocal tokens", split)
                assert shard.attrs["format_version"] == 1
                words = json.loads((MACHINE / "teacher/tokenizer.json").read_text())["model"]["vocab"]
                lines = "".join(word + "\n" for word in sorted(words, key=words.get))
                assert text["vocabulary_hash"] == hashlib.sha256(lines.encode()).hexdigest()
                ids, keep, offsets = shard["ids"], shard["keep"], shard["offsets"]
                assert (ids.dtype, keep.dtype, offsets.dtype) == ("<i4", "u1", "<i8")
                assert ids.fletcher32 and keep.fletcher32
                assert ids.shape == keep.shape == (offsets[-1],) and offsets[0] == 0
                assert shard.attrs["vocabulary"] == 128 and shard.attrs["largest_id"] == ids[:].max()
                for begin, end in zip(offsets[:-1], offsets[1:]):
                    document = ids[begin:end].tolist()
                    documents.append(document)
                    # Kept are the tokens at which an answer token is predicted.
                    prompt = prompts[tuple(document)]
                    assert keep[begin:end].tolist() == [0] * (prompt - 1) + [1] * (len(document) - prompt) + [0]
    assert sorted(documents) == wanted
