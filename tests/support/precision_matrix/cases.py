"""The table: every case of the matrix by group."""

import keras

from precision_matrix import gradients, image_nets, nets, own_steps, sequence_nets, structures
from precision_matrix.case import HALVES, Case
from precision_matrix.formulas import FORMULAS, between_layers, in_a_block, in_a_layer, in_its_call
from precision_matrix.published_nets import APPLICATIONS, HUB
from precision_matrix.structures import trained

F16, BF16 = HALVES
TRAINED = None
"""The truth of cases that both_ways.py trains."""
SMALL = (*nets.HEALTHY, *image_nets.HEALTHY, *sequence_nets.HEALTHY)
AFTER_TRAINING = (
    nets.mlp,
    image_nets.conv_net,
    image_nets.residual_net,
    image_nets.normalisations,
    sequence_nets.encoder,
)


def healthy(named, policies=HALVES):
    return [
        Case(name=name, make=make, policy=policy, verdict="pass", truth=TRAINED)
        for name, make in named
        for policy in policies
    ]


def _formula_cases(name, formula):
    """In a layer under both policies; where one is wrong, in other places too, and in float32 by a mapping."""
    found = []
    for policy in HALVES:
        wrong = policy.removeprefix("mixed_") in formula.wrong_in.split()
        truth = "the formula alone, in 16 bits and in float64"
        verdict, names = ("fail", ("planted",)) if wrong else ("pass", ())
        found.append(_case(name, in_a_layer(formula), policy, verdict, truth, names))
        if name in ELSEWHERE and wrong:
            mapping = {".*": policy, "planted": "float32"}
            kept = "float32 is its own reference"
            found += [
                _case(f"{name}, in a block", in_a_block(formula), policy, "fail", truth, ("block/",)),
                _case(f"{name}, in call", in_its_call(formula), policy, "fail", truth),
                _case(
                    f"{name}, between layers", between_layers(formula), {}, "fail or refuse", truth, made_under=policy
                ),
                _case(f"{name}, in float32 beside {policy}", in_a_layer(formula), mapping, "pass", kept),
            ]
            if name in BY_DTYPE:
                built = "the operations keep the dtype that their input had when the model was made, float32"
                found.append(_case(f"{name}, between layers", between_layers(formula), policy, "pass", built))
    return found


ELSEWHERE = ("positions of 1,024", "years", "running mean", "variance from squares", "mask of -1e9 that is added")
BY_DTYPE = ("positions of 1,024", "mask of -1e9 that is added")
"""Formulas that ask their input for its dtype."""


def _case(name, make, policy, verdict, truth, names=(), made_under="float32"):
    return Case(name=name, make=make, policy=policy, verdict=verdict, truth=truth, names=names, made_under=made_under)


def _ids():
    count = "the ids that the embedding gets, beside those of the batch"
    found = []
    for policy in HALVES:
        for made, asked in ((policy, {}), (policy, policy), ("float32", policy)):
            for vocabulary in (5000, 200):
                name = f"ids below {vocabulary} without an Input"
                make = structures.ids_without_an_input(vocabulary)
                found.append(_case(name, make, asked, "by ids", count, made_under=made))
        kinds = (structures.ids_with_an_input, structures.ids_reshaped, structures.ids_into_a_subclassed_model)
        for vocabulary in (200, 2000, 2500):
            for kind in kinds:
                name = f"{kind.__name__.replace('_', ' ')} as floats, below {vocabulary}"
                found.append(_case(name, kind(vocabulary, "float32"), policy, "by ids", count))
        make = structures.ids_with_an_input(5000, "int64")
        found.append(_case("ids of int64", make, policy, "pass", "whole numbers are not cast"))
    return found


def _heads():
    late = "a probability of 16 bits is zero or one where float32's is not; docs/precision.md"
    found = []
    for policy in HALVES:
        for name, make in structures.LATE.items():
            found.append(_case(name, make, {}, "fail", late, made_under=policy))
        for name, make in structures.HEADS.items():
            found.append(_case(name, make, {}, "fail", late, made_under=policy))
            found.append(_case(name, make, policy, "fail", "and stock Keras trains it so", made_under=policy))
        for name, make in structures.LOGITS.items():
            found.append(_case(name, make, {}, "pass", TRAINED, made_under=policy))
    return found


def _ranges():
    found = []
    for value, wrong in ((1e6, (F16,)), (1e3, ()), (1e38, HALVES)):
        for policy in HALVES:
            right = "fail" if policy in wrong else "pass"
            truth = "float16 ends at 65504, bfloat16 at 3.4e38; the layer's values are some 2.5 times as large"
            if value == 1e38 and policy == BF16:
                continue  # float32 ends there, too
            found.append(_case(f"values of {value:g}", structures.loud(value), policy, right, truth, ("loud",)))
    for policy in HALVES:
        right = "fail" if policy == F16 else "pass"
        truth = "10⁵ times a weight times a feature, of which several are added, is beyond 65504 of float16"
        found.append(_case("weights that grew", structures.loud_weights, policy, right, truth, ("up",)))
    for factor, right in ((1e-13, "fail"), (1e-3, "pass")):
        truth = "2¹⁵ times the factor, beside float16's smallest number of 6e-8"
        make = structures.faint_branch(factor)
        found.append(_case(f"a branch of {factor:g}", make, F16, right, truth, ("branch",)))
        found.append(_case(f"a branch of {factor:g}", make, BF16, "pass", "the range of float32"))
    return found


