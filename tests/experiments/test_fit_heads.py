"""`kvjax calibrate --fit_rounds`: it goes on after the rounds that are there."""

import json

import pytest
from conftest import tiny_model, tiny_spec
from testing import prose

from kvjax import UserError
from kvjax.cache.calibrations import Calibration
from kvjax.engine import calibration as measuring
from kvjax.training import head_sizes
from kvjax.types import Model

TEXTS = (prose.HAYSTACK[:4000],)


@pytest.fixture(scope="module")
def script():
    from kvjax.cli import calibrate  # defines flags, as scripts of other tests do

    return calibrate


@pytest.fixture(scope="module")
def model():
    changes = {"vocab_size": len(prose.HAYSTACK_WORDS) + 2, "context_length": 1024}
    spec = tiny_spec(name="reader", **changes)
    return Model(spec, tiny_model(**changes).params, prose.make_tokenizer())


@pytest.mark.e2e
def test_goes_on(script, model, tmp_path, monkeypatch):
    start = Calibration(
        *("reader", measuring.fingerprint(model), "repetition", 2, 288, 0.9),
        ratios=(0.5, 0.4),
        shares=(((0.7, 0.4), (0.5, 0.4)), ((0.7, 0.2), (0.3, 0.4))),
    )
    asked = {"texts": ["python"], "dtype": "float32"}
    given = model, TEXTS, start, (0.5, 0.4), 1
    whole, every = script.fitted(*given, tmp_path / "a.jsonl", asked)
    assert [(each["ratio"], each["round"]) for each in every] == [
        *((0.5, 0), (0.5, 1)),
        *((0.4, 0), (0.4, 1)),
    ]
    run, count = head_sizes._round, iter(range(2))

    def stopped(*given):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return run(*given)

    path = tmp_path / "b.jsonl"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(head_sizes, "_round", stopped)
        script.fitted(*given, path, asked)
    lines = path.read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["asked"]["texts"] == ["python"]
    assert script.fitted(*given, path, asked) == (whole, every)
    assert path.read_text().splitlines()[:2] == lines
    with pytest.raises(UserError, match=r"b\.jsonl has rounds of other texts"):
        script.fitted(*given, path, asked | {"dtype": "bfloat16"})
    with pytest.raises(UserError, match="another dtype, start or fit: repeat"):
        script.fitted(*given, path, asked, chunk=16)
    with pytest.raises(UserError, match=r"b\.jsonl has rounds of other texts"):
        script.fitted(model, TEXTS, whole, (0.4,), 1, path, asked)
