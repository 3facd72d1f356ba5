#!/usr/bin/env python3
"""Parquet files and Hugging Face `datasets` directories made into JSON lines for bifocal.

    python3 data/convert_dataset.py train-*.parquet --output chats.jsonl.zst

An input is a .parquet, .arrow or .jsonl file (.jsonl.gz and .jsonl.zst too), a directory that
save_to_disk wrote, or one with such files below it. Each row becomes {"messages"}, {"prompt",
"completion"} or {"text"}, from the columns that the options name, or from those of the usual names.
Needs pyarrow for Parquet and Arrow.
"""

import argparse
import json
import sys
from pathlib import Path

from json_lines import DataError, check_document, create_text, read_objects, require, write_document

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".jsonl.zst")


def split_of(directory, split):
    """The directory of one split where save_to_disk wrote several."""
    splits = json.loads((directory / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    require(
        split in splits,
        f"[{directory}] has the splits {', '.join(splits)}; name one with --split"
        + (f" (came {split})" if split else ""),
    )
    return directory / split


def files_of(path, split):
    require(path.exists(), f"[{path}] is not there")
    if path.is_file():
        require(path.name.endswith(SUFFIXES), f"[{path}] wanted a name that ends in {SUFFIXES}")
        return [path]
    if (path / "dataset_dict.json").exists():
        path = split_of(path, split)
    if (path / "state.json").exists():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        # The table may be a selection of the files' rows; only datasets itself knows which.
        require(
            not state.get("_indices_data_files"),
            f"[{path}] holds a selection of rows; call flatten_indices() before save_to_disk",
        )
        return [path / entry["filename"] for entry in state["_data_files"]]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
    if split:
        files = [
            file
            for file in files
            if file.name.startswith(split) or split in file.relative_to(path).parent.parts
        ]
    require(files, f"[{path}] has no files {SUFFIXES}" + (f" of the split {split}" if split else ""))
    return files


def rows_of(path):
    """Pairs of a place and a row, a batch at a time."""
    if path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        yield from read_objects(path)
        return
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"[{path}] needs the Python package pyarrow") from None
    number = 0
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
            return
        with pyarrow.memory_map(str(path)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                for begin in range(0, batch.num_rows, 256):
                    for row in batch.slice(begin, 256).to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"[{path}] cannot be read after row {number}: {error}") from error


def messages_of(place, value):
    """OpenAI's role and content, or ShareGPT's from and value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            pass  # the next line says what was wanted
    require(isinstance(value, list), f"[{place}] wanted a list of messages, came {value!r:.80}")
    messages = []
    for entry in value:
        require(isinstance(entry, dict), f"[{place}] wanted a message, came {entry!r:.80}")
        require(not entry.get("tool_calls"), f"[{place}] has tool calls, which no document can hold")
        role = entry.get("role") or entry.get("from")
        content = entry["content"] if "content" in entry else entry.get("value")
        messages.append({"role": SHAREGPT_ROLES.get(role, role), "content": content})
    return messages


class Mapping:
    """Which columns make a document: those named, or those of the usual names."""

    def __init__(self, messages=None, prompt=None, completion=None, text=None):
        require(
            (prompt is None) == (completion is None),
            "[columns] a prompt column and a completion column go together",
        )
        kinds = [kind for kind in (messages, prompt, text) if kind is not None]
        require(len(kinds) <= 1, "[columns] name those of one form: messages, prompt, or text")
        self.named = bool(kinds)
        self.messages, self.prompt, self.completion, self.text = messages, prompt, completion, text

    def guess(self, place, columns):
        found = [name for name in ("messages", "conversations") if name in columns]
        pairs = [("prompt", "completion"), ("prompt", "response"), ("instruction", "output")]
        forms = [Mapping(messages=name) for name in found]
        forms += [Mapping(prompt=a, completion=b) for a, b in pairs if a in columns and b in columns]
        if not forms and "text" in columns:
            forms = [Mapping(text="text")]
        require(
            len(forms) == 1,
            f"[{place}] its columns {sorted(columns)} hold {len(forms) or 'no'} forms of document; "
            "name the columns by options",
        )
        return forms[0]

    def document(self, place, row):
        for column in (self.messages, self.prompt, self.completion, self.text):
            require(
                column is None or column in row,
                f"[{place}] has no column {column}; it has {', '.join(sorted(row))}",
            )
        if self.messages is not None:
            return {"messages": messages_of(place, row[self.messages])}
        if self.text is not None:
            return {"text": row[self.text]}
        prompt, completion = row[self.prompt], row[self.completion]
        if isinstance(prompt, list) and isinstance(completion, list):
            return {"prompt": messages_of(place, prompt), "completion": messages_of(place, completion)}
        # An instruction's input follows it, as the sets of this form mean it.
        if self.prompt == "instruction" and row.get("input"):
            prompt = f"{prompt}\n\n{row['input']}"
        return {"prompt": prompt, "completion": completion}


def convert(inputs, output, mapping, split=None, skip_bad=False, limit=None):
    """Counts of documents written and of rows left out, and the first of those by its error."""
    written, skipped, first = 0, 0, None
    files = [file for path in inputs for file in files_of(Path(path), split)]
    with create_text(output) as out:
        for file in files:
            used = mapping if mapping.named else None
            for place, row in rows_of(file):
                if written == limit:
                    return written, skipped, first
                used = used or mapping.guess(place, row.keys())
                try:
                    document = check_document(place, used.document(place, row))
                except DataError as error:
                    if not skip_bad:
                        raise
                    skipped, first = skipped + 1, first or error
                    continue
                write_document(out, document)
                written += 1
        require(written > 0, f"[{output}] would hold no document")
    return written, skipped, first


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("inputs", nargs="+", help="files or directories")
    parser.add_argument("--output", required=True, help="a .jsonl, .jsonl.gz or .jsonl.zst to make")
    parser.add_argument("--messages-column", help="role and content, or ShareGPT's from and value")
    parser.add_argument("--prompt-column")
    parser.add_argument("--completion-column")
    parser.add_argument("--text-column")
    parser.add_argument("--split", help="of a directory with several, such as train")
    parser.add_argument("--limit", type=int, help="documents to write at most")
    parser.add_argument("--skip-bad", action="store_true", help="leave out rows that fit no form")
    options = parser.parse_args()
    try:
        mapping = Mapping(
            options.messages_column,
            options.prompt_column,
            options.completion_column,
            options.text_column,
        )
        written, skipped, first = convert(
            options.inputs, options.output, mapping, options.split, options.skip_bad, options.limit
        )
    except DataError as error:
        sys.exit(str(error))
    print(f"{options.output}: {written} documents")
    if skipped:
        print(f"left out {skipped} rows, the first for: {first}", file=sys.stderr)


if __name__ == "__main__":
    main()
