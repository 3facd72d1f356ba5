#!/usr/bin/env python3
"""Trains the small tokenizers of this folder and writes what the `tokenizers` package makes of cases.

Needs the PyPI package tokenizers (made with 0.23.3). All text is made here. Writes NAME/tokenizer.json,
cases.jsonl and nfc.jsonl beside this file.
"""

import json
import pathlib
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

HERE = pathlib.Path(__file__).parent

QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# --- Training text ------------------------------------------------------------------------------

SUBJECTS = "the model,a window,our state,this layer,every token,the teacher,a student,she,they,it".split(",")
VERBS = "reads,writes,keeps,forgets,sums up,compares,can't see,doesn't need,moves,has learned".split(",")
OBJECTS = ("the first line,older keys,all the values,a long problem,numbers like 12 and 2048,what it said,"
           "the answer,its own memory,one more step,nothing at all").split(",")
ENDINGS = [".", "!", "?", ", and then", ";", " - again.", ":\n", ".\n\n"]
WORLD = [
    "la mémoire est courte, l'été est long; où ça ?", "Das Gedächtnis größer machen, später prüfen.",
    "El niño leyó mañana tres líneas más.", "Память окна мала, но слов в ней много.",
    "το παράθυρο είναι μικρό", "記憶は短い。窓の外を見る。", "窗口很小，記憶很長。", "기억은 짧고 창은 작다.",
    "ذاكرة النافذة قصيرة", "खिड़की छोटी है", "หน้าต่างเล็ก", "naïve coöperation — “quoted” … 5 €",
    "😀 👍🏽 👩‍👩‍👧 🇫🇷", "α + β ≤ γ², ∑ x_i → ∞",
]
CODE = [
    "for (int i = 0; i < n; ++i) {\n    sum += x[i];\n}\n", "def add(a, b):\n    return a + b\n\n",
    "if (!done) {\n\treturn nullptr;\n}\n", "#include <vector>\n", "x = {'key': [1, 22, 333], \"b\": None}\n",
    "assert len(tokens) == 1024, f\"{len(tokens)}\"\n", "SELECT id, name FROM items WHERE price > 10.50;\n",
]


SYLLABLES = ("ba be bri con com der dis ed er est for gra ing in ke la le ler li lo ma men mi na ne nor o "
             "per po pre qua re ri ro sa sen si ston sta ter tion to tra un va ver vi wa we wor y ze").split()


def training_text(seed):
    draw = random.Random(seed)
    words = ["".join(draw.choice(SYLLABLES) for _ in range(draw.randrange(1, 5))) for _ in range(900)]
    for _ in range(6000):
        kind = draw.random()
        if kind < 0.35:
            picks = [words[int(len(words) * draw.random() ** 3)] for _ in range(draw.randrange(4, 12))]
            yield " ".join(picks) + draw.choice(ENDINGS)
        elif kind < 0.70:
            sentence = f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}"
            sentence = sentence[0].upper() + sentence[1:] if draw.random() < 0.7 else sentence
            yield sentence + draw.choice(ENDINGS)
        elif kind < 0.80:
            yield draw.choice(WORLD)
        elif kind < 0.92:
            yield draw.choice(CODE)
        else:
            yield " ".join(str(draw.randrange(10 ** draw.randrange(1, 6))) for _ in range(6))


# --- Tokenizers ---------------------------------------------------------------------------------

def special(*contents):
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def plain(*contents):
    return [AddedToken(content, special=False, normalized=False) for content in contents]


