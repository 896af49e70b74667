import sys

from titan_like.config.options import as_installed


def test_sentences_name_commands_as_they_are_called(monkeypatch):
    told = "as python scripts/plan.py search --out or scripts/preprocess_data.py writes it, not /my/scripts/plan.py"
    monkeypatch.setattr(sys, "argv", ["/bin/titan-train"])
    assert as_installed(told) == "as titan-plan search --out or titan-preprocess writes it, not /my/scripts/plan.py"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert as_installed(told) == told
