"""Writes gsm8k_cases.json: answers and what Python's re finds in them by the rules of
lm-evaluation-harness's task gsm8k, version 3 (patterns, which match is taken, what is ignored).

    python3 gsm8k_cases.py
"""
import json
import pathlib
import random
import re

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = [",", r"\$", r"(?s).*#### ", r"\.$"]


def strict(text):
    found = STRICT.findall(text)
    return found[0].strip() if found else "[invalid]"


def flexible(text):
    found = FLEXIBLE.findall(text)
    return [group for group in found[-1] if group][0].strip() if found else "[invalid]"


def normalize(text):
    for pattern in IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()


HAND = [
    "", "72", "#### 72", "He has 5.\n#### 5", "#### 5\n#### 6", "#### 1,234.", "#### -7", "####72",
    "#### $72", "The answer is $18.", "The answer is 18.", "It costs $1,000.50.", "7", "-7", "- 7",
    "10-5", "3 - 2", "5 apples...", "....", "$", "$$", ",", "-", "--5", "1.", "x=4,", "#### .",
    "#### ,,", "#### 3 apples. 4", "\u0663\u0664", "caf\u00e9 9", "5\n", "#### 5\n", "####  5",
    "#### 5 #### 6.", "a #### b", "(1,2)", "2^10=1024", "1e5", "0.5", "no number", "\\boxed{42}",
    "Janet earns 9*2=<<9*2=18>>18 dollars.\n#### 18", "#### 18.\n\nQuestion", "12,", "12.\n",
]


def main():
    draw = random.Random(1)
    alphabet = list("0123456789.,$-") + ["#### ", "####", " ", "\n", "a", "Z"]
    texts = HAND + ["".join(draw.choices(alphabet, k=draw.randint(1, 30))) for _ in range(400)]
    cases = [
        {
            "text": text,
            "strict": strict(text),
            "flexible": flexible(text),
            "normalized": normalize(text),
            "normalized_strict": normalize(strict(text)),
            "normalized_flexible": normalize(flexible(text)),
        }
        for text in texts
    ]
    path = pathlib.Path(__file__).with_name("gsm8k_cases.json")
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
