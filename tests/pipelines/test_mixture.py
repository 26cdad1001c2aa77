"""`mix`: which examples come, in which order and how often, against counting them; and what it says and refuses."""

import itertools
import math
from fractions import Fraction
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from iterations import contents, noting, read_from, three_epochs
from part_sources import COUNT, NAMES, source
from quick import first_quick

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import RandomCrop, Source, files, mix, per_batch, plan_pipeline, profile_pipeline
from tfopt.pipelines.inspection import facts
from tfopt.pipelines.plan import plan_of
from tfopt.pipelines.sources import parts
from tfopt.pipelines.stages import batch_stages
from tfopt.warn import forget_warnings

SMALL = 30
NUMBERS = {"a": np.arange(COUNT), "b": 1000 + np.arange(SMALL)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns the folder of their files."""
    return tmp_path_factory.mktemp("sources")


def flat(batches):
    return [int(number) for batch in batches for number in np.ravel(batch)]


def turns_of_two(share, count):
    """Whose turn each of the first `count` is: 0 for the part with this share, at least a half, 1 for the other."""
    have = [math.floor(share * turns + Fraction(1, 2)) for turns in range(count + 1)]
    return [int(before == after) for before, after in pairwise(have)]


def expected_turns(counts, share, stop):
    """The turns of an epoch, found by playing it."""
    read, turns = [0, 0], []
    for turn in turns_of_two(share, 1000):
        over = read[turn] == counts[turn] if stop == "first" else all(map(np.greater_equal, read, counts))
        if over:
            return turns
        read[turn] += 1
        turns.append(turn)
    raise AssertionError


def readings(numbers, count):
    return [numbers[at : at + count] for at in range(0, len(numbers), count)]


MIXED = itertools.product(
    ["first", "all"], [(0.7, 0.3), (0.5, 0.5), (2, 1)], [None, "memory", "./cache", "auto"], [None, 3]
)


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "weights", "cache", "seed"), first_quick(MIXED, 2, every=5))
def test_each_part_is_read_in_its_turns(stop, weights, cache, seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"batch_size": 8, "remainder": "keep", "seed": seed, "cache": cache, "transform": lambda x: x + 0}
    plan = mix([(NUMBERS["a"], weights[0]), (NUMBERS["b"], weights[1])], stop=stop, **options)
    dataset = plan.build()
    share = Fraction(str(weights[0])) / sum(map(Fraction, map(str, weights)))
    expected = expected_turns((COUNT, SMALL), share, stop)
    assert plan.to_dict()["count"] == len(expected)
    assert len(dataset) == plan.to_dict()["steps_per_epoch"] == -(-len(expected) // 8)
    epochs = [flat(dataset) for _ in range(3)]
    for epoch in epochs:
        assert [int(number >= 1000) for number in epoch] == expected
        for part, (count, first) in enumerate(((COUNT, 0), (SMALL, 1000))):
            own = [number - first for number in epoch if int(number >= 1000) == part]
            whole = readings(own, count)
            assert all(len(set(each)) == len(each) and set(each) <= set(range(count)) for each in whole)
            assert len({tuple(each) for each in whole}) == len(whole)
            assert stop == "first" or len(own) >= count
    assert len({tuple(epoch) for epoch in epochs}) == 3
    if seed is not None:
        again = mix([(NUMBERS["a"], weights[0]), (NUMBERS["b"], weights[1])], stop=stop, **options).build()
        assert [flat(again) for _ in range(3)] == epochs


@pytest.mark.slow
def test_the_order_of_a_cache_is_that_without_memory(free_memory):
    """cache="auto" decides by free memory, and under a seed nothing may depend on that."""

    def planned():
        options = {"batch_size": 8, "seed": 3, "transform": lambda x: x + 0, "remainder": "keep"}
        return mix([(NUMBERS["a"], 0.5), (NUMBERS["b"], 0.5)], stop="all", **options)

    roomy = planned()
    free_memory(0.0)
    tight = planned()
    assert [part["cache"] for plan in (roomy, tight) for part in plan.to_dict()["parts"]] == ["memory"] * 2 + [None] * 2
    ours, theirs = roomy.build(), tight.build()
    assert [flat(ours) for _ in range(2)] == [flat(theirs) for _ in range(2)]


def test_caches_share_the_memory_that_one_may_take(free_memory):
    rows = np.zeros((1000, 2**10), "uint8")  # of 0.98 MiB, and a cache takes a quarter
    free_memory(5.0)
    plan = mix([(rows, 1), (rows, 1), (rows, 1)], transform=lambda row: row + 1, batch_size=8, seed=1)
    assert [part["cache"] for part in plan.to_dict()["parts"]] == ["memory", None, None]
    assert "other parts take 1,000.0 KiB" in next(
        one.reason for one in plan.stage("part 2").within() if one.name == "cache"
    )


@pytest.mark.slow
def test_parts_keep_what_is_their_own():
    """Transform, cache, augment and split of each; of plans, batch_size and remainder are not used."""
    kept = plan_pipeline(
        NUMBERS["a"], batch_size=50, transform=lambda x: -x, cache="memory", augment=lambda x: x - 1, split=0.1, seed=5
    )
    options = {"batch_size": 4, "transform": lambda x: x + 7, "augment": lambda x: 2 * x, "remainder": "keep"}
    plan = mix([(kept, 0.5), (NUMBERS["b"], 0.5)], **options)
    assert [part["cache"] for part in plan.to_dict()["parts"]] == ["memory"] * 2
    found = flat(plan.build())
    allowed = {2 * (-number - 1) for number in flat(plan_pipeline(NUMBERS["a"], split=0.1).build())}
    ours, theirs = [n for n in found if n < 0], [n for n in found if n > 0]
    assert sorted(theirs) == [2 * (1000 + number + 7) for number in range(SMALL)]
    assert len(ours) == len(set(ours)) >= SMALL
    assert set(ours) <= allowed


def test_without_a_shuffle_shorter_parts_are_read_again_in_their_order():
    """The remainder of a plan is not used."""
    for first in (np.arange(3), tf.data.Dataset.range(3), plan_pipeline(np.arange(3), batch_size=2, training=False)):
        for cache in (None, "memory"):
            options = {"training": False, "cache": cache}
            second = plan_pipeline(10 + np.arange(7), batch_size=4, **options, remainder="drop")
            found = flat(mix([(first, 1), (second, 1)], batch_size=2, **options, stop="all").build())
            assert [n for n in found if n >= 10][:7] == list(range(10, 17))
            assert [n for n in found if n < 10] == [0, 1, 2, 0, 1, 2, 0][: len(found) - 7]
            assert len(found) in (13, 14)


@pytest.mark.slow
def test_seeds_differ_between_parts_and_those_of_plans_are_kept():
    same = np.arange(40)

    def order(part, seed):
        found = flat(mix([(part, 1), (100 + same, 1)], batch_size=8, seed=seed).build())
        return [n for n in found if n < 100], [n - 100 for n in found if n >= 100]

    assert order(same, 1)[0] != order(same, 1)[1]
    assert order(same, 1)[0] != order(same, 2)[0]
    assert order(plan_pipeline(same, seed=7), 1)[0] == order(plan_pipeline(same, seed=7), 2)[0]
    assert order(plan_pipeline(same), 1) == order(plan_pipeline(same), 1)


@pytest.mark.slow
def test_the_last_batch(caplog):
    forget_warnings()
    sources = [(np.arange(70), 0.7), (np.arange(30), 0.3)]
    assert [len(mix(sources, batch_size=32, remainder=each).build()) for each in ("drop", None, "keep")] == [3, 3, 4]
    padded = mix([((np.arange(70.0), np.arange(70)), 1)], batch_size=32, remainder="pad", training=False).build()
    assert [float(weights[-1]) for *_, weights in padded] == [1.0, 1.0, 0.0]
    assert "4 of 100 examples are left out, different ones in each epoch" in caplog.text
    with pytest.raises(PipelineError, match="at least batch_size=101"):
        mix(sources, batch_size=101, remainder="drop")


def test_an_augment_of_batches_gets_mixed_ones():
    def span(batch, seed):
        return tf.reduce_max(batch) - tf.reduce_min(batch) + 0 * tf.cast(seed[0], tf.int64)

    plan = mix([(NUMBERS["a"], 0.5), (NUMBERS["b"], 0.5)], batch_size=8, seed=1, augment=per_batch(span))
    assert min(flat(plan.build())) > 800


@pytest.mark.slow
def test_endless_and_unknown_parts():
    endless = tf.data.Dataset.range(5).repeat()
    plan = mix([(endless, 1), (100 + np.arange(20), 1)], batch_size=8, seed=1, remainder="keep")
    assert plan.to_dict()["count"] in (40, 41)
    assert int(mix([(endless, 1), (endless, 1)], batch_size=8).build().cardinality()) == tf.data.INFINITE_CARDINALITY
    unknown = tf.data.Dataset.range(50).filter(lambda number: number >= 40)
    plan = mix([(unknown, 1), (100 + np.arange(20), 1)], batch_size=8, seed=1)
    assert int(plan.build().cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert plan.to_dict()["steps_per_epoch"] is None
    assert sum(n < 100 for n in flat(plan.build())) == 10
    with pytest.raises(UnsupportedError, match="known number of examples in each part for stop='all'"):
        mix([(unknown, 1), (NUMBERS["a"], 1)], stop="all")


POSITIONS = [(0, 3), (2, 40), (1, 17), (0, 0), (1, 0), (3, 21), (1, 99)]


def noisy(number, seed):
    return number, tf.random.stateless_uniform((), seed)


def shifted(number, noise, seed):
    return number, noise + tf.random.stateless_uniform((), seed)


CACHES = [None, "memory", "auto", "./cache"]
# Each source with both ends, with and without a shuffle; each position and cache with several sources.
MOVED = [
    (NAMES[name], POSITIONS[(name + shuffle) % len(POSITIONS)], ["all", "first"][(name + shuffle) % 2], cache, shuffle)
    for name, shuffle in itertools.product(range(len(NAMES)), [True, False])
    for cache in [CACHES[(name + 2 * shuffle) % len(CACHES)]]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "position", "stop", "cache", "shuffle"), MOVED)
def test_a_position_leads_to_the_same_batches(sources, name, position, stop, cache, shuffle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_of, to_number = source(sources, name)

    def planned(cache):
        own = {"transform": lambda *raw: to_number(*raw) if to_number else raw[0] + 0, "augment": noisy}
        own |= {"shuffle": shuffle, "cache_key": "numbers"}
        plans = [plan_pipeline(data, cache=cache, **own) for data in (made_of, made_of)]
        small = plan_pipeline(NUMBERS["b"], batch_size=7, **own | {"transform": None, "cache": None})
        weighed = [(plans[0], 0.5), (plans[1], 0.2), (small, 0.3)]
        return mix(weighed, stop=stop, batch_size=8, seed=3, augment=[shifted, per_batch(shifted)], remainder="keep")

    dataset = planned(cache).build()
    steps = len(dataset)
    epoch, batch = position[0], min(position[1], steps)
    expected = read_from(dataset, epoch, batch)
    assert [len(each) for each in expected] == [steps - batch, steps, steps]
    assert expected[1] != expected[2]
    if cache == "./cache":  # one that is not written yet
        monkeypatch.chdir(tmp_path.parent)
        cache = str(tmp_path / "another")
    moved = planned(cache).at(9).at(epoch, batch).build()
    assert moved.element_spec == dataset.element_spec
    assert len(moved) == steps
    assert three_epochs(moved) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", first_quick([{"bucket": True}, {"pad": "batch"}]))
def test_examples_of_different_lengths_are_padded_together(options):
    random = np.random.default_rng(0)
    documents = [[[first + at] * int(random.integers(1, 30)) for at in range(60)] for first in (100, 500)]
    plan = mix([(documents[0], 1), (documents[1], 2)], stop="all", batch_size=3, seed=1, remainder="keep", **options)
    dataset = plan.build()
    found = [[number for number in row if number] for batch in dataset for row in batch.numpy().tolist()]
    assert len(found) == plan.to_dict()["count"]
    for own in documents:
        assert all(document in found for document in own)
    expected = read_from(plan.build(), 1, 7)
    assert three_epochs(plan.at(1, 7).build()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("stop", first_quick(["all", "first"]))
def test_crops_and_functions_of_many_are_those_of_their_places(photos, stop):
    crop = plan_pipeline(photos, crop=RandomCrop(4), batch_size=3, cache="memory")
    rows = np.random.default_rng(0).integers(0, 255, (31, 4, 4, 3)).astype("uint8"), np.arange(31, dtype="int32")
    many = plan_pipeline(rows, transform=per_batch(lambda x, y: (x // 3, y)), batch_size=7, cache=None)
    plan = mix([(crop, 2), (many, 1)], stop=stop, batch_size=5, seed=1, remainder="keep")
    expected = read_from(plan.build(), 1, 2)
    assert three_epochs(plan.at(1, 2).build()) == expected


@pytest.mark.slow
def test_how_far_an_epoch_is_read_changes_nothing_in_later_ones():
    """Also where parts are read several times, and batches are made ahead."""
    options = {"stop": "all", "seed": 3, "batch_size": 2, "cache": "memory", "transform": lambda x: x + 0}
    weighed = [(NUMBERS["a"], 1), (np.arange(-3, 0), 3)]
    whole, partly = (mix(weighed, **options).build() for _ in range(2))
    flat(whole)
    next(iter(partly))
    flat(partly.take(20))
    flat(whole)
    assert flat(whole) == flat(partly)


def counting(calls):
    """A source that is read by position, and notes which rows it is asked for."""

    numbers = tf.data.Dataset.range(COUNT)
    return Source(name="rows", dataset=lambda: numbers, count=COUNT, at=lambda positions: positions.map(noting(calls)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_nothing_before_the_position_is_read(shuffle):
    calls = []
    rows = plan_pipeline(counting(calls), cache=None, shuffle=shuffle)
    plan = mix([(rows, 1), (-np.arange(1, 500), 5)], batch_size=8, seed=1, remainder="keep")
    moved = plan.at(1, 30).build()
    calls.clear()
    found = flat(itertools.islice(moved, 3))
    read = set(calls)
    assert {number for number in found if number >= 0} <= read
    whole = plan.build()
    flat(whole)
    epoch = flat(itertools.islice(whole, 33))
    assert found == epoch[240:]
    before = {number for number in epoch[:240] if number >= 0}
    assert len(before) == 40
    assert not before & read


def jittered(number):
    return number + tf.random.uniform((), 0, 2, tf.int64)


@pytest.mark.slow
@pytest.mark.parametrize("unseeded", [{}, {"shuffle": False, "augment": jittered}])
def test_what_would_not_be_the_same_has_no_position(unseeded):
    part = plan_pipeline(NUMBERS["a"], **unseeded)
    with pytest.raises(UnsupportedError, match="without a seed"):
        mix([(part, 1), (plan_pipeline(NUMBERS["b"], seed=1), 1)]).at(1)
    seeded = [(plan_pipeline(NUMBERS[name], seed=1), 1) for name in "ab"]
    assert mix(seeded).at(1).position.epoch == 1, "each brings its own"
    with pytest.raises(UnsupportedError, match="Found an `augment` without a seed"):
        mix(seeded, augment=lambda x: x + 1).at(1)


def test_a_seed_that_could_not_hold_is_refused():
    part = plan_pipeline(NUMBERS["a"], augment=jittered)
    with pytest.raises(ValueError, match="keyword `seed`"):
        mix([(part, 1), (NUMBERS["b"], 1)], seed=1)


def test_the_plan_shows_its_parts():
    part = plan_pipeline(NUMBERS["a"], transform=lambda x: x + 0, cache="memory", augment=noisy)
    other = plan_pipeline(NUMBERS["b"], augment=noisy, batch_size=10)
    plan = mix([(part, 0.7), (other, 0.3)], seed=1, batch_size=10, stop="all")
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Training pipeline over a mixture of arrays\n  part 1")
    said = " ".join(text.split())
    assert "70 % arrays: all 103 examples in each epoch; decode 10 at once; transform" in said
    assert "; cache memory; shuffle buffer of 103; augment noisy" in said
    assert "44 examples an epoch, 1.47 times its 30" in said
    assert "mixture stop='all' 147 examples an epoch, in a fixed order of turns" in said
    as_dict = plan.to_dict()
    assert [part["examples_per_epoch"] for part in as_dict["parts"]] == [103, 44]
    assert [stage["name"] for stage in as_dict["parts"][0]["stages"]][-1] == "augment"
    assert as_dict["parts"][0]["share"] == 0.7
    assert as_dict["options"]["batch_size"] == 10
    moved = " ".join(str(plan.at(1, 2)).split())
    assert "part 1: examples before it in its epoch are read for the cache, and dropped; part 2: examples" in moved


def test_fit_takes_as_many_steps_as_the_plan_says():
    data = {name: (numbers[:, np.newaxis].astype("float32"), numbers) for name, numbers in NUMBERS.items()}
    dataset = mix([(data["a"], 0.5), (data["b"], 0.5)], stop="all", batch_size=8, seed=1).build()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(dataset, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2 * len(dataset) == 2 * (2 * COUNT // 8)
    assert plan_of(dataset).options.batch_size == 8


def test_a_part_that_is_never_read_whole_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(facts, "SHUFFLE_MIB", 0)
    streamed = tf.data.Dataset.range(1000)
    mix([(streamed, 0.5), (NUMBERS["b"], 0.5)], batch_size=8, cache=None)
    assert "It reads 30 of its 1,000" in caplog.text or "It reads 31 of its 1,000" in caplog.text


@pytest.mark.slow
def test_a_profile_names_what_is_slow():
    slow = plan_pipeline(np.arange(100), transform=lambda x: tf.py_function(lambda y: y, [x], tf.int64), cache=None)
    plan = mix([(slow, 1), (np.arange(50), 1)], batch_size=8)
    profile = profile_pipeline(plan, 2)
    assert profile.examples_per_second > 0
    assert "transform" in [stage.name for stage in profile.stages]


NINE = np.arange(9)


@pytest.mark.parametrize(
    ("weighed", "options", "error", "message"),
    [
        ([], {}, TypeError, "list of pairs"),
        ((NINE, 1), {}, TypeError, "pairs of a part and its weight"),
        ([(NINE, 0)], {}, ValueError, "weight to be above 0"),
        ([(NINE, float("nan"))], {}, ValueError, "finite"),
        ([(NINE, True)], {}, TypeError, "a number"),
        ([(NINE, 1)], {"stop": "last"}, ValueError, "stop"),
        ([(NINE, 1)], {"batchsize": 2}, TypeError, "Did you mean batch_size"),
        ([(NINE, 1)], {"cache": "device"}, UnsupportedError, "cache='device' of the mixture"),
        ([(NINE, 1)], {"service": "grpc://a:1"}, UnsupportedError, "service='grpc://a:1' of the mixture"),
        ([(NINE, 1), (NINE * 1.0, 1)], {}, PipelineError, r"has int64 of shape \(\) at example; part 2"),
        ([(np.zeros((9, 2)), 1), (np.zeros((9, 3)), 1)], {}, PipelineError, r"\(2,\) at example; part 2 \(arrays\)"),
        ([({"a": NINE}, 1), (NINE, 1)], {}, PipelineError, r"has example\['a'\]; part 2"),
        # Plans that cannot be parts.
        (lambda: plan_pipeline(NINE, batch_size=3, cache="device"), {}, UnsupportedError, "'device' of part 1"),
        (lambda: plan_pipeline(NINE, batch_size=3, seed=1).at(1), {}, UnsupportedError, "part 1 at epoch 1"),
        (lambda: plan_pipeline(NINE, augment=per_batch(tf.abs)), {}, UnsupportedError, r"per_batch\(abs\) of part 1"),
        (lambda: mix([(NINE, 1)]), {}, UnsupportedError, "a mixture as part 1"),
        (lambda: plan_pipeline(NINE, training=False), {}, ValueError, "training=False of part 1"),
    ],
)
def test_what_cannot_be_mixed_is_refused(weighed, options, error, message):
    weighed = [(weighed(), 1)] if callable(weighed) else weighed
    with pytest.raises(error, match=message):
        mix(weighed, **{"batch_size": 4} | options)


def in_processes(monkeypatch, count, make):
    """Yields the plan that each of so many processes makes, as long as this one stands for it."""
    monkeypatch.setattr(batch_stages, "distributed", lambda dataset, part: dataset)
    for index in range(count):
        monkeypatch.setattr(parts, "_place", lambda index=index: (index, count))
        yield make()


def read_in_processes(monkeypatch, count, make):
    """The batches that each of so many processes reads, and their steps."""
    read = [
        ([batch.tolist() for batch in plan.build().as_numpy_iterator()], plan.to_dict()["steps_per_epoch"])
        for plan in in_processes(monkeypatch, count, make)
    ]
    return [batches for batches, _ in read], {steps for _, steps in read}


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "remainder"), first_quick(itertools.product(["all", "first"], ["keep", "drop"])))
def test_each_of_several_processes_mixes_its_parts(monkeypatch, stop, remainder):
    """Of the parts as of the whole: equal steps, each example once in a reading, and the same after a position."""
    epochs, steps = [], set()

    def make():
        weighed = [(NUMBERS["a"], 0.5), (plan_pipeline(NUMBERS["b"], batch_size=3), 0.5)]
        return mix(weighed, stop=stop, batch_size=9, seed=3, remainder=remainder)

    for plan in in_processes(monkeypatch, 3, make):
        dataset = plan.build()
        read = [contents(dataset) for _ in range(3)]
        steps |= {plan.to_dict()["steps_per_epoch"], *map(len, read)}
        moved = plan.at(1, 2).build()
        assert [contents(moved), contents(moved)] == [read[1][2:], read[2]]
        epochs.append([[n for (batch,) in epoch for n in batch] for epoch in read])
    assert len(steps) == 1
    for epoch in range(3):
        small = [[n for n in epochs[index][epoch] if n >= 1000] for index in range(3)]
        large = [n for index in range(3) for n in epochs[index][epoch] if n < 1000]
        assert not set(small[0]) & set(small[1])
        assert {len(set(each)) for each in small} == {SMALL // 3}
        assert len(set(large)) == (min(COUNT, len(large)))
    assert stop == "first" or remainder == "drop" or len(set(large)) == COUNT


def from_python(start, count):
    numbers = tf.data.Dataset.from_generator(
        lambda: iter(range(start, start + count)), output_signature=tf.TensorSpec((), tf.int64)
    )
    return numbers.apply(tf.data.experimental.assert_cardinality(count))


UNSHUFFLED = {
    "a batch of all": (2, "first", 256, lambda: [(np.arange(100), 0.5), (1000 + np.arange(100), 0.5)]),
    "read again": (2, "all", 12, lambda: [(np.arange(41), 0.3), (1000 + np.arange(5), 0.7)]),
    "a plan, cut off": (
        3,
        "first",
        12,
        lambda: [(plan_pipeline(np.arange(17), batch_size=3, training=False), 0.5), (1000 + np.arange(30), 0.5)],
    ),
    "not by position": (2, "all", 8, lambda: [(from_python(0, 20), 0.5), (from_python(1000, 7), 0.5)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(UNSHUFFLED))
def test_without_a_shuffle_processes_divide_each_batch(monkeypatch, name):
    """What one process reads: no example less, none twice, and in the same order."""
    processes, stop, batch_size, weighed = UNSHUFFLED[name]

    def make():
        return mix(weighed(), stop=stop, batch_size=batch_size, training=False)

    alone = [batch.tolist() for batch in make().build().as_numpy_iterator()]
    read, steps = read_in_processes(monkeypatch, processes, make)
    together = itertools.zip_longest(*read, fillvalue=[])
    assert [[*itertools.chain(*batches)] for batches in together] == alone
    assert steps == {len(alone)}


def test_a_part_in_order_is_dealt_out_where_others_are_shuffled(monkeypatch):
    def make():
        ordered = plan_pipeline(1000 + np.arange(10), batch_size=30, shuffle=False)
        return mix([(np.arange(10), 0.5), (ordered, 0.5)], batch_size=30, seed=1)

    read, steps = read_in_processes(monkeypatch, 2, make)
    assert sorted(flat(itertools.chain(*read))) == [*range(10), *range(1000, 1010)]
    assert steps == {1}


def test_a_part_smaller_than_the_processes_is_refused_by_all(monkeypatch):
    for index in range(2):
        monkeypatch.setattr(parts, "_place", lambda index=index: (index, 2))
        with pytest.raises(PipelineError, match=r"each part for each of 2 processes\. Found 1 in "):
            mix([(np.arange(9), 0.5), (np.arange(1), 0.5)], stop="all", batch_size=4)


def test_a_plan_from_outside_of_the_processes_is_refused(monkeypatch):
    alone = plan_pipeline(NUMBERS["b"], batch_size=3)
    monkeypatch.setattr(parts, "_place", lambda: (0, 3))
    with pytest.raises(UnsupportedError, match="planned where the mixture is"):
        mix([(NUMBERS["a"], 0.5), (alone, 0.5)], batch_size=9)


def test_one_label_stands_for_one_class(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        (tmp_path / path).write_text("contents")

    def named(*labels, classes=None):
        return files(paths, labels, classes=classes)

    animals = named("cat", "dog")
    options = {"batch_size": 2, "transform": lambda contents, label: label}
    with pytest.raises(PipelineError, match=r"label 0 for 'cat' in 2 files.* and for 'cow' in .*same `classes`"):
        mix([(animals, 1), (plan_pipeline(named("dog", "cow"), **options), 1)], **options)
    for other in (named("cat", "dog"), named("cat", "cow", classes=["cat", "dog", "cow"]), np.arange(2, dtype="int32")):
        mix([(animals, 1), (other, 1)], **options | {"transform": lambda *parts: parts[-1]})
