"""How `pytest -n 2` shares the tests out."""

from xdist.scheduler import LoadScopeScheduling


class ByFile(LoadScopeScheduling):
    """A worker takes a whole file, and one takes all of tests/bench: they share a recorded run.

    Where a worker dies, the next one goes on behind the test that killed it. Left to itself, xdist would begin that
    test again and again, or wait for ever.
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return "tests/bench" if file.startswith("tests/bench/") else file

    def remove_node(self, node):
        files = self.assigned_work[node]
        left = [(tests, test) for tests in files.values() for test, done in tests.items() if not done]
        for tests, test in left[:1]:
            tests[test] = True
        self.assigned_work[node] = {file: tests for file, tests in files.items() if not all(tests.values())}
        super().remove_node(node)
        return left[0][1] if left else None

    def schedule(self):
        super().schedule()
        for node in self.nodes:  # a worker that has one test waits for the next
            self._reschedule(node)
