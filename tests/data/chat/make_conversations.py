#!/usr/bin/env python3
"""Makes 200 conversations and writes what transformers' apply_chat_template gives for them.

    python3 make_conversations.py --chatml QWEN3_INSTRUCT_2507.jinja --smollm2 SMOLLM2.jinja \
        --llama3 META_LLAMA_3.jinja --qwen3-tokenizer DIRECTORY --smollm2-tokenizer DIRECTORY

The template texts are those of the models' repositories and are not kept here. Needs the PyPI
package transformers (made with 5.24.0). Writes conversations.jsonl beside this file; a line has the
messages, whether a generation prompt is added, and per template the text's SHA-256, the ids under a
small tokenizer of ../tokenizers and the runs [begin, end) of positions whose next token is an
assistant's. Under the two whole tokenizers it has the SHA-256 of ids and runs.
"""

import argparse
import hashlib
import json
import pathlib
import random
import tempfile

from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
COUNT = 200

WORDS = (
    "window state memory token gate layer river lantern orbit maple copper winter seven quiet "
    "kettle harbour measure argue because although it's they're won't 12 2048 3.14 1,000 x_i"
).split()
FOREIGN = [
    "Où est la bibliothèque ?", "Größenordnung, süß", "Сколько будет семь?", "窓を開けてください。",
    "창문이 작다", "مرحبا", "नमस्ते", "👩‍👩‍👧 and 🇫🇷 and 👍🏽", "e\u0301te\u0301 (decomposed)",
    "\u212b is not \u00c5", "\u1100\u1161\u11a8 jamo", "q\u0323\u0307", "\u0338 starts with a mark",
]
CODE = [
    "```python\ndef area(w, h):\n    return w * h\n```", "```cpp\nint main() {\n\treturn 0;\n}\n```",
    "`a <| b |> c`", "for i in range(10):\n    print(i)\n\n\n", "{% if x %}{{ y }}{% endif %}",
]
CONTROL = [
    "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|begin_of_text|>", "<think>\n\n</think>\n\n",
    "<|start_header_id|>user<|end_header_id|>\n\n", "<|endoftext|>", "<tool_call>{}</tool_call>",
    "<|im_end|>\u0338", "<|im_end", "|im_start|>",
]
SPACE = [" ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u00a0", "\u3000", "\u2028", "\x1f", "\u200b"]


def sentence(draw, length):
    text = " ".join(draw.choice(WORDS) for _ in range(length))
    return text[0].upper() + text[1:] + draw.choice([".", "?", "!", ":", ""])


def content(draw):
    kind = draw.random()
    if kind < 0.06:
        return ""
    if kind < 0.10:
        return draw.choice(SPACE) * draw.randint(1, 3)
    parts = [sentence(draw, draw.randint(1, 9))]
    if kind > 0.97:
        parts += [sentence(draw, draw.randint(5, 15)) for _ in range(15)]
    for pool, share in ((FOREIGN, 0.25), (CODE, 0.2), (CONTROL, 0.15)):
        if draw.random() < share:
            parts.insert(draw.randint(0, len(parts)), draw.choice(pool))
    text = draw.choice([" ", "\n", "\n\n"]).join(parts)
    if draw.random() < 0.2:
        text = draw.choice(SPACE) + text
    if draw.random() < 0.2:
        text += draw.choice(SPACE)
    return text


def conversation(draw):
    roles = ["system"] if draw.random() < 0.4 else []
    for _ in range(draw.choice([1, 1, 1, 2, 2, 3, 5])):
        roles += ["user", "assistant"]
    kind = draw.random()
    if kind < 0.4:
        roles.pop()
    elif kind < 0.45:
        roles = [role for role in roles if role != "user"]
    elif kind < 0.5:
        roles.insert(draw.randint(1, len(roles)), draw.choice(["system", "user", "assistant"]))
    messages = [{"role": role, "content": content(draw)} for role in roles]
    # Mostly as in use: a prompt after a user's turn, none after an assistant's.
    generate = (roles[-1] == "user") != (draw.random() < 0.1)
    return messages, generate


def assistant_ranges(tokenizer, messages, end_of_turn, strip):
    """Character ranges of the rendered text: an assistant's content and the token that closes it."""
    def length(part, generate=False):
        return len(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=generate))

    ranges = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        end = text.rindex(end_of_turn) + len(end_of_turn)
        said = message["content"].strip() if strip else message["content"]
        begin = end - len(end_of_turn) - len(said)
        assert text[begin:end] == said + end_of_turn and text[end:] in ("", "\n")
        assert i == 0 or begin == length(messages[:i], generate=True)
        ranges.append((begin, end))
    return ranges


class Reference:
    def __init__(self, path, template, end_of_turn, bos=None, strip=False):
        # Without its post-processor the offsets are whole: none of them trims white space.
        rules = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        rules["post_processor"] = None
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(rules, file)
            file.flush()
            self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=file.name)
        self.tokenizer.chat_template = template
        if bos is not None:
            self.tokenizer.bos_token = bos
        self.end_of_turn = end_of_turn
        self.strip = strip

    def __call__(self, messages, generate):
        options = {"add_generation_prompt": generate}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = self.tokenizer.apply_chat_template(messages, return_dict=False, **options)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoding["input_ids"] == ids
        ranges = assistant_ranges(self.tokenizer, messages, self.end_of_turn, self.strip)
        runs = []
        for token, (begin, end) in enumerate(encoding["offset_mapping"]):
            if token > 0 and any(begin < last and first < end for first, last in ranges):
                if runs and runs[-1][1] == token - 1:
                    runs[-1][1] = token
                else:
                    runs.append([token - 1, token])
        return {"text_sha256": sha256(text), "ids": ids, "keep": runs}


def sha256(text):
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def digest(result):
    ids = " ".join(map(str, result["ids"]))
    runs = " ".join(f"{begin}-{end}" for begin, end in result["keep"])
    return sha256(f"{ids}|{runs}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for option in ("chatml", "smollm2", "llama3", "qwen3-tokenizer", "smollm2-tokenizer"):
        parser.add_argument(f"--{option}", type=pathlib.Path, required=True)
    options = parser.parse_args()

    chatml, smollm2, llama3 = (
        path.read_text(encoding="utf-8") for path in (options.chatml, options.smollm2, options.llama3)
    )
    small = HERE.parent / "tokenizers"
    llama3_options = {"bos": "<|begin_of_text|>", "strip": True}
    whole = {
        "chatml": Reference(small / "qwen", chatml, "<|im_end|>"),
        "smollm2": Reference(small / "smollm2", smollm2, "<|im_end|>"),
        "llama3": Reference(small / "llama3", llama3, "<|eot_id|>", **llama3_options),
    }
    hashed = {
        "qwen3_sha256": Reference(options.qwen3_tokenizer, chatml, "<|im_end|>"),
        "smollm2_sha256": Reference(options.smollm2_tokenizer, smollm2, "<|im_end|>"),
    }
    draw = random.Random(1)
    with open(HERE / "conversations.jsonl", "w", encoding="utf-8") as file:
        for _ in range(COUNT):
            messages, generate = conversation(draw)
            line = {"messages": messages, "add_generation_prompt": generate}
            line |= {name: reference(messages, generate) for name, reference in whole.items()}
            line |= {name: digest(reference(messages, generate)) for name, reference in hashed.items()}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
