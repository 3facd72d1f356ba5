"""Packed JSON lines, and which documents are accepted."""

import gzip
import pathlib
import tempfile
import unittest
from unittest import mock

import support
import json_lines
from json_lines import DataError, check_document, create_text, open_text, read_objects

TEXT = '{"text":"été 你好 😀"}\n' * 2000


class Files(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def check_round_trip(self, name):
        path = self.path / name
        with create_text(path) as file:
            file.write(TEXT)
        with open_text(path) as file:
            self.assertEqual(file.read(), TEXT)
        return path.read_bytes()

    def test_plain_and_gzip(self):
        self.assertEqual(self.check_round_trip("a.jsonl"), TEXT.encode())
        packed = self.check_round_trip("a.jsonl.gz")
        self.assertEqual(gzip.decompress(packed).decode(), TEXT)
        self.assertEqual(packed, self.check_round_trip("b.jsonl.gz"))

    @unittest.skipUnless(support.HAS_ZSTD, "needs zstandard or zstd")
    def test_zstd(self):
        packed = self.check_round_trip("a.jsonl.zst")
        self.assertEqual(packed[:4], b"\x28\xb5\x2f\xfd")
        self.assertLess(len(packed), len(TEXT.encode()) // 20)

    @unittest.skipUnless(support.shutil.which("zstd"), "needs zstd")
    def test_zstd_by_the_command(self):
        with mock.patch.object(json_lines, "zstandard", None):
            self.check_round_trip("a.jsonl.zst")
            broken = self.path / "broken.jsonl.zst"
            broken.write_bytes((self.path / "a.jsonl.zst").read_bytes()[:-9])
            with self.assertRaisesRegex(DataError, "broken.*zstd failed"):
                list(read_objects(broken))

    def test_damaged_input_names_the_file(self):
        self.check_round_trip("a.jsonl.gz")
        names = ["a.jsonl.gz"]
        if support.shutil.which("zstd"):
            self.check_round_trip("a.jsonl.zst")
            names.append("a.jsonl.zst")
        for name in names:
            whole = (self.path / name).read_bytes()
            for cut in (1, len(whole) // 2):
                broken = self.path / f"broken-{name}"
                broken.write_bytes(whole[:-cut])
                with self.assertRaisesRegex(DataError, "broken"):
                    list(read_objects(broken))

    def test_neither_zstandard_nor_zstd(self):
        with mock.patch.object(json_lines, "zstandard", None), mock.patch.object(
            json_lines.shutil, "which", return_value=None
        ):
            with self.assertRaisesRegex(DataError, "zstandard or the command zstd"):
                with create_text(self.path / "a.jsonl.zst"):
                    pass

    def test_a_failure_leaves_no_file_and_none_is_replaced(self):
        path = self.path / "a.jsonl"
        with self.assertRaises(ValueError):
            with create_text(path) as file:
                file.write("half")
                raise ValueError
        self.assertEqual(list(self.path.iterdir()), [])
        path.write_text("kept")
        with self.assertRaisesRegex(DataError, "there already"):
            with create_text(path):
                pass
        self.assertEqual(path.read_text(), "kept")

    def test_lines_name_their_place(self):
        path = self.path / "a.jsonl"
        path.write_text('{"a": 1}\n\n{"a": 2}\n')
        self.assertEqual(
            list(read_objects(path)), [(f"{path}:1", {"a": 1}), (f"{path}:3", {"a": 2})]
        )
        for bad in ("{}\n[1]\n", '{}\n{"a"\n'):
            path.write_text(bad)
            with self.assertRaisesRegex(DataError, "a.jsonl:2"):
                list(read_objects(path))


class Documents(unittest.TestCase):
    def test_three_forms(self):
        for document in (
            {"messages": [{"role": "user", "content": ""}]},
            {"prompt": "a", "completion": "b"},
            {"text": "😀"},
        ):
            self.assertIs(check_document("x:1", document), document)

    def test_refusals_name_the_place(self):
        for document in (
            {},
            {"text": None},
            {"text": "a", "id": 1},
            {"prompt": "a"},
            {"text": "\ud800"},
            {"messages": []},
            {"messages": [{"role": "tool", "content": "a"}]},
            {"messages": [{"role": "user", "content": None}]},
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        ):
            with self.subTest(document=document), self.assertRaisesRegex(DataError, r"\[x:1\]"):
                check_document("x:1", document)


if __name__ == "__main__":
    unittest.main()
