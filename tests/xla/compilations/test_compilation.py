import json

from tfopt.xla.compilations.compilation import History, sizes


class Compiled:
    """Compilations of 2 s each."""

    def __init__(self):
        self.history, self.events = History(), []

    def add(self, function, *inputs, **known):
        self.events.append(
            self.history.add(function, f"__inference_{function}_1", 2.0, dict(enumerate(inputs)), **known)
        )
        return self


def test_what_is_known_of_a_compilation():
    known = {"variables": ("kernel",), "step": "training step", "names": {0: "x", 1: "y"}}
    (event,) = Compiled().add("one_step_on_data", "float32 (32, 4)", "int32 (32,)", **known).events
    assert (event.label, event.name_of(1), event.name_of(2)) == ("the training step", "y", "input 2")
    assert str(event) == "training step: 2 s, its first run in a watch"
    assert str(Compiled().add("f", "float32 ()").events[0]) == "f: 2 s, its first run in a watch"
    assert json.loads(json.dumps(event.to_dict())) == {
        "function": "one_step_on_data",
        "module": "__inference_one_step_on_data_1",
        "seconds": 2.0,
        "cause": "its first run in a watch",
        "variables": ["kernel"],
        "changed": [],
        "inputs": {"0": "float32 (32, 4)", "1": "int32 (32,)"},
        "step": "training step",
        "names": {"0": "x", "1": "y"},
    }


def test_the_cause_is_told_against_the_nearest_before():
    compiled = Compiled().add("f", "float32 (32, 4)", "int32 (32,)").add("f", "float32 (8, 4)", "int32 (8,)")
    compiled.add("f", "float32 (32, 6)", "int32 (32,)").add("f", "float16 (32, 6)", "int32 (32,)")
    assert [event.cause for event in compiled.events[1:]] == [
        "input 0: (32, 4) → (8, 4), input 1: (32,) → (8,)",
        "input 0: (32, 4) → (32, 6)",
        "input 0: float32 (32, 6) → float16 (32, 6)",
    ]
    assert [event.changed for event in compiled.events] == [(), (0, 1), (0,), (0,)]


def test_many_inputs_that_change_at_once():
    events = Compiled().add("f", *["float32 (4,)"] * 5).add("f", *["float32 (5,)"] * 5).events
    assert events[1].cause == "input 0: (4,) → (5,), input 1: (4,) → (5,), input 2: (4,) → (5,) and 2 more"


def test_the_same_shapes_again():
    assert "retraced" in Compiled().add("f", "float32 (4,)").add("f", "float32 (4,)").events[1].cause


def test_functions_of_one_name_are_told_apart():
    compiled = (
        Compiled().add("f", "float32 (32, 4)", variables=("kernel",)).add("f", "float32 (8, 4)", variables=("k",))
    )
    compiled.add("f", "float32 (9, 4)", "int32 (9,)", variables=("kernel",)).add("f", "float32 (8, 4)", step="s")
    assert [event.cause for event in compiled.events] == ["its first run in a watch"] * 4


def test_sizes_of_a_shape():
    assert sizes("float32 (32, 4)") == ("32", "4")
    assert sizes("float32 (32,)") == ("32",)
    assert sizes("float32 ()") == ()
