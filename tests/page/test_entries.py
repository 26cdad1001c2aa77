from tfopt.page import entries


def test_nested_values_become_rows():
    values = {"python": "3.11", "host": {"cpus": 2.0, "name": None}, "gpus": [{"index": 0}], "variables": {}}
    assert entries(values) == [
        ("python", "3.11"),
        ("host.cpus", "2.0"),
        ("host.name", "unknown"),
        ("gpus", '[{"index": 0}]'),
    ]
