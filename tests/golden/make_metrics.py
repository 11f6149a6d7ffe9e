"""Writes metrics.json: grades by the authors' code, and hashes of LongBench's prompts.

    pip install rouge==1.0.1 rouge-score==0.1.2 fuzzywuzzy==0.18.0 jieba==0.42.1 pyyaml
    python tests/golden/make_metrics.py --checkouts=DIR

Needs nothing of kvjax. DIR holds checkouts by these names, at these commits:

    GEAR                    github.com/opengear-project/GEAR            efe0bfe2
    LongBench               github.com/THUDM/LongBench                  2e00731f
    RULER                   github.com/NVIDIA/RULER                     c3f5e3b4
    grade-school-math       github.com/openai/grade-school-math         3101c7d5
    lm-evaluation-harness   github.com/EleutherAI/lm-evaluation-harness 4e7e0d47
    triviaqa                github.com/mandarjoshi90/triviaqa           ca43b582

Only the functions named below are taken out of their files and run. fuzzywuzzy has to
run without python-Levenshtein, as LongBench's requirements.txt has it.

    cases[METRIC]   list of [text, references, (classes,) value]; METRIC is a function
                    of kvjax.evaluation.metrics. Values of final_number are texts.
    prompts[NAME]   sha256 of LongBench's prompt, and its most new tokens
"""

import argparse
import ast
import hashlib
import json
import pathlib
import random
import re
import string
from collections import Counter

import yaml
from rouge_score import rouge_scorer

TEXTS = [  # text, references
    ("The cat sat on the mat.", ["A cat sat on a mat", "dogs run"]),
    ("", ["anything"]),
    ("the", ["a", "an"]),
    ("Running quickly, the runners ran.", ["The runner runs quickly"]),
    ("Beyoncé's 2nd album", ["Beyonce's second album", "Beyoncés 2nd album"]),
    ("U.S. Treasury; twenty-one", ["US treasury twenty one", "Treasury"]),
    (
        "\u2018Rock\u2019 `n\u2019 roll_band",
        ["rock n roll band", "Rock \u00b4n\u00b4 roll"],
    ),
    ("no overlap here", ["completely different words"]),
    ("One sentence. Then another one.\nA third", ["Then another one. One sentence."]),
    ("yes yes yes no", ["yes no", "yes yes"]),
    ("...", ["."]),
]
NUMBERS = [
    "He has 3 + 4 = 7 apples.\n#### 7",
    "#### 1,234\nQuestion: and now? #### 9",
    "so -5 degrees\n#### -5",
    "#### 18.",
    "#### 2.50",
    "The total is $1,250.",
    "She makes $18 every day",
    "first 12, then 15",
    "The answer is -3.5",
    "It costs $0.75",
    "there are 7",
    "no number at all",
    "",
    "10 - 4 = 6. That is 60% of 10.",
    "1,000,000 people",
]
CHAINS = [  # text, reference
    ("We look. So the answer is (B).", "(B)"),
    ("So the answer is (B). Q: x", "(B)"),
    ("So the answer is (C).", "(B)"),
    ("The answer is A", "(A)"),
    ("the options (A) and (B) differ", "(A)"),
    ("At first the answer is (A). No: the answer is (D).", "(D)"),
    ("So the answer is True.", "True"),
    ("So the answer is False.", "True"),
    ("So the answer is -219.", "-219"),
    ("So the answer is } ] >.", "} ] >"),
    ("So the answer is yes.", "yes"),
    ("So the answer is Yes.", "yes"),
    ("So the answer is arson aspect census.", "arson aspect census"),
    ("valid", "valid"),
    ("", "valid"),
]
STRINGS = [
    ("The numbers are 12345 and ABC-def.", ["12345", "abc-DEF", "777", "9"]),
    ("nothing", ["12345", "x"]),
    ("12345", ["12345"]),
    ("axb", ["x", "B", "a"]),
]
COUNTS = [("7", ["7"]), ("7 of 14 or 7", ["7"]), ("none", ["3"]), ("17", ["7"])]
PARAGRAPHS = [
    ("Paragraph 12", ["Paragraph 12"]),
    ("Paragraph 1, or 12", ["Paragraph 12"]),
    ("12", ["Paragraph 12"]),
    ("the second", ["Paragraph 2"]),
]
CODE = [
    ("\n\nreturn x + 1\nfoo()", ["return x + 1"]),
    ("```python\nreturn x + 2", ["    return x + 1"]),
    ("# a comment\n// another\nint y = 3;", ["int y = 4;", "int y = 3;"]),
    ("", ["pass"]),
    ("`only` markup", ["pass"]),
    ("    for i in range(10):", ["    for j in range(20):"]),
]
CLASSES = ["Number of something", "Other number", "number", "City", "Other location"]
LABELS = [
    ("City", ["City"]),
    ("City or Other location", ["City"]),
    ("Other number", ["Other number"]),
    ("Other number, number", ["number"]),
    ("Number of something and Other number", ["City"]),
    ("", ["City"]),
]
ENGLISH = [
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "gov_report",
    "qmsum",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
]


def texts():
    """The texts above, and random ones with words in common."""
    rng = random.Random(0)
    words = re.findall(
        r"\S+", "the a rain, Stone cloud river. field lights running ran an"
    )

    def draw():
        return " ".join(rng.choices(words, k=rng.randint(1, 14)))

    return TEXTS + [(draw(), [draw() for _ in range(1 + i % 3)]) for i in range(20)]


