"""The parts of data/smollm2_to_hf.py that need no model."""

import pathlib
import tempfile
import unittest

import support

if support.has("gguf", "numpy", "safetensors", "tokenizers"):
    import numpy
    import safetensors

    import smollm2_to_hf


@unittest.skipUnless(support.has("gguf", "numpy", "safetensors", "tokenizers"), "needs gguf")
class SmolLM2(unittest.TestCase):
    def test_half_split_undoes_pairs(self):
        heads, dim = 3, 8
        rows = numpy.arange(heads * dim * 2, dtype=numpy.float32).reshape(heads * dim, 2)
        paired = numpy.empty_like(rows)
        for head in range(heads):
            for i in range(dim // 2):
                paired[head * dim + 2 * i] = rows[head * dim + i]
                paired[head * dim + 2 * i + 1] = rows[head * dim + dim // 2 + i]
        self.assertTrue((smollm2_to_hf.half_split(paired, heads) == rows).all())

    def test_bfloat16_rounds_to_even(self):
        # 1 + k 2^-8 lies halfway between two bfloat16 numbers where k is odd.
        values = numpy.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, 3e-39])
        bits = numpy.frombuffer(smollm2_to_hf.bfloat16_bytes(values.astype(numpy.float32)), "<u2")
        self.assertEqual([hex(b) for b in bits[:5]], ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0x8000"])

    def test_names(self):
        self.assertEqual(
            smollm2_to_hf.hf_name("blk.7.attn_q.weight"), "model.layers.7.self_attn.q_proj.weight"
        )
        self.assertEqual(smollm2_to_hf.hf_name("token_embd.weight"), "model.embed_tokens.weight")
        for unknown in ("output.weight", "blk.0.attn_q.bias", "blk.0.ssm_in.weight"):
            with self.assertRaises(SystemExit):
                smollm2_to_hf.hf_name(unknown)

    def test_weights_file(self):
        weights = {
            "a": numpy.array([[0.1, -2.5, 3e38]], dtype=numpy.float32),
            "b": numpy.array([1e-3], dtype=numpy.float32),
        }
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "model.safetensors"
            for dtype, code in (("float32", "F32"), ("bfloat16", "BF16")):
                smollm2_to_hf.write_weights(path, weights, dtype)
                smollm2_to_hf.check_weights(path, weights, dtype)
                with safetensors.safe_open(str(path), framework="numpy") as file:
                    self.assertEqual(file.get_slice("a").get_dtype(), code)
                    self.assertEqual(list(file.get_slice("a").get_shape()), [1, 3])
            damaged = {**weights, "b": weights["b"] * 1.01}
            with self.assertRaises(SystemExit):
                smollm2_to_hf.check_weights(path, damaged, "bfloat16")


if __name__ == "__main__":
    unittest.main()
