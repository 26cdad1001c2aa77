import pytest

from tfopt.pipelines.shared.nondeterminism import kind_of_operation


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("random", "Timestamp NonDeterministicInts RngSkip StatefulUniform CudnnRNN RandomGamma Multinomial"),
        ("random", "ShuffleDatasetV3 SampleDistortedBoundingBoxV2 AnonymousSeedGenerator UniformCandidateSampler"),
        ("assigning", "AssignAddVariableOp ResourceScatterNdMax LookupTableInsertV2 ResourceStridedSliceAssign"),
        (None, "StatefulPartitionedCall StatelessRandomUniformV2 Print MapDataset LookupTableFindV2 __inference_f_1"),
    ],
)
def test_the_kind_of_an_operation_follows_from_its_registration(kind, names):
    assert {name: kind_of_operation(name) for name in names.split()} == dict.fromkeys(names.split(), kind)