def taken(path, names, **given):
    """Functions and classes of a file, without their decorators, as a name space."""
    tree = ast.parse(path.read_text())
    kept = []
    for node in tree.body:
        targets = [t.id for t in getattr(node, "targets", []) if hasattr(t, "id")]
        if getattr(node, "name", None) in names or set(targets) & set(names):
            if hasattr(node, "decorator_list"):
                node.decorator_list = []
            kept.append(node)
    space = {"re": re, "string": string, "Counter": Counter} | given
    space["__annotations__"] = {}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + kept, []), str(path), "exec"), space)
    return space


def best(function, text, references, **options):
    """LongBench's `scorer`: the highest over references, and at least 0."""
    return max([0.0, *(function(text, r, **options) for r in references)])


def longbench(checkouts):
    from difflib import SequenceMatcher

    from fuzzywuzzy import fuzz
    from rouge import Rouge

    assert fuzz.SequenceMatcher is SequenceMatcher, "remove python-Levenshtein"
    names = "normalize_answer count_score retrieval_score code_sim_score rouge_score"
    names += " classification_score f1_score qa_f1_score"
    space = taken(
        checkouts / "LongBench/LongBench/metrics.py",
        names.split(),
        fuzz=fuzz,
        Rouge=Rouge,
    )
    table = {
        "token_f1": (space["qa_f1_score"], texts()),
        "longbench_rouge_l": (space["rouge_score"], texts()),
        "count_score": (space["count_score"], COUNTS),
        "retrieval_score": (space["retrieval_score"], PARAGRAPHS),
        "code_similarity": (space["code_sim_score"], CODE),
    }
    cases = {
        name: [[t, r, best(function, t, r)] for t, r in pairs]
        for name, (function, pairs) in table.items()
    }
    score = space["classification_score"]
    cases["classification_score"] = [
        [t, r, CLASSES, best(score, t, r, all_classes=CLASSES)] for t, r in LABELS
    ]
    cases["normal_squad"] = [[t, space["normalize_answer"](t)] for t, _ in texts()]
    return cases


def triviaqa(checkouts):
    names = "normalize_answer f1_score exact_match_score metric_max_over_ground_truths"
    space = taken(
        checkouts / "triviaqa/evaluation/triviaqa_evaluation.py", names.split()
    )
    over = space["metric_max_over_ground_truths"]

    def grades(name):
        return [[t, r, float(over(space[name], t, r))] for t, r in texts()]

    return {
        "normal_trivia": [[t, space["normalize_answer"](t)] for t, _ in texts()],
        "token_f1_trivia": grades("f1_score"),
        "exact_match_trivia": grades("exact_match_score"),
    }


def ruler(checkouts):
    names = ("string_match_all", "string_match_part")
    space = taken(checkouts / "RULER/scripts/eval/synthetic/constants.py", names)
    return {
        name: [[t, r, space[name]([t], [r]) / 100] for t, r in STRINGS]
        for name in names
    }


def chains(checkouts):
    path = checkouts / "GEAR/GenerationBench/GenerationTest/evaluation_bbh_cot.py"
    extract = taken(path, ["extract_ans"])["extract_ans"]

    def grade(text, reference):
        option = re.fullmatch(r"\([A-Z]\)", reference)
        mode = "multiple_choice" if option else "free_form"
        return float(extract(text, mode) == (reference[1] if option else reference))

    return {"answer_match": [[t, [r], grade(t, r)] for t, r in CHAINS]}


def numbers(checkouts):
    """OpenAI's number after ####; elsewhere lm-evaluation-harness's flexible one."""
    openai = taken(
        checkouts / "grade-school-math/grade_school_math/dataset.py",
        ["ANS_RE", "INVALID_ANS", "extract_answer"],
    )["extract_answer"]
    harness = checkouts / "lm-evaluation-harness/lm_eval"
    spec = yaml.safe_load((harness / "tasks/gsm8k/gsm8k.yaml").read_text())
    filters = {f["name"]: f["filter"][0] for f in spec["filter_list"]}
    options = dict(filters["flexible-extract"])
    options.pop("function")
    source = taken(harness / "filters/extraction.py", ["RegexFilter"], Filter=object)
    flexible = source["RegexFilter"](**options)

    def number(text):
        found = openai(text)
        if found == "[invalid]":
            found = flexible.apply([[text]], [])[0][0]
        for ignored in spec["metric_list"][0]["regexes_to_ignore"]:
            found = re.sub(ignored, "", found)
        return None if found == "[invalid]" else found

    return {"final_number": [[t, number(t)] for t in NUMBERS]}


def rouge():
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = rouge_scorer.RougeScorer(names, use_stemmer=True)
    cases = []
    for text, references in texts():
        each = [scorer.score(reference, text) for reference in references]
        best = {n: float(max(one[n].fmeasure for one in each)) for n in names}
        cases.append([text, references, best])
    return {"rouge": cases}


def prompts(checkouts):
    config = checkouts / "LongBench/LongBench/config"
    texts = json.loads((config / "dataset2prompt.json").read_text())
    lengths = json.loads((config / "dataset2maxlen.json").read_text())
    return {
        name: [hashlib.sha256(texts[name].encode()).hexdigest(), lengths[name]]
        for name in ENGLISH
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", type=pathlib.Path, required=True)
    checkouts = parser.parse_args().checkouts
    cases = rouge()
    for source in (longbench, triviaqa, ruler, chains, numbers):
        cases |= source(checkouts)
    written = {"origin": __doc__, "cases": cases, "prompts": prompts(checkouts)}
    target = pathlib.Path(__file__).with_name("metrics.json")
    target.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
