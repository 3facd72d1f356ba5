"""Each source's converter on records of its form, and what is refused."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import support
import convert_corpus
from convert_corpus import SOURCES, Settings, convert_all, refuse_evaluation
from json_lines import DataError, check_document, create_text, open_text

ROLES = ("user", "assistant")


def documents(source, record, **settings):
    made = list(SOURCES[source].convert(record, Settings(**settings)))
    return [check_document("x:1", document) for document in made]


def texts(source, record, **settings):
    """The contents of a record's only conversation."""
    (document,) = documents(source, record, **settings)
    roles = [message["role"] for message in document["messages"]]
    assert roles == [ROLES[i % 2] for i in range(len(roles))], roles
    return [message["content"] for message in document["messages"]]


class Converters(unittest.TestCase):
    def test_instruction(self):
        record = {"instruction": "Greet.", "input": "Ann", "response": "Hello Ann"}
        for source in ("gpteacher_roleplay", "gpteacher_toolformer", "gpteacher_codegen"):
            self.assertEqual(texts(source, record), ["Greet.\n\nAnn", "Hello Ann"])
        self.assertEqual(texts("gpteacher_roleplay", {**record, "input": ""})[0], "Greet.")
        self.assertEqual(documents("gpteacher_roleplay", {**record, "response": " "}), [])

    def test_grade_school(self):
        record = {"question": "How many?", "answer": "He has 2+3=<<2+3=5>>5.\n#### 5"}
        self.assertEqual(texts("gsm8k_train", record), ["How many?", "He has 2+3=5.\n#### 5"])

    def test_mbpp_train_alone(self):
        record = {
            "text": "Add.", "code": "def f(a):\r\n\treturn a\r\n", "test_setup_code": "",
            "test_list": ["assert f(1) == 1", "assert f(2) == 2"],
        }
        for task, count in ((510, 0), (600, 0), (601, 1), (974, 1), (975, 0)):
            self.assertEqual(len(documents("mbpp_train", {**record, "task_id": task})), count)
        question, answer = texts("mbpp_train", {**record, "task_id": 700})
        self.assertIn("assert f(1) == 1\nassert f(2) == 2\n```", question)
        self.assertEqual(answer, "```python\ndef f(a):\n\treturn a\n```")
        setup = {**record, "task_id": 700, "test_setup_code": "x = 1"}
        self.assertIn("```python\nx = 1\nassert f(1)", texts("mbpp_train", setup)[0])

    def test_multiple_choice(self):
        outputs = [{"text": "So (B)."}, {"text": "Thus (B)."}, {"text": "So (B)."}]
        record = {"question": "Which?", "options": ["red", "blue"], "outputs": outputs}
        made = documents("mmlu_pro_cot_science", record)
        self.assertEqual(
            [document["messages"][1]["content"] for document in made], ["So (B).", "Thus (B)."]
        )
        self.assertTrue(made[0]["messages"][0]["content"].startswith("Which?\n\nA. red\nB. blue\n\n"))
        self.assertEqual(documents("mmlu_pro_cot_other", {**record, "outputs": []}), [])

    def test_chosen_dialogue(self):
        good = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nBye.\n\nHuman: ok\n\nAssistant: Fine. "
        record = {"chosen": good, "rejected": "\n\nHuman: Hi\n\nAssistant: No."}
        self.assertEqual(texts("hh_rlhf_chosen", record), ["Hi", "Hello.\n\nBye.", "ok", "Fine."])
        for bad in (
            "",
            "\n\nHuman: Hi",
            "\n\nAssistant: Hi\n\nHuman: a",
            "\n\nHuman: a\n\nHuman: b\n\nAssistant: c\n\nAssistant: d",
            "\n\nHuman: a\n\nAssistant: ",
            "Dear\n\nHuman: a\n\nAssistant: b",
        ):
            self.assertEqual(documents("hh_rlhf_chosen", {"chosen": bad}), [], bad)

    def test_proof(self):
        record = {"question": "Show it.", "model_prediction": {"proof": "Done."}}
        self.assertEqual(texts("deepseek_math_proofs", record), ["Show it.", "Done."])

    def test_reasoning_by_score_and_length(self):
        record = {"question": "Sort.", "response": "a, b", "score": 0.5}
        self.assertEqual(texts("reasoning_gym", record), ["Sort.", "a, b"])
        self.assertEqual(documents("reasoning_gym", record, min_score=0.6), [])
        self.assertEqual(documents("reasoning_gym_long", record), [])
        long = {**record, "response": "a" * convert_corpus.LONG_TRACE, "score": 0.0}
        self.assertEqual(documents("reasoning_gym", long, min_score=0.0), [])
        self.assertEqual(texts("reasoning_gym_long", long)[1], long["response"])

    def test_manuals(self):
        for source in ("rust_docs", "sqlite_docs"):
            self.assertEqual(documents(source, {"text": "# A"}), [{"text": "# A"}])
            self.assertEqual(documents(source, {"text": "\n"}), [])


class Refusals(unittest.TestCase):
    def test_evaluation_sets(self):
        for name in (*convert_corpus.EVALUATION_ONLY, "humaneval", "ifeval", "math500"):
            with self.subTest(name=name), self.assertRaisesRegex(DataError, "evaluation only"):
                refuse_evaluation([name])
        with self.assertRaisesRegex(DataError, "no source; known: gpteacher_roleplay"):
            refuse_evaluation(["gsm8k"])
        refuse_evaluation(SOURCES)

    def test_no_source_reads_them(self):
        read = {file for source in SOURCES.values() for file in source.files}
        self.assertEqual(read & set(convert_corpus.EVALUATION_ONLY), set())
        categories = {source.category for source in SOURCES.values()}
        self.assertEqual(categories, {"chat", "code", "math", "science", "safety"})


@unittest.skipUnless(support.HAS_ZSTD, "needs zstandard or zstd")
class Corpus(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name) / "sets"
        self.output = pathlib.Path(directory.name) / "corpus"

    def write(self, name, records):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_text(path) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def test_writes_a_file_per_source_and_their_table(self):
        answer = {"question": "a", "answer": "bc"}
        self.write("gsm8k/train.jsonl.zst", [answer, answer])
        self.write("rust_docs/rust_docs.jsonl.zst", [{"text": "é"}, {"text": ""}])
        script = str(support.ROOT / "data" / "convert_corpus.py")
        done = subprocess.run(
            [sys.executable, script, "--input", str(self.root), "--output", str(self.output)],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("mbpp_train: not there (mbpp/mbpp.jsonl)", done.stderr)
        self.assertEqual(
            (self.output / "sources.tsv").read_text().splitlines(),
            ["name\tcategory\tdocuments\tcharacters\tleft_out",
             "gsm8k_train\tmath\t2\t6\t0", "rust_docs\tcode\t1\t1\t1"],
        )
        with open_text(self.output / "rust_docs.jsonl.zst") as file:
            self.assertEqual(file.read(), '{"text":"é"}\n')

    def test_a_record_of_another_form_is_named(self):
        self.write("gsm8k/train.jsonl.zst", [{"question": "a", "answer": "b"}, {"question": "a"}])
        with self.assertRaisesRegex(DataError, "train.jsonl.zst:2.*'answer'"):
            with contextlib.redirect_stdout(io.StringIO()):
                convert_all(self.root, self.output, ["gsm8k_train"], Settings())
        self.assertEqual(list(self.output.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
