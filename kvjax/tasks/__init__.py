"""Tasks: text in, tokenized examples and grades out. Nothing here needs an accelerator.

`text` gives long prose, `needle` hides pass keys in it, `fidelity` cuts it into windows
and measures how far one model's predictions are from another's.
"""
