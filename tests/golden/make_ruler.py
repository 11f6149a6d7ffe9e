"""Writes ruler.json: what the authors' scripts make of RULER and of the pass key.

    pip install nltk==3.10.4 wonderwords==3.0.1 scipy numpy tqdm
    python tests/golden/make_ruler.py --checkouts=DIR

Needs nothing of kvjax. DIR holds checkouts by these names, at these commits:

    RULER                github.com/NVIDIA/RULER             c3f5e3b
    landmark-attention   github.com/epfml/landmark-attention d963e50

RULER's scripts run as they are, in a copy of their folder, but for three things that
they would fetch or import: their `tokenizer` module is one that cuts at white space,
NLTK's sentence tokenizer is its untrained one, and essay and questions are made up here
(`essay`, `squad`, `hotpotqa` below; the last two in the published formats). Of
landmark-attention, `generate_prompt` and the score's number are taken out of
llama/run_test.py.

    rows/<task>@<length> [{input, answer_prefix, outputs, length}] for each of two rows
    grades [{pred, refs, all, part}]  string_match_all, string_match_part, in percent
    passkey [{garbage, prompt, key}]  characters of garbage, and the rest
"""

import argparse
import ast
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import yaml

LENGTHS = {
    "niah_single_1": (600,),
    "niah_single_2": (1000,),
    "niah_single_3": (1000,),
    "niah_multikey_1": (1000,),
    "niah_multikey_2": (500,),
    "niah_multikey_3": (500,),
    "niah_multivalue": (1000,),
    "niah_multiquery": (1000,),
    "vt": (1500,),
    "cwe": (1000, 4096),
    "fwe": (600,),
    "qa_1": (600,),
    "qa_2": (600,),
}
GRADES = (
    ("The answer is 1234567.", ["1234567"]),
    ("12345678 and 7654321", ["1234567", "7654321", "1111111"]),
    ("apple, PEAR", ["Apple", "pear"]),
    ("", ["x", "y"]),
    ("Saint-Denis", ["saint", "Paris"]),
)
STUB = """
class Words:
    def text_to_tokens(self, text):
        return text.split()
def select_tokenizer(kind, path):
    return Words()
"""
RUN = """
import runpy, sys
import nltk.tokenize
nltk.tokenize.sent_tokenize = nltk.tokenize.PunktSentenceTokenizer().tokenize
script, sys.argv = sys.argv[1], sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
"""
WORDS = ["rain", "stone", "cloud", "river", "field", "light", "3.5 miles", '"moss"']


def sentence(rng: random.Random) -> str:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 9)))
    return f"{rng.choice(['The', 'A', 'No'])} {words}{rng.choice('.?!')}"


def essay(rng: random.Random) -> str:
    paragraphs = (" ".join(sentence(rng) for _ in range(6)) for _ in range(20))
    return "\n\n".join(paragraphs)


def squad(rng: random.Random) -> dict:
    """Six articles of three paragraphs; every third question has no answer."""
    articles = []
    for a in range(6):
        paragraphs = []
        for p in range(3):
            answers = [{"text": f"answer {a}.{p}", "answer_start": 0}] * 2
            rows = [
                {"question": f"Who is {a}.{p}?", "id": f"{a}{p}", "answers": answers},
                {"question": f"Which {a}.{p}?", "id": f"{a}{p}x", "answers": []},
            ]
            rows[0]["is_impossible"], rows[1]["is_impossible"] = a % 3 == 2, True
            context = f"answer {a}.{p}: " + sentence(rng)
            paragraphs.append({"context": context, "qas": rows})
        articles.append({"title": f"Article {a}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpotqa(rng: random.Random) -> list:
    """Eight questions with four documents each, of fifteen in all."""
    documents = [
        [f"Title {i}", [sentence(rng), " " + sentence(rng)]] for i in range(15)
    ]
    return [
        {
            "_id": str(i),
            "question": f"What is {i}?",
            "answer": f"It is {i}",
            "context": rng.sample(documents, 4),
        }
        for i in range(8)
    ]


def prepare(ruler: pathlib.Path, made: dict) -> None:
    """A copy of RULER's scripts gets what they would fetch."""
    (ruler / "data/tokenizer.py").write_text(STUB)
    folder = ruler / "data/synthetic/json"
    unused = {str(i): f"word{i}" for i in range(5000)}
    files = {"PaulGrahamEssays": {"text": made["essay"]}, "english_words": unused}
    files |= {"squad": made["squad"], "hotpotqa": made["hotpotqa"]}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def rows(ruler: pathlib.Path, name: str, length: int) -> list[dict]:
    """What scripts/data/prepare.py has the task's script write; two rows."""
    config = yaml.safe_load((ruler / "synthetic.yaml").read_text())[name]
    scope: dict = {}
    exec((ruler / "data/synthetic/constants.py").read_text(), scope)
    base = scope["TASKS"][config["task"]]
    options = {
        "save_dir": ruler / "out",
        "save_name": name,
        "tokenizer_path": "-",
        "max_seq_length": length,
        "tokens_to_generate": base["tokens_to_generate"],
        "num_samples": 2,
        "template": base["template"] + base["answer_prefix"],
        **config["args"],
    }
    script = ruler / f"data/synthetic/{config['task']}.py"
    command = [sys.executable, "-c", RUN, str(script)]
    command += [f"--{key}={value}" for key, value in options.items()]
    subprocess.run(command, check=True, timeout=100, stderr=subprocess.DEVNULL)
    lines = (ruler / f"out/{name}/validation.jsonl").read_text().splitlines()
    kept = ("input", "answer_prefix", "outputs", "length")
    return [{key: json.loads(line)[key] for key in kept} for line in lines]


def grades(ruler: pathlib.Path) -> list[dict]:
    scope: dict = {}
    exec((ruler / "eval/synthetic/constants.py").read_text(), scope)
    return [
        {
            "pred": pred,
            "refs": refs,
            "all": scope["string_match_all"]([pred], [refs]),
            "part": scope["string_match_part"]([pred], [refs]),
        }
        for pred, refs in GRADES
    ]


def passkeys(script: pathlib.Path) -> list[dict]:
    tree = ast.parse(script.read_text())
    tree.body = [
        node for node in tree.body if getattr(node, "name", "") == "generate_prompt"
    ]
    scope: dict = {"random": random}
    exec(compile(tree, str(script), "exec"), scope)
    random.seed(0)
    made = ((n, *scope["generate_prompt"](n)) for n in (0, 100, 1000))
    return [{"garbage": n, "prompt": prompt, "key": key} for n, prompt, key in made]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkouts", type=pathlib.Path, required=True)
    checkouts = parser.parse_args().checkouts
    rng = random.Random(0)
    made = {"essay": essay(rng), "squad": squad(rng), "hotpotqa": hotpotqa(rng)}
    with tempfile.TemporaryDirectory() as temporary:
        ruler = pathlib.Path(temporary) / "scripts"
        shutil.copytree(checkouts / "RULER/scripts", ruler)
        prepare(ruler, made)
        made["grades"] = grades(ruler)
        made["rows"] = {
            f"{name}@{length}": rows(ruler, name, length)
            for name, lengths in LENGTHS.items()
            for length in lengths
        }
    script = checkouts / "landmark-attention/llama/run_test.py"
    made["passkey"] = passkeys(script)
    path = pathlib.Path(__file__).parent / "ruler.json"
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
