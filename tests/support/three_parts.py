"""What every error about a cluster reads like."""


def check_three_parts(error):
    text = str(error)
    assert text.startswith("Expected ")
    assert ". Found: " in text
    assert ". What to do: " in text
    assert len(text) < 1000
    assert text.isprintable()