def _values():
    found = []
    count = "whole numbers from 1,024 on are 8 apart in bfloat16"
    for policy in HALVES:
        wrong = "fail" if policy == BF16 else "pass"
        make = structures.years_and(keras.layers.BatchNormalization)
        found.append(_case("years through batch norm", make, policy, wrong, count))
        make = structures.years_and(keras.layers.Normalization)
        found.append(_case("years through Normalization", make, policy, "pass", "apply leaves it in float32"))
        found.append(_case("years through Normalization", make, {}, wrong, count, made_under=policy))
        found.append(_case("years into buckets", structures.years_into_buckets, policy, wrong, count))
        truth = "seconds from 1.6e9 on are 8e6 apart in bfloat16 and infinite in float16"
        found.append(_case("seconds as integers", structures.seconds_as_integers, policy, "fail", truth, ("days",)))
        found.append(_case("converged", structures.converged, policy, "pass", "the loss is below 0.01 in both"))
    truth = "1e-12 is zero in float16, and the root's gradient at zero infinite"
    found.append(_case("root of squares", structures.root_of_squares, F16, "fail", truth))
    found.append(_case("root of squares", structures.root_of_squares, BF16, "pass", "the range of float32"))
    return found


def _states():
    found = []
    stuck = "1 times the momentum, rounded, plus (1 - momentum) times a mean below 1, rounded, is 1"
    for policy in HALVES:
        for momentum, autocast, right, truth in (
            (0.9999, True, "fail", stuck),
            (0.9999, False, "pass", "the average is computed in float32"),
        ):
            name = f"moving average, {'of its dtype' if autocast else 'of float32'}"
            make = structures.moving_average(momentum, autocast=autocast)
            found.append(_case(name, make, policy, right, truth, ("averaged",)))
        largest = {F16: 2048, BF16: 256}[policy]
        truth = f"{largest} + 1 is {largest} in {policy.removeprefix('mixed_')}"
        found.append(_case("counter that is full", structures.counter(largest), policy, "fail", truth, ("counting",)))
        found.append(_case("counter of integers", structures.counter(5000, "int32"), policy, "pass", "not cast"))
    return found


def _long_runs():
    """States that are right in each of the first steps, and weights that are of 16 bits."""
    found = []
    for policy in HALVES:
        for name, update in structures.SUMS.items():
            truth = "256 + 1 is 256 in bfloat16, 2,048 + 1 is 2,048 in float16"
            found.append(
                _case(name, structures.counter(0, update=update), policy, "fail", truth, ("counting", "count"))
            )
        for name, update in structures.NO_SUMS.items():
            found.append(_case(name, structures.counter(0, update=update), policy, "pass", "it stays below 100"))
        alone = structures.counter(0, autocast=False)
        found.append(_case("counter without autocast", alone, policy, "pass", "it adds in float32"))
        truth = "1 + 1e-3 is 1 in bfloat16, 1 + 1e-4 in float16: Adam cannot move it"
        names = ("half/scale",)
        found.append(_case("one weight of 16 bits", structures.one_half, {}, "fail", truth, names, made_under=policy))
        found.append(_case("one weight of 16 bits", structures.one_half, policy, "pass", "it is made of float32"))
    return found


SPOILED = {"LayerScale": (F16,), "broadcast bias": (F16,)}
"""Where a sum over positions is wrong on a CPU without XLA, if not in bfloat16."""


def _gradients():
    found = []
    for policy in HALVES:
        for name, (part, shape) in gradients.PARTS.items():
            wrong = policy in SPOILED.get(name, (BF16,))
            make = gradients.learned_by(part, shape)
            truth = "test_truth.py trains it both ways"
            found.append(_case(name, make, policy, "fail" if wrong else "pass", truth, ("part",) if wrong else ()))
            make = gradients.learned_by(part, shape, keras.optimizers.Adam)
            found.append(_case(f"{name}, Adam", make, policy, "pass", "and Adam hides what is lost of a length"))
        make = gradients.learned_by(gradients.clipped, (4,))
        wrong = policy == F16
        truth = "2¹⁵ times a gradient is clipped to 1, and divided by 2¹⁵"
        found.append(_case("clip", make, policy, "fail" if wrong else "pass", truth, ("clip",) if wrong else ()))
    truth = "gradients multiplied by 2¹⁵ are clipped to a norm of 1, and divided by 2¹⁵"
    make = own_steps.own("clipped", own_steps.healthy_body)
    return [*found, _case("own step, clips what is scaled", make, F16, "fail", truth, ("train_step",))]


