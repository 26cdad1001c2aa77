from tfopt.text import aligned, listed, readable_bytes


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


def test_sizes_are_readable():
    sizes = (3, 2048, 1.5 * 2**20, 2**31)
    assert [readable_bytes(size) for size in sizes] == ["3 B", "2.0 KiB", "1.5 MiB", "2.0 GiB"]
