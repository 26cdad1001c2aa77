"""Follows the lines of a remedy in a script, to the letter, as tfopt/diagnosis/remedies.py says that they are meant."""

import ast
import re
import textwrap


def remedied(script: str, remedy: str) -> str:
    """The script with the lines of a remedy in it."""
    lines = remedy.splitlines()
    while lines:
        line = lines.pop(0)
        if found := re.fullmatch(r"# Before (.+):", line):
            script = _replaced(script, found[1], lines.pop(0), keep=True)
        elif found := re.fullmatch(r"# Instead of (.+):", line):
            script = _replaced(script, found[1], lines.pop(0))
        elif found := re.fullmatch(r"# First in (.+):", line):
            block, lines = lines, []
            for method in found[1].split(" and "):
                script = _begun(script, method, block)
        elif found := re.fullmatch(r"([\w.]+)\((.*\.\.\..*)\)(?:  # (?:without (.*)|.*))?", line):
            script = _called(script, found[1], found[2], found[3])
        elif not line.startswith("#"):
            tree = ast.parse(script)
            (place,) = (at for at, one in enumerate(tree.body) if "model.fit(" in ast.unparse(one))
            tree.body[place:place] = ast.parse(line).body
            script = ast.unparse(tree)
    return script


def _replaced(script, call, new, keep=False):
    """The script with a call, which must be there once, replaced, or kept behind what is new."""
    begin = call.removesuffix(")").removesuffix("...")
    assert script.count(begin) == 1, f"{call} is there {script.count(begin)} times"
    start = script.index(begin)
    end, depth = start + begin.index("(") + 1, 1
    while depth:
        depth += {"(": 1, ")": -1}.get(script[end], 0)
        end += 1
    return script[:start] + new + script[start if keep else end :]


def _begun(script, method, block):
    """The script with a block at the beginning of a method."""
    tree = ast.parse(script)
    kind, name = method.split(".")
    owner = next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == kind)
    function = next(one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == name)
    given = ast.parse(textwrap.dedent("def f():\n" + textwrap.indent("\n".join(block), "    "))).body[0]
    function.body[:0] = given.body
    return ast.unparse(tree)


def _called(script, name, arguments, without):
    """The script with other arguments in a call."""
    tree = ast.parse(script)
    names = re.compile(rf"(.*\.)?{re.escape(name)}")
    (call,) = (one for one in ast.walk(tree) if isinstance(one, ast.Call) and names.fullmatch(ast.unparse(one.func)))
    given = ast.parse(f"f({arguments})").body[0].value
    positional = [one for one in given.args if not (isinstance(one, ast.Constant) and one.value is ...)]
    call.args = positional or call.args
    gone = {one.arg for one in given.keywords} | set((without or "").split(", "))
    call.keywords = [one for one in call.keywords if one.arg not in gone] + given.keywords
    return ast.unparse(tree)