def trained(vocabulary, normalizer, pre_tokenizer, first=(), alphabet=(), **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(training_text(vocabulary), trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(first), show_progress=False,
        initial_alphabet=list(alphabet or pre_tokenizers.ByteLevel.alphabet()),
        limit_alphabet=len(alphabet) or 256))
    return tokenizer


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make_qwen():
    tokenizer = trained(1600, normalizers.NFC(), split(QWEN_PATTERN))
    tokenizer.add_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box|>"))
    tokenizer.add_tokens(plain("<tool_call>", "</tool_call>", "<think>", "</think>"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def make_smollm2():
    digits = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    first = special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>")
    return trained(1200, None, digits, first)


def make_llama3():
    tokenizer = trained(1800, None, split(LLAMA_PATTERN), ignore_merges=True)
    # A word that no merges lead to: only ignore_merges finds it.
    model = json.loads(tokenizer.to_str())
    model["model"]["vocab"]["\u0120unreachable"] = len(model["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(model))
    tokenizer.add_tokens(special(
        "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>",
        "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"))
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B:1",
                                      special_tokens=[("<|begin_of_text|>", begin)])])
    return tokenizer


def make_gpt2():
    """Every flag of an added token, a space put before the text, merges written as "a b"."""
    tokenizer = trained(500, normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.add_tokens([
        AddedToken("<|endoftext|>", special=True, normalized=False),
        AddedToken("<mask>", special=True, normalized=False, lstrip=True),
        AddedToken("<right>", special=True, normalized=False, rstrip=True),
        AddedToken("<both>", normalized=False, lstrip=True, rstrip=True),
        AddedToken("alone", normalized=False, single_word=True),
        AddedToken("<nor", normalized=False), AddedToken("<nor-longer>", normalized=False),
        AddedToken("caf\u00e9-token", normalized=True),
        AddedToken("e\u0301galit\u00e9", normalized=True, single_word=True),
        AddedToken("\u212b-unit", normalized=True, lstrip=True), AddedToken("    ", normalized=True)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def make_lacking(unknown):
    """Bytes without a token: dropped, or the unknown token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [letter for index, letter in enumerate(alphabet) if index % 9 != 4]
    model = {"unk_token": unknown} if unknown else {}
    return trained(320, None, pre_tokenizers.ByteLevel(add_prefix_space=False), special("<unk>"), kept, **model)


def write_tokenizer(name, tokenizer):
    document = json.loads(tokenizer.to_str())
    if name == "gpt2":
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# --- Cases --------------------------------------------------------------------------------------

SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200b)))
SPACES += "\u2028\u2029\u202f\u205f\u3000"
NO_SPACES = "\x1c\x1d\x1e\x1f\u180e\u200b\u200c\u200d\u2060\ufeff\u00ad\u061c"

MARKERS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<repo_name>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<mask>", "<right>",
    "<both>", "alone", "<nor", "<nor-longer>", "caf\u00e9-token", "cafe\u0301-token",
    "e\u0301galite\u0301", "\u212b-unit", "\u00c5-unit", "    ",
]

TEXTS = [
    "", " ", "  ", "\n", "a", " a", "a ", "The model reads the first line.", "the unreachable unreachable",
    " unreachable", "It doesn't; they can't, we'll, I'm, you're, I've, she'd, it's",
    "IT'S DOESN'T WE'LL I'M YOU'RE I'VE SHE'D 'S'T'RE'VE'M'LL'D 'sx 'lL 'Re '\u017f '\u212a x'\u017f",
    "don\u2019t 'tis ''s ' s '\ns", "12 345 6789 0000000 1,234.50 3.14e-10 v1.2.3 x86_64",
    "\u0661\u0662\u0663 \u0967\u0968 \uff11\uff12 \u00b2\u00b3\u00b9 \u2160\u2167 \u00bd\u00be \u3007\u4e00 \U0001d7d8"
    " \u2460\u2474 \U000110f0 \u0bf0 a\u00b2b 1\u00bd2",
    "line\nline\r\nline\r\rline\n\n\nline\r\n\r\n\r\nend\r", "  two\n   three\n\n    four  \n",
    "tabs\t\tand\t spaces \t mixed\t\n\t\tx", "    for (int i = 0; i < n; ++i) {\n\treturn x[i];\n    }\n",
    "x={'a':[1,2],\"b\":None}//**--==>>", "!!!???...;;; ,., ((())) [[{}]] <<>> @#$%^&*~`|\\/",
    " !\n\n?\r\n. \n,", "caf\u00e9 cafe\u0301 \u00c5 \u212b A\u030a A\u0301\u0323 A\u0323\u0301 q\u0307\u0323 q\u0323\u0307",
    "\u1e9b\u0323 \u1e69 s\u0323\u0307 s\u0307\u0323 d\u0323\u0307 \u03d3 \u03d2\u0301 \u2126 \u212a \u2000 \u2001 \u2329 \u232a",
    "\u0344 \u0958 \u0915\u093c \u09dc \u2adc \ufb1d \ufb2a \u0f43 \u0f76 \U0001d15e \U0001d1bc \uf900\uf91d\u8c48",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab \u1100\u1161 \uac00\u11a8 \u1100\u1161\u11a7 \uac01\u11a8 \u1161\u11a8",
    "a\u0315\u0300\u05ae\u0062 a\u0300\u0315\u0327\u0323b \u0301start \u0301 \u0338 >\u0338 =\u0338 <\u0338",
    "\u0e01\u0e33\u0e49 \u0e40\u0e02\u0e49\u0e32 \u0915\u094d\u0937 \u0928\u093f \u0bb8\u0bcd\u0bb0\u0bc0",
    "\U0001f600\U0001f44d\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1eb\U0001f1f7"
    "\U0001f1e9\U0001f1ea 1\ufe0f\u20e3 \u2764\ufe0f \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "English \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u4e2d\u6587 \u65e5\u672c\u8a9e \ud55c\uad6d \u03b5\u03bb \u0639\u0631\u0628\u064a mixedrusская",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002\u65b0\u884c\n\u3000\u5168\u89d2\u3000\u7a7a\u767d\uff0c123\u500b",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u0634\u0651\u064e \u0627\u0653 \u0622 \u0648\u0654",
    "\u01c4\u01c5\u01c6 \ufb01\ufb02 \u00df\u1e9e \u0130\u0131 \u03c2\u03c3 \u02b0\u02bc \u00aa\u00ba \u2071",
    "\x00 \x01\x02\x07\x08\x1b[0m\x7f \x80\x9f end\x00", "\ufeffbom \ufffd \ufffe \uffff \ue000 \U000f0000 \U0010ffff",
    "".join(f"a{space}b" for space in SPACES), "".join(f"{space}{space} x" for space in SPACES),
    " ".join(SPACES), SPACES, "".join(f"a{other}b" for other in NO_SPACES), NO_SPACES,
    "".join(f"a {other} b {other}{other}" for other in NO_SPACES),
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHi<|im_end|>\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>",
    "<|im_start", "<|im_end|", "<|im_end|<|im_end|>|>", "<|<|im_start|>|>", "<|im_end|>\u0338x", "<\u0338|im_end|>",
    "<|im_end|>\u0301<|im_end|>", "  <|endoftext|>  <|endoftext|>  ", "x<|endoftext|>", "<|endoftext|>x",
    "<|ENDOFTEXT|> <| endoftext|>", "<repo_name>a/b<file_sep>c", "<tool_call>{\"a\": 1}</tool_call>",
    " <mask> x  <mask>\t<mask> y<mask>", "<right>  x <right>\n<right> <right>", " <both> <both> x <both>\u3000y",
    "<right>  <mask>", "<right> <both>  <mask>  <right>      x", "<mask>    <right>    <both>    x",
    "alone alones _alone alone_ (alone) \u00e9alone alone\u0301 alone1 alone\u200d alone-alone alonealone alone",
    "<nor<nor-longer><nor-longe<nor-longer", "caf\u00e9-token cafe\u0301-token \u00e9galit\u00e9 e\u0301galite\u0301 x\u00e9galit\u00e9",
    "\u212b-unit  \u00c5-unit A\u030a-unit", "a    b     c        d\n    e", "      <mask>    <right>      <both>",
]

LONG = [("a", 400), ("the ", 90), (" ", 300), ("\n", 250), ("ab", 200), ("\u00e9", 150), ("e\u0301", 150),
        ("\u8a18", 120), ("1", 200), ("!", 300), ("=-", 100), ("\U0001f600", 60), (" \n", 100), ("\r\n", 100),
        ("the model reads ", 25), ("\u0301", 100), ("a\u0301\u0323", 60), ("<|im_end|>", 30), (" x", 150)]

POOLS = [
    "abcdefghijklmnopqrstuvwxyz    ", "abcXYZ'sStTmMdDlLvVrReE  \n", "0123456789.,-+ \u0664\u00b2\u00bd\u216b",
    "\u0300\u0301\u0323\u0327\u0338\u3099 aeoAOU<>=\u304b\u30cf", "\u1100\u1161\u11a8\uac00\uac01\u11a7\u1112\u1175\u11c2 ",
    SPACES + NO_SPACES + "ab.", "\u4e2d\u56fd\u8a18\u61b6\u306e\uff0c\u3002 a1\n", "{}[]();:=<>!&|+-*/\"'\\ \t\nxyif",
    "\u0430\u0431\u0432\u0413\u0414 \u03b1\u03b2\u03ae \u05d0\u05d1\u05b0 \u0639\u0631\u0651 \u0915\u094d\u093f",
]


def random_texts():
    draw = random.Random(7)
    for index in range(150):
        pool = POOLS[index % len(POOLS)]
        parts = [draw.choice(pool) for _ in range(draw.randrange(1, 60))]
        for _ in range(draw.randrange(3) if index % 3 == 0 else 0):
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(MARKERS))
        yield "".join(parts)
    assigned = [code for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cs", "Cn")]
    for _ in range(60):  # code points of all planes
        yield "".join(chr(draw.choice([draw.randrange(0x300), draw.choice(assigned[:9000]), draw.choice(assigned),
                                       draw.randrange(0xe000, 0xf900)])) for _ in range(20))


def ids_case(name, tokenizer, ids, text=None):
    """decoded is left out where it equals text, skipped (without special tokens) where it equals decoded."""
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    skipped = tokenizer.decode(ids, skip_special_tokens=True)
    case = {"tokenizer": name, "ids": ids}
    if text is not None:
        case["text"] = text
    if decoded != text:
        case["decoded"] = decoded
    if skipped != decoded:
        case["skipped"] = skipped
    return case


def text_case(name, tokenizer, text):
    return ids_case(name, tokenizer, tokenizer.encode(text, add_special_tokens=False).ids, text)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=True, separators=(",", ":")) + "\n" for line in lines))


def nfc_cases():
    """Single code points and sequences of our choice, with what Python's unicodedata makes of them."""
    draw = random.Random(11)
    marks = [0x300, 0x301, 0x308, 0x30a, 0x323, 0x327, 0x331, 0x338, 0x345, 0x3099, 0x5b0, 0x64b, 0x93c, 0x1dc0, 0x1d165]
    bases = [0x41, 0x61, 0x6f, 0x73, 0x3c, 0x3d, 0x3e, 0xc5, 0xe9, 0x1ea1, 0x3b1, 0x3b7, 0x415, 0x928, 0xac00, 0xac01,
             0x1100, 0x1161, 0x11a8, 0x304b, 0x30cf, 0x2126, 0x212a, 0x212b, 0x2adc, 0xfb1d, 0xf900, 0x2f800, 0x1d15e, 0x20]
    sequences = [[base, mark] for base in bases for mark in marks]
    sequences += [[draw.choice(bases)] + [draw.choice(marks) for _ in range(draw.randrange(2, 6))] +
                  [draw.choice(bases)] for _ in range(300)]
    sequences += [[code] for code in [*range(0x340, 0x345), 0x374, 0x37e, 0x387, 0x958, 0x9df, 0xb5c, 0xf43, 0xf73,
                                      0x1f71, 0x1fef, 0x2000, 0x2001, 0x2329, 0xfa10, 0xfb4e, 0x1d1c0, 0x2fa1d]]
    for sequence in sequences:
        result = unicodedata.normalize("NFC", "".join(map(chr, sequence)))
        yield {"from": sequence, "to": [ord(character) for character in result]}


def main():
    makers = {"qwen": make_qwen, "smollm2": make_smollm2, "llama3": make_llama3, "gpt2": make_gpt2,
              "dropped": lambda: make_lacking(None), "unknown": lambda: make_lacking("<unk>")}
    lines = []
    draw = random.Random(3)
    for name, make in makers.items():
        tokenizer = write_tokenizer(name, make())
        size = tokenizer.get_vocab_size()
        texts = [*TEXTS, *MARKERS, *(part * count for part, count in LONG), *random_texts()]
        for text in texts if size > 400 else texts[::3]:
            lines.append(text_case(name, tokenizer, text))
        for _ in range(60):  # tokens that cut characters
            lines.append(ids_case(name, tokenizer, [draw.choice([draw.randrange(256), draw.randrange(size)])
                                                    for _ in range(12)]))
    write_lines(HERE / "cases.jsonl", lines)
    write_lines(HERE / "nfc.jsonl", nfc_cases())


if __name__ == "__main__":
    main()
