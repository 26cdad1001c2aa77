import json

from tfopt.xla.log.compilations import History, LogParser, readable, sizes


class Log:
    """XLA's lines as TensorFlow 2.21 writes them, one every 0.1 s."""

    def __init__(self):
        self.lines = []
        self.now = 1795266330.0

    def line(self, text, thread=1, source="xla_compiler.cc:820"):
        self.now += 0.1
        self.lines.append(f"I0000 00:00:{self.now:.6f}   {thread} {source}] {text}")
        return self

    def start(self, module, thread=1):
        return self.line(f"XlaCompiler::CompileFunction {module}[_XlaMustCompile=true]", thread)

    def inputs(self, *inputs, variables=(), thread=1):
        self.line("XLA computation inputs:", thread)
        for number, (name, shape) in enumerate([*(("", shape) for shape in inputs), *variables]):
            self.line(f"  XLA arg {number} shape: {shape} name: {name} TF arg {number} node name: ", thread)
            if name:
                self.line("    resource: num_gradients: 0", thread)
        return self

    def end(self, seconds, thread=1):
        text = (
            f"Compilation of XLA executable time: {seconds:.3g} s ({seconds * 1e6:.0f} us) (cumulative: 9 s, max: 9 s)"
        )
        return self.line(text, thread, "device_compiler.h:538")

    def compiled(self, module, *inputs, variables=()):
        return self.start(module).inputs(*inputs, variables=variables).end(20.0)

    def parse(self):
        return LogParser(History()).parse(self.lines)


def test_name_seconds_inputs_and_variables():
    variables = [("dense/kernel/1", "f32[4,10]")]
    (event,) = Log().compiled("__inference_one_step_on_data_13", "f32[32,4]", "s32[32]", variables=variables).parse()
    assert (event.function, event.module) == ("one_step_on_data", "__inference_one_step_on_data_13")
    assert event.seconds == 20.0
    assert event.inputs == {0: "float32 (32, 4)", 1: "int32 (32,)"}
    assert event.variables == ("dense/kernel/1",)
    assert str(event) == "one_step_on_data: 20 s, its first compilation here"
    assert json.loads(json.dumps(event.to_dict()))["inputs"] == {"0": "float32 (32, 4)", "1": "int32 (32,)"}


def test_the_cause_is_told_against_the_nearest_before():
    log = Log().compiled("f_1", "f32[32,4]", "s32[32]").compiled("f_1", "f32[8,4]", "s32[8]")
    events = log.compiled("f_1", "f32[32,6]", "s32[32]").compiled("f_1", "f16[32,6]", "s32[32]").parse()
    assert [event.cause for event in events[1:]] == [
        "input 0: (32, 4) → (8, 4), input 1: (32,) → (8,)",
        "input 0: (32, 4) → (32, 6)",
        "input 0: float32 (32, 6) → float16 (32, 6)",
    ]
    assert [event.changed for event in events] == [(), (0, 1), (0,), (0,)]


def test_many_inputs_that_change_at_once():
    events = Log().compiled("f_1", *["f32[4]"] * 5).compiled("f_1", *["f32[5]"] * 5).parse()
    assert events[1].cause == "input 0: (4,) → (5,), input 1: (4,) → (5,), input 2: (4,) → (5,) and 2 more"


def test_the_same_shapes_again():
    events = Log().compiled("f_1", "f32[4]").compiled("f_1", "f32[4]").compiled("f_7", "f32[4]").parse()
    assert "another value of an input that XLA treats as constant" in events[1].cause
    assert "retraced" in events[2].cause


def test_functions_of_one_name_are_told_apart_by_their_variables():
    log = Log().compiled("__inference_one_step_on_data_1", "f32[32,4]", variables=[("dense/kernel/1", "f32[4,10]")])
    log.compiled("__inference_one_step_on_data_2", "f32[8,4]", variables=[("dense_1/kernel/9", "f32[4,10]")])
    log.compiled("__inference_one_step_on_data_3", "f32[9,4]", "s32[9]", variables=[("dense/kernel/1", "f32[4,10]")])
    assert [event.cause for event in log.parse()] == ["its first compilation here"] * 3


def test_loops_report_inside_of_what_they_are_in():
    log = Log().start("__inference_f_1").inputs("f32[3]").start("while_body_7").inputs("s32[]", "f32[3]")
    (event,) = log.end(20.0).parse()
    assert (event.function, event.inputs) == ("f", {0: "float32 (3,)"})


def test_threads_that_compile_at_once():
    log = Log().start("f_1", thread=1).start("g_2", thread=2).inputs("f32[1]", thread=1).inputs("f32[2]", thread=2)
    events = log.end(20.0, thread=2).end(20.0, thread=1).parse()
    assert [(event.function, event.inputs[0]) for event in events] == [("g", "float32 (2,)"), ("f", "float32 (1,)")]


def test_what_is_no_compilation_is_not_counted():
    failed = Log().start("f_1").end(20.0)  # an operation that XLA does not know
    assert failed.parse() == []
    assert Log().end(0.0).parse() == []  # a cluster that is not compiled yet
    shown = Log().start("__inference_shown_1").inputs("f32[9]")  # experimental_get_compiler_ir()
    shown.start("f_2").inputs("f32[4]").end(0.35)
    assert [event.function for event in shown.parse()] == ["f"]
    assert LogParser(History()).parse(["", "no log line", "I0000 nor this", "\0" + "7\0"]) == []


def test_an_end_that_a_busy_machine_stamps_late():
    log = Log().start("f_1").inputs("f32[4]")
    log.now += 1.0
    assert len(log.end(0.3).parse()) == 1


def test_pieces_of_the_log_are_read_as_they_come():
    lines = Log().compiled("f_1", "f32[4]").lines
    reports = LogParser(History())
    assert [len(reports.parse([line])) for line in lines] == [0, 0, 0, 1]


def test_shapes_in_words():
    assert readable("f32[]") == "float32 ()"
    assert readable("bf16[32,4]{1,0}") == "bfloat16 (32, 4)"
    assert readable("pred[7]") == "bool (7,)"
    assert readable("(f32[3], s32[])") == "(f32[3], s32[])"
    assert sizes("float32 (32, 4)") == ("32", "4")
    assert sizes("float32 ()") == sizes("int") == ()
