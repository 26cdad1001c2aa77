from tfopt.text import aligned, listed


def test_of_many_names_the_first_ones():
    assert listed([], 2) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(("a", "b", "c", "d"), 2) == "a, b and 2 more"


def test_texts_start_together_and_figures_end_together():
    rows = [("layer", "class", "error", "lost"), ("a", "Dense", "12 %", "0 %"), ("longer", "B", "1.25 %", "")]
    assert aligned(rows, texts=2) == [
        "  layer   class   error  lost",
        "  a       Dense    12 %   0 %",
        "  longer  B      1.25 %",
    ]