def _scales():
    lost = "the gradient is 10⁻⁶ of some 10⁻² and less, below half of float16's smallest number of 6e-8"
    own, faint, plain = own_steps.own, own_steps.faint, lambda: keras.optimizers.Adam(3e-3)
    fixed = own_steps.healthy_body
    found = [
        _case("faint gradient", faint(), F16, "pass", "2¹⁵ times that is above"),
        _case("faint gradient", faint(), BF16, "pass", "the range of float32"),
        _case("faint gradient, not scaled", faint(auto_scale_loss=False), F16, "fail", lost, ("body",)),
        _case("faint gradient, not scaled", faint(auto_scale_loss=False), BF16, "pass", "the range of float32"),
        _case("own step", own("scaled"), F16, "pass", "2¹⁵ times that is above"),
        _case("own step", own("scaled", optimizer=plain), BF16, "pass", "the range of float32"),
        _case("own step, scaled by hand", own("by hand"), F16, "pass", "2¹⁵ times that is above"),
        _case("own step, scaled by a constant", own("by a constant", optimizer=plain), F16, "pass",
              "1,024 times that is above"),
        _case("own step, scaled by a constant that suffices", own("by a constant", fixed, optimizer=plain), F16, "pass",
              TRAINED),
        _case("own step, not scaled", own("not"), F16, "fail or refuse", "divided by a scale never multiplied by"),
        _case("own step, result dropped", own("dropped"), F16, "fail or refuse",
              "divided by a scale never multiplied by"),
        _case("own step, not scaled", own("not", optimizer=plain), BF16, "pass", "nothing to scale"),
        _case("GAN, faint, plain optimizers", own_steps.faint_gan(scaled=False), F16, "fail or refuse", lost),
        _case("GAN, faint", own_steps.faint_gan(scaled=True), F16, "pass", "2¹⁵ times that is above"),
        _case("GAN, plain optimizers", own_steps.gan(), BF16, "pass", "the range of float32"),
        _case("GAN", own_steps.scaling_gan, F16, "pass", TRAINED),
        _case("GAN, by a mapping", own_steps.scaling_gan, {"generator": F16, "discriminator": F16}, "pass", TRAINED),
        _case("GAN, half of it", own_steps.gan(), {"generator": BF16}, "pass", TRAINED),
    ]  # fmt: skip
    for policy in HALVES:
        found.append(_case("contrastive", own_steps.contrastive, policy, "pass", TRAINED))
        found.append(_case("gradient penalty", own_steps.penalty, policy, "pass", TRAINED))
    return found


def _refused():
    found = []
    for policy in HALVES:
        found += [
            _case("Cholesky", structures.factorised, policy, "refuse", "TensorFlow has no kernel for 16 bits",
                  ("actorised",)),
            _case("added loss of 16 bits", structures.penalised, policy, "refuse", "stock fit raises a TypeError",
                  ("penalised adds a 16-bit loss",)),
            _case("NaN in the data", structures.not_finite, policy, "refuse", "planted", ("Clean the data",)),
            _case("NaN in a weight", structures.diverged, policy, "refuse", "planted", ("finite weights",)),
        ]  # fmt: skip
    found.append(_case("weights of 16 bits", nets.mlp, {}, "refuse", "no float32 weights", made_under="bfloat16"))
    found.append(_case("nothing to quantize", structures.without_products, "float8", "refuse", "no Dense layers"))
    return found


def _float8():
    makes = (nets.mlp, nets.autoencoder, nets.several, sequence_nets.encoder, sequence_nets.decoder)
    return [_case(make.__name__, make, "float8_from_mixed_bfloat16", "pass", TRAINED) for make in makes]


def _applications():
    """The large ones in one dtype only: float16's convolutions take a minute on a CPU."""
    large = ("ResNet50", "EfficientNetB0")
    found = healthy((name, make) for name, make in APPLICATIONS.items() if name not in large)
    return [*found, *healthy(((name, APPLICATIONS[name]) for name in large), [BF16])]


def _hub():
    found = healthy((name, make) for name, make in HUB.items() if name not in ("T5", "Mixtral"))
    two = "in training, its experts multiply 16 bits by float32, which TensorFlow refuses in stock Keras too"
    for policy in HALVES:
        found.append(_case("Mixtral", HUB["Mixtral"], policy, "refuse", two, ("mixtral_sparse_moe_block",)))
    mask = "it adds (1 - mask) times -1e9, which is 0 times infinity in float16: its predictions are NaN"
    return [*found, _case("T5", HUB["T5"], F16, "fail", mask), _case("T5", HUB["T5"], BF16, "pass", TRAINED)]


HEALTHY = [
    *healthy((make.__name__, make) for make in SMALL),
    *healthy((f"{make.__name__} after training", trained(make)) for make in AFTER_TRAINING),
    *_float8(),
]
OF_HUB = _hub()
"""Cases that need KerasHub, which no extra installs."""
PUBLISHED = [*_applications(), *OF_HUB]
COMPUTED = [case for name, formula in FORMULAS.items() for case in _formula_cases(name, formula)]
GRADIENTS = _gradients()
PLANTED = [
    *_ids(),
    *_heads(),
    *_ranges(),
    *_values(),
    *_states(),
    *_long_runs(),
    *GRADIENTS,
    *_scales(),
    *_refused(),
]
ALL = [*HEALTHY, *PUBLISHED, *COMPUTED, *PLANTED]
