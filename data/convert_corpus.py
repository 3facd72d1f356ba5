#!/usr/bin/env python3
"""Public instruction sets and manuals made into one .jsonl.zst each, for mixtures of training data.

    python3 data/convert_corpus.py --input DIRECTORY --output corpus

The input directory holds the sets as FOLDER/FILE (the table SOURCES below lists them); those that
are missing are named and passed over. Sets that serve evaluation are never read. The output directory gets
a file per source and sources.tsv: name, category, documents, characters, records left out.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from json_lines import DataError, check_document, create_text, read_objects, require, write_document

# Prompts and solutions that measure a model: training on them would make the measure worthless.
EVALUATION_ONLY = (
    "gsm8k/test.jsonl",
    "gsm8k/example_model_solutions.jsonl.zst",
    "humaneval/HumanEval.jsonl",
    "ifeval/input_data.jsonl",
    "ifeval/input_response_data_gpt4_20231107_145030.jsonl",
    "ifeval/eval_results_strict_gpt4.jsonl",
    "math500/test.jsonl",
)

MBPP_TRAIN = range(601, 975)
LONG_TRACE = 12000  # characters, about 4,000 tokens
HH_TURN = re.compile(r"\n\n(Human|Assistant):")
CALCULATOR = re.compile(r"<<[^<>]*>>")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class Settings:
    min_score: float = 0.5  # of reasoning_gym's answers


def chat(*contents):
    """A conversation that a user begins."""
    roles = ("user", "assistant")
    turns = enumerate(contents)
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in turns]}


# Each converter takes a record and the settings and yields documents: none, one or several.


def instruction(record, _):
    question = record["instruction"]
    if record["input"]:
        question += "\n\n" + record["input"]
    if question.strip() and record["response"].strip():
        yield chat(question, record["response"])


def grade_school(record, _):
    # <<48/2=24>> marks calls of a calculator that a chat model does not have.
    yield chat(record["question"], CALCULATOR.sub("", record["answer"]))


def mbpp(record, _):
    if record["task_id"] not in MBPP_TRAIN:
        return
    setup = [record["test_setup_code"]] if record["test_setup_code"] else []
    tests = "\n".join(setup + record["test_list"]).replace("\r\n", "\n")
    code = record["code"].replace("\r\n", "\n").strip("\n")
    yield chat(
        f"{record['text'].strip()} The function has to pass these tests:\n```python\n{tests}\n```",
        f"```python\n{code}\n```",
    )


def multiple_choice(record, _):
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, record["options"]))
    question = (
        f"{record['question'].strip()}\n\n{options}\n\n"
        "Think step by step, then name the letter of the right option."
    )
    for text in dict.fromkeys(output["text"].strip() for output in record["outputs"]):
        if text:
            yield chat(question, text)


def chosen_dialogue(record, _):
    head, *pieces = HH_TURN.split(record["chosen"])
    speakers, contents = pieces[::2], [text.strip() for text in pieces[1::2]]
    alternate = speakers == ["Human", "Assistant"] * (len(speakers) // 2)
    if not head.strip() and speakers and alternate and all(contents):
        yield chat(*contents)


def proof(record, _):
    yield chat(record["question"], record["model_prediction"]["proof"])


def reasoning(record, settings):
    if record["score"] >= settings.min_score and len(record["response"]) < LONG_TRACE:
        yield chat(record["question"], record["response"])


def long_reasoning(record, _):
    if len(record["response"]) >= LONG_TRACE:
        yield chat(record["question"], record["response"])


def manual(record, _):
    if record["text"].strip():
        yield {"text": record["text"]}


@dataclass
class Source:
    category: str  # chat, code, math, science or safety
    files: tuple
    convert: Callable


SOURCES = {
    "gpteacher_roleplay": Source("chat", ("gpteacher/roleplay.jsonl.zst",), instruction),
    "gpteacher_toolformer": Source("chat", ("gpteacher/toolformer.jsonl.zst",), instruction),
    "gpteacher_codegen": Source("code", ("gpteacher/codegen-instruct.jsonl.zst",), instruction),
    "gsm8k_train": Source("math", ("gsm8k/train.jsonl.zst",), grade_school),
    "mbpp_train": Source("code", ("mbpp/mbpp.jsonl",), mbpp),
    "mmlu_pro_cot_science": Source("science", ("mmlu_pro_cot/science.jsonl.zst",), multiple_choice),
    "mmlu_pro_cot_other": Source("science", ("mmlu_pro_cot/other.jsonl.zst",), multiple_choice),
    "hh_rlhf_chosen": Source("safety", ("hh_rlhf/harmless-base-test.jsonl.zst",), chosen_dialogue),
    "deepseek_math_proofs": Source("math", ("deepseek_math_v2/proofs.jsonl.zst",), proof),
    "reasoning_gym": Source(
        "math",
        (
            "reasoning_gym/mistral_small_31.jsonl.zst",
            "reasoning_gym/r1_qwq_final_answers.jsonl.zst",
        ),
        reasoning,
    ),
    # Long answers are rare and mostly wrong; they are for what a window cannot hold.
    "reasoning_gym_long": Source(
        "math",
        (
            "reasoning_gym/mistral_small_31.jsonl.zst",
            "reasoning_gym/r1_qwq_final_answers.jsonl.zst",
        ),
        long_reasoning,
    ),
    "rust_docs": Source("code", ("rust_docs/rust_docs.jsonl.zst",), manual),
    "sqlite_docs": Source("code", ("sqlite_docs/sqlite_docs.jsonl.zst",), manual),
}


def refuse_evaluation(names):
    """Names may be of sources or of files; those that measure a model are refused."""
    folders = {file.split("/")[0] for file in EVALUATION_ONLY}
    folders -= {file.split("/")[0] for source in SOURCES.values() for file in source.files}
    for name in names:
        require(
            name not in EVALUATION_ONLY and name.split("/")[0] not in folders,
            f"[{name}] serves evaluation only and is not made into training data",
        )
        require(name in SOURCES, f"[{name}] is no source; known: {', '.join(SOURCES)}")


def convert_source(source, root, output, settings):
    """Documents, characters and records that gave no document."""
    documents = characters = left_out = 0
    with create_text(output) as out:
        for file in source.files:
            require(file not in EVALUATION_ONLY, f"[{file}] serves evaluation only")
            for place, record in read_objects(root / file):
                try:
                    made = list(source.convert(record, settings))
                except (KeyError, TypeError, AttributeError) as error:
                    raise DataError(f"[{place}] is not of the form of {file}: {error!r}") from error
                left_out += not made
                for document in made:
                    write_document(out, check_document(place, document))
                    documents += 1
                    texts = document.get("messages", [{"content": document.get("text")}])
                    characters += sum(len(text["content"]) for text in texts)
        require(documents > 0, f"[{output}] would hold no document")
    return documents, characters, left_out


def convert_all(root, output, names, settings):
    refuse_evaluation(names)
    require(root.is_dir(), f"[{root}] is no directory")
    present = [name for name in names if all((root / file).exists() for file in SOURCES[name].files)]
    require(present, f"[{root}] holds none of the sets")
    output.mkdir(parents=True, exist_ok=True)
    lines = ["name\tcategory\tdocuments\tcharacters\tleft_out"]
    with create_text(output / "sources.tsv") as table:
        for name in names:
            if name not in present:
                print(f"{name}: not there ({', '.join(SOURCES[name].files)})", file=sys.stderr)
                continue
            source = SOURCES[name]
            counts = convert_source(source, root, output / f"{name}.jsonl.zst", settings)
            lines.append("\t".join(map(str, (name, source.category, *counts))))
            print(lines[-1], flush=True)
        table.write("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--input", type=Path, required=True, help="directory of the sets")
    parser.add_argument("--output", type=Path, required=True, help="directory of the corpus")
    parser.add_argument("--only", nargs="+", default=list(SOURCES), help="sources, by name")
    parser.add_argument(
        "--min-score",
        type=float,
        default=Settings.min_score,
        help="least score (0 to 1) of an answer of reasoning_gym",
    )
    options = parser.parse_args()
    try:
        convert_all(options.input, options.output, options.only, Settings(options.min_score))
    except DataError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
