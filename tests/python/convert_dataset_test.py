"""Rows of Parquet, Arrow and JSON-lines files made into documents."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import support
from convert_dataset import Mapping, convert, messages_of
from json_lines import DataError, open_text

CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
]


class Fixture(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def write_lines(self, rows, name="rows.jsonl"):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def converted(self, inputs, mapping=None, **options):
        output = self.path / "out.jsonl.gz"
        counts = convert(inputs, output, mapping or Mapping(), **options)
        with open_text(output) as file:
            documents = [json.loads(line) for line in file]
        output.unlink()
        return documents, counts


class Rows(Fixture):
    def test_usual_names(self):
        for row, wanted in (
            ({"messages": CHAT, "id": 1}, {"messages": CHAT}),
            ({"text": "a"}, {"text": "a"}),
            ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
            ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
            ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": CHAT[:1], "completion": CHAT[1:]}),
            (
                {"instruction": "add", "input": "1 1", "output": "2"},
                {"prompt": "add\n\n1 1", "completion": "2"},
            ),
            ({"instruction": "add", "input": "", "output": "2"}, {"prompt": "add", "completion": "2"}),
        ):
            with self.subTest(row=row):
                documents, _ = self.converted([self.write_lines([row])])
                self.assertEqual(documents, [wanted])

    def test_sharegpt(self):
        documents, _ = self.converted([self.write_lines([{"conversations": SHAREGPT}])])
        system = {"role": "system", "content": "Be brief."}
        self.assertEqual(documents, [{"messages": [system, *CHAT]}])
        self.assertEqual(messages_of("x", json.dumps(SHAREGPT)), [system, *CHAT])

    def test_named_columns(self):
        path = self.write_lines([{"q": "a", "a": "b", "c": CHAT, "t": "d"}])
        for mapping, wanted in (
            (Mapping(prompt="q", completion="a"), {"prompt": "a", "completion": "b"}),
            (Mapping(messages="c"), {"messages": CHAT}),
            (Mapping(text="t"), {"text": "d"}),
        ):
            self.assertEqual(self.converted([path], mapping)[0], [wanted])
        with self.assertRaisesRegex(DataError, "rows.jsonl:1.* no column x; it has a, c, q, t"):
            self.converted([path], Mapping(text="x"))
        with self.assertRaisesRegex(DataError, "name the columns"):
            self.converted([path])
        with self.assertRaisesRegex(DataError, "2 forms"):
            self.converted([self.write_lines([{"messages": CHAT, "prompt": "", "completion": ""}])])
        with self.assertRaisesRegex(DataError, "together"):
            Mapping(prompt="q")
        with self.assertRaisesRegex(DataError, "one form"):
            Mapping(text="t", messages="c")

    def test_bad_rows(self):
        bad = [{"from": "tool", "value": "x"}]
        path = self.write_lines([{"conversations": row} for row in (SHAREGPT, bad, SHAREGPT)])
        with self.assertRaisesRegex(DataError, "rows.jsonl:2.*'tool'"):
            self.converted([path])
        self.assertFalse((self.path / "out.jsonl.gz").exists())
        documents, (written, skipped, first) = self.converted([path], skip_bad=True)
        self.assertEqual((len(documents), written, skipped), (2, 2, 1))
        self.assertIn("rows.jsonl:2", str(first))
        with self.assertRaisesRegex(DataError, "no document"):
            self.converted([self.write_lines([{"conversations": bad}])], skip_bad=True)
        for value in ("plain text", [1], [{"role": "user", "content": "a", "tool_calls": [{}]}]):
            with self.assertRaises(DataError):
                messages_of("x", value)

    def test_directories(self):
        self.write_lines([{"text": "b"}], "set/train/2.jsonl")
        self.write_lines([{"text": "a"}], "set/train/1.jsonl")
        self.write_lines([{"text": "c"}], "set/test-0.jsonl")
        texts = lambda **options: [d["text"] for d in self.converted([self.path / "set"], **options)[0]]
        self.assertEqual(texts(), ["c", "a", "b"])
        self.assertEqual(texts(split="train"), ["a", "b"])
        self.assertEqual(texts(split="test"), ["c"])
        self.assertEqual(texts(limit=2), ["c", "a"])
        # The folders above what was named are no split.
        self.write_lines([{"text": "d"}], "train/set/train-0.jsonl")
        self.write_lines([{"text": "e"}], "train/set/test-0.jsonl")
        documents = self.converted([self.path / "train" / "set"], split="train")[0]
        self.assertEqual([document["text"] for document in documents], ["d"])
        with self.assertRaisesRegex(DataError, "no files .* of the split other"):
            texts(split="other")
        with self.assertRaisesRegex(DataError, "not there"):
            self.converted([self.path / "missing"])

    def test_command(self):
        path = self.write_lines([{"q": "a", "a": "é"}])
        output = self.path / "out.jsonl"
        script = str(support.ROOT / "data" / "convert_dataset.py")
        command = [sys.executable, script, str(path), "--output", str(output)]
        named = ["--prompt-column", "q", "--completion-column", "a"]
        done = subprocess.run(command + named, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(output.read_text(encoding="utf-8"), '{"prompt":"a","completion":"é"}\n')
        again = subprocess.run(command + named, capture_output=True, text=True)
        self.assertEqual(again.returncode, 1)
        self.assertIn("there already", again.stderr)
        self.assertNotIn("Traceback", again.stderr)


@unittest.skipUnless(support.has("pyarrow"), "needs pyarrow")
class Arrow(Fixture):
    def table(self):
        import pyarrow

        # Absent fields of a message become null, which is no tool call.
        messages = [CHAT, [{**CHAT[0], "tool_calls": None}], CHAT] * 200
        return pyarrow.table({"messages": messages, "n": list(range(600))})

    def test_parquet(self):
        import pyarrow.parquet

        path = self.path / "a.parquet"
        pyarrow.parquet.write_table(self.table(), path, row_group_size=100)
        documents, (written, _, _) = self.converted([path])
        self.assertEqual(written, 600)
        self.assertEqual(documents[:2], [{"messages": CHAT}, {"messages": CHAT[:1]}])
        path.write_bytes(path.read_bytes()[:-9])
        with self.assertRaisesRegex(DataError, "a.parquet"):
            self.converted([path])

    def save_to_disk(self, directory, selection=False):
        import pyarrow

        directory.mkdir(parents=True)
        table = self.table()
        with pyarrow.ipc.new_stream(directory / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=70)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        state["_indices_data_files"] = [{"filename": "indices.arrow"}] if selection else None
        (directory / "state.json").write_text(json.dumps(state))

    def test_save_to_disk(self):
        self.save_to_disk(self.path / "one")
        self.assertEqual(self.converted([self.path / "one"])[1][0], 600)
        self.save_to_disk(self.path / "several" / "train")
        listed = {"splits": ["train"]}
        (self.path / "several" / "dataset_dict.json").write_text(json.dumps(listed))
        self.assertEqual(self.converted([self.path / "several"], split="train")[1][0], 600)
        with self.assertRaisesRegex(DataError, "has the splits train; name one"):
            self.converted([self.path / "several"])
        self.save_to_disk(self.path / "selected", selection=True)
        with self.assertRaisesRegex(DataError, "flatten_indices"):
            self.converted([self.path / "selected"])


if __name__ == "__main__":
    unittest.main()
