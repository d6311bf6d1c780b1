"""The README's examples run as they are printed."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
OP, TEXT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_op_example():
    names: dict = {}
    exec(OP, names)
    assert names["out"].shape == (2, 32, 128)
    assert names["out"].isfinite().all()


def test_the_text_example(demo_model, capsys):
    assert '"path/to/model"' in TEXT
    exec(TEXT.replace("path/to/model", str(demo_model)), {})
    assert "Paris" in capsys.readouterr().out
