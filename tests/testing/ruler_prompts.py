"""What RULER's tests write prompts with: tokenizers, essays, the authors' own rows."""

import inspect
import json
import pathlib

from kvjax.evaluation.tasks import passkey, ruler

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden/ruler.json").read_text()
)
TASKS = ruler.TASKS | passkey.TASKS
NEEDLE = r"One of the special magic \w+ for (.*?) is: (.*?)\."


class Words:
    """A tokenizer that cuts at white space, and begins with two tokens of its own."""

    chat_template = None

    def __init__(self, special=0):
        self.special = special

    def __call__(self, text, add_special_tokens=True, verbose=True):
        special = self.special if add_special_tokens else 0
        return {"input_ids": list(range(special + len(text.split())))}


class Chat(Words):
    """The same with a template of five more words."""

    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"user asks this: {messages[0]['content']} model answers:"


def prepared(made):
    """The folder, with the essay and the questions that the authors' scripts read."""
    (made / "essays").mkdir()
    (made / "essays/one.txt").write_text(GOLDEN["essay"])
    (made / "squad.json").write_text(json.dumps(GOLDEN["squad"]))
    hotpotqa = json.dumps(GOLDEN["hotpotqa"])
    (made / "hotpot_dev_distractor_v1.json").write_text(hotpotqa)
    return made


def write(name, folder, count=3, seed=0, length=800, tokenizer=None, **options):
    task = TASKS[name]
    known = inspect.signature(task.examples).parameters
    own = {"haystack": str(folder / "essays"), "data_dir": str(folder)}
    options |= {key: value for key, value in own.items() if key in known}
    return task.examples(tokenizer or Words(), count, seed, length=length, **options)
