import keras

from tfopt.checkpoint.datasets import seeds_of


def test_loaders_of_folders_draw_a_seed_in_each_process(tmp_path):
    """Each call stands for a process."""
    for name in ("a/1.txt", "a/2.txt", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    loaders = [
        keras.utils.text_dataset_from_directory(tmp_path, verbose=False, seed=seed) for seed in (None, None, 3, 3)
    ]
    drawn, other, given, same = map(seeds_of, loaders)
    assert drawn != other
    assert given == same != [[0, 0]]
